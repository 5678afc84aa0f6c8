"""The build_engine command with a program in trtllm-build's place."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fp8flow.config_engines import TrtllmEngine
from fp8flow.records import verify_record, write_record
from fp8flow.spec import Spec

SCRIPT = Path(__file__).parents[2] / "workflow" / "scripts" / "build_engine.py"
CLAIMS = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
PROGRAM = """#!{python}
import json, os, pathlib, sys, time
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
mode = os.environ.get("FAKE_BUILD", "")
print("[TRT-LLM] building", flags["--checkpoint_dir"], flush=True)
here = pathlib.Path(__file__).parent
(here / "started").write_text(str(os.getpid()) + " " + flags["--output_timing_cache"])
if mode == "fail":
    print("[TRT-LLM] [E] out of memory", flush=True)
    sys.exit(3)
if mode == "hang":
    child = os.fork()
    if child:
        (here / "child").write_text(str(child))
    time.sleep(600)
out = pathlib.Path(flags["--output_dir"])
source = json.loads((pathlib.Path(flags["--checkpoint_dir"]) / "config.json").read_text())
pathlib.Path(flags["--output_timing_cache"]).write_bytes(b"timings")
sizes = ("max_batch_size", "max_num_tokens", "max_seq_len", "max_input_len")
(out / "config.json").write_text(json.dumps({{
    "version": "1.0.0" if mode == "old" else "1.2.1",
    "pretrained_config": source,
    "build_config": {{size: int(flags["--" + size]) for size in sizes}},
}}))
for rank in range(int(flags["--workers"])):
    (out / f"rank{{rank}}.engine").write_bytes(b"engine")
"""


@pytest.fixture
def work(tmp_path):
    """A checkpoint product and a folder with a program named trtllm-build."""
    program = tmp_path / "bin" / "trtllm-build"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps({"quantization": CLAIMS}))
    spec, result = Spec("quantize", {}), {"claims": CLAIMS}
    write_record(checkpoint / "manifest.json", spec, result, files=["config.json"])
    return tmp_path


def command(work, *more):
    engine = TrtllmEngine(backend="trtllm", path="engine", tensor_parallel=2)
    settings = {"engine": engine.model_dump(mode="json")}
    spec = json.dumps({"rule": "build_engine", "settings": settings})
    return [
        sys.executable, str(SCRIPT), "--spec", spec,
        "--checkpoint", str(work / "checkpoint" / "manifest.json"),
        "--output", str(work / "engine" / "manifest.json"),
        "--log", str(work / "logs" / "build.log"), *more,
    ]  # fmt: skip


def environment(work, mode=""):
    return {
        **os.environ,
        "PATH": f"{work / 'bin'}:{os.environ['PATH']}",
        "FP8FLOW_LOCK_DIR": str(work / "locks"),
        "TMPDIR": str(work / "tmp"),
        "FAKE_BUILD": mode,
    }


def build(work, *more, mode=""):
    (work / "tmp").mkdir()
    return subprocess.run(
        command(work, *more),
        env=environment(work, mode),
        capture_output=True,
        text=True,
        timeout=120,
    )


def left_over(work):
    known = {"bin", "checkpoint", "engine", "logs", "locks", "tmp"}
    return {path.name for path in work.iterdir()} - known | {
        p.name for p in (work / "tmp").iterdir()
    }


def test_engine_becomes_a_product(work):
    done = build(work, "--launcher", "")
    assert done.returncode == 0, done.stderr
    record = verify_record(work / "engine" / "manifest.json")
    assert record.data["files"].keys() >= {"config.json", "rank0.engine", "rank1.engine"}
    assert record.data["inputs"].keys() == {"checkpoint"}
    assert record.result["version"] == "1.2.1"
    assert record.result["quantization"] == CLAIMS
    assert record.result["argv"][0] == "trtllm-build"
    assert record.result["launcher"] == []
    assert record.result["build_s"] > 0
    log = (work / "logs" / "build.trtllm-build.log").read_text()
    assert f"building {work / 'checkpoint'}" in log
    assert left_over(work) == set()


def test_launcher_comes_before_the_command(work):
    done = build(work, "--launcher", "env 'LAUNCHED=a b'")
    assert done.returncode == 0, done.stderr
    record = verify_record(work / "engine" / "manifest.json")
    assert record.result["launcher"] == ["env", "LAUNCHED=a b"]
    done = subprocess.run(
        command(work, "--launcher", "no-such-container run"),
        env=environment(work), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert "cannot start no-such-container" in done.stderr


def test_failed_build_shows_the_end_of_its_log_and_leaves_no_product(work):
    done = build(work, mode="fail")
    assert done.returncode == 1
    assert "exited with status 3" in done.stderr
    assert "out of memory" in done.stderr
    assert not (work / "engine").exists()
    assert left_over(work) == set()


def test_engine_of_another_version_is_refused(work):
    done = build(work, mode="old")
    assert done.returncode == 1
    assert "built by TensorRT-LLM 1.0.0, not 1.2.1" in done.stderr
    assert not (work / "engine").exists()


def _gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_for(condition, limit_s=30):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_killed_job_leaves_nothing_running(work, signum):
    (work / "tmp").mkdir()
    process = subprocess.Popen(
        command(work), env=environment(work, "hang"), stderr=subprocess.PIPE, text=True
    )
    child = work / "bin" / "child"
    wait_for(lambda: child.exists() and child.read_text())
    pids = [int((work / "bin" / "started").read_text().split()[0]), int(child.read_text())]
    process.send_signal(signum)
    process.communicate(timeout=60)
    assert process.returncode != 0
    wait_for(lambda: all(map(_gone, pids)))
    wait_for(lambda: not list((work / "tmp").iterdir()))
    assert not (work / "engine").exists()
