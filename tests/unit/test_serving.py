"""Several servers, servers of somebody else, launchers: with the fake server."""

import argparse
import json
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest

import fakeserver
from fakebackend import FakeBackend, FakeExternal, make_inputs, make_spec, start_job
from fp8flow import guard
from fp8flow.accelerator import Accelerators
from fp8flow.backends import Served
from fp8flow.errors import FlowError
from fp8flow.load_job import Task, add_load_arguments, run_load_job, serve_and_record
from fp8flow.ports import port_is_free
from fp8flow.probe import run_probe
from fp8flow.records import build_product, verify_record
from fp8flow.serve import Resources, serve, warm_up
from fp8flow.serving import common_settings
from fp8flow.spec import Spec
from fp8flow.workload import read_workload

RESOURCES = Resources(threads=5, ready_timeout_s=20.0, stop_grace_s=2.0)
TWO = {"replicas": 2}


@pytest.fixture(autouse=True)
def locks(tmp_path, monkeypatch):
    monkeypatch.setenv("FP8FLOW_LOCK_DIR", str(tmp_path / "locks"))


@pytest.fixture
def workload(tmp_path):
    return read_workload(*make_inputs(tmp_path), "fake")


def measure(folder, backend, mode="performance", engine=None, resources=RESOURCES, **changes):
    checkpoint, dataset = make_inputs(folder)
    spec = make_spec(mode, engine=engine, **changes)
    task = Task(spec, checkpoint, dataset, folder / "run" / "run.json", backend, resources)
    return run_probe(task) if mode == "probe" else run_load_job(task, mode)


def serve_two(workload, backend, folder, resources=RESOURCES):
    return serve(backend, workload, TWO, resources, folder, 30.0, Accelerators(((), ())))


def test_two_servers_share_the_work(tmp_path):
    record = measure(tmp_path, FakeBackend(), engine=TWO, warmup_requests=1)
    result = record.result
    server = result["server"]
    assert result["state"] == "complete"
    assert (server["replicas"], server["threads"], server["warmup_requests"]) == (2, 2, 2)
    assert [one["log"] for one in server["servers"]] == ["server-0.log", "server-1.log"]
    names = {Path(name).name for name in verify_record(tmp_path / "run/run.json").data["files"]}
    assert {"server-0.log", "server-1.log"} < names and "server.log" not in names
    ports = [one["port"] for one in server["servers"]]
    assert len(set(ports)) == 2 and all(port_is_free("127.0.0.1", port) for port in ports)
    assert server["argv"] == server["servers"][0]["argv"] != server["servers"][1]["argv"]
    assert server["startup_s"] == max(one["startup_s"] for one in server["servers"])
    assert server["first_answer_s"] == max(one["first_answer_s"] for one in server["servers"])
    assert server["memory"]["rss_bytes"] > 2 * 5e6
    job = json.loads((tmp_path / "run/attempts/1/job.json").read_text())
    assert job["base_urls"] == [f"http://127.0.0.1:{port}" for port in ports]


def test_first_token_and_warm_up_reach_every_server(tmp_path, workload):
    with serve_two(workload, FakeBackend(), tmp_path) as serving:
        counts = [one.get_page("/fake/stats", "json")["requests"] for one in serving.servers]
        assert counts == [1, 1]
        warm_up(serving, make_spec(warmup_requests=4).settings["harness"])
        counts = [one.get_page("/fake/stats", "json")["requests"] for one in serving.servers]
        assert counts == [3, 3]


@pytest.mark.parametrize(
    ("by_server", "expected"),
    [
        ([{}, {"die_at_start": True}], "server 1 died before"),
        ([{"die_at_start": True}, {}], "server 0 died before it was ready"),
        ([{"ready_after": 99}, {"die_at_start": True}], "server 1 died before"),
        ([{}, {"die_after_requests": 0}], "server 1 died in the first request"),
        ([{"prefix_reuse": True}, {}], "says that it reuses prefixes"),
        ([{}, {"prefix_reuse": True}], "says that it reuses prefixes"),
        ([{}, {"no_output": True}], "the first request: 1 of 1 requests failed; first: empty"),
    ],
)
def test_one_of_two_that_does_not_work_ends_both(tmp_path, by_server, expected):
    backend = FakeBackend(by_server=by_server)
    with pytest.raises(FlowError, match=expected):
        measure(tmp_path, backend, engine=TWO)
    text = " ".join(p.read_text() for p in (tmp_path / "run/attempts/1").glob("server-*.log"))
    for port in re.findall(r"http://127\.0\.0\.1:(\d+)", text):
        assert port_is_free("127.0.0.1", int(port))
    failure = json.loads((tmp_path / "run/attempts/1/failure.json").read_text())
    assert {"server-0.log", "server-1.log"} <= set(failure["logs"])


def test_a_second_server_that_cannot_be_started(tmp_path, workload):
    class Missing(FakeBackend):
        started = 0

        def serve_command(self, engine, served, place):
            self.started += 1
            argv = super().serve_command(engine, served, place)
            return argv if self.started == 1 else ["/no/such/program"]

    with (
        pytest.raises(FlowError, match="cannot start /no/such/program"),
        serve_two(workload, Missing(), tmp_path),
    ):
        pytest.fail("served")
    assert not guard.descendants(os.getpid())


def test_an_engine_that_is_not_installed(tmp_path, workload):
    class Missing(FakeBackend):
        def serve_command(self, engine, served, place):
            return ["no-such-engine", "serve"]

    with (
        pytest.raises(FlowError, match=r"the program no-such-engine.*is not on PATH"),
        serve(Missing(), workload, {}, RESOURCES, tmp_path, 30.0),
    ):
        pytest.fail("served")


def test_the_death_of_one_ends_the_run_with_its_log(tmp_path):
    # Requests of the first token and the warm-up are the first three of each server.
    fake = {"by_server": [{}, {"die_after_requests": 6}], "ttft_ms": 30}
    job = start_job(tmp_path, fake=fake, engine=TWO, warmup_requests=4, min_duration_ms=60_000)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 1
    assert re.search(r"server 1 died in the run \(\d+ queries issued", output)
    assert "server-1.log" in output and "dying as asked" in output
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_killed_job_takes_all_its_servers_along(tmp_path):
    job = start_job(
        tmp_path, fake={"ttft_ms": 5}, engine=TWO, scenario="Server", min_duration_ms=60_000
    )
    attempt = tmp_path / "run" / "attempts" / "1"
    deadline = time.monotonic() + 30
    while not (attempt / "mlperf_log_detail.txt").exists():
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    tree = guard.descendants(job.pid)
    assert len(tree) == 6  # two servers, a load generator, and their guards
    os.killpg(job.pid, signal.SIGKILL)
    job.communicate()
    while any(guard.parent_pids().get(pid, (0, "Z"))[1] not in "ZX" for pid in tree):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_stubborn_servers_get_their_grace_at_the_same_time(tmp_path, workload):
    """One after the other, the second would be told to stop only when the first is gone."""
    resources = Resources(threads=2, ready_timeout_s=20.0, stop_grace_s=1.0)
    backend = FakeBackend(ignore_sigterm=True)
    with serve_two(workload, backend, tmp_path, resources) as serving:
        pids = [one.process.pid for one in serving.servers]
        first, second = (one.process for one in serving.servers)
        stop, seen = first.stop, []
        first.stop = lambda: seen.append(second._pipe) or stop()
    assert seen == [-1]
    assert [pid in one.process.killed for pid, one in zip(pids, serving.servers, strict=True)]


SETTINGS = {"prefix_reuse": False, "dtype": "bf16", "kv_cache_tokens": 1000}


def test_settings_of_several_servers_become_one():
    found = [
        SETTINGS | {"counters": {"prefix_hit_tokens": 1, "queue": "a"}},
        SETTINGS | {"counters": {"prefix_hit_tokens": 2}, "kv_cache_tokens": 990},
    ]
    common = common_settings(found, ["server 0", "server 1"])
    assert common["counters"] == {"prefix_hit_tokens": 3, "queue": None}
    assert common["kv_cache_tokens"] == 990
    assert common_settings([SETTINGS], ["the server"]) == SETTINGS


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"dtype": "fp16"}, 'dtype is "bf16" and "fp16"'),
        ({"kv_cache_tokens": 900}, "kv_cache_tokens is 1000 and 900"),
        ({"extra": 1}, "extra is null and 1"),
    ],
)
def test_servers_with_different_settings_are_refused(change, expected):
    with pytest.raises(FlowError, match=f"server 0 and server 1 run with.*{expected}"):
        common_settings([SETTINGS, SETTINGS | change], ["server 0", "server 1"])


def test_what_was_told_must_come_back(tmp_path):
    told = {"engine": "fake 2", "prefix_reuse": False, "backend": "fake"}
    with pytest.raises(FlowError) as raised:
        measure(tmp_path, FakeBackend(told=told, readings=[{"engine": "fake 1"}]))
    text = str(raised.value)
    assert 'engine: asked for "fake 2", effective "fake 1"' in text
    assert "prefix_reuse" not in text and "nothing was measured" in text
    backend = FakeBackend(told=told, readings=[{"engine": "fake 2"}])
    assert measure(tmp_path / "b", backend).result["server"]["asked"] == told


def test_files_of_the_server_are_evidence(tmp_path):
    backend = FakeBackend(files={"options.yaml": "a: 1\n"})
    result = measure(tmp_path, backend).result
    assert result["server"]["files"] == ["options.yaml"]
    assert (tmp_path / "run/attempts/1/options.yaml").read_text() == "a: 1\n"
    record = verify_record(tmp_path / "run/run.json")
    assert "attempts/1/options.yaml" in record.data["files"]


@pytest.mark.parametrize("name", ["../above.yaml", "server.yaml"])
def test_a_file_that_would_overwrite_another_is_refused(tmp_path, workload, name):
    (tmp_path / "server.yaml").write_text("mine")
    backend = FakeBackend(files={name: "x"})
    with (
        pytest.raises(FlowError, match="cannot be written"),
        serve(backend, workload, {}, RESOURCES, tmp_path, 30.0),
    ):
        pytest.fail("served")
    assert (tmp_path / "server.yaml").read_text() == "mine"


ON = {"serve": {"prefix_caching": True}}


@pytest.mark.parametrize("says", [True, "nothing"])
def test_reuse_that_is_asked_for_is_allowed_and_recorded(tmp_path, says):
    backend = FakeBackend(says_reuse=says, prefix_reuse=True, readings=HITS)
    server = measure(tmp_path, backend, engine=ON).result["server"]
    assert server["prefix_reuse"] is True
    assert server["settings_after"]["counters"] == {"prefix_hit_tokens": 7}


HITS = [{"counters": {"prefix_hit_tokens": n}} for n in (0, 7)]


def test_a_probe_of_reuse_that_is_asked_for(tmp_path):
    backend = FakeBackend(says_reuse=True, prefix_reuse=True)
    result = measure(tmp_path, backend, "probe", engine=ON).result
    assert result["prefix_reuse_proof"] == "reused"
    assert result["reuse"]["prefix_reuse"] is result["server"]["prefix_reuse"] is True


class Silent(FakeBackend):
    """A kind of server that never tells about reuse."""

    reports_prefix_reuse = False


def test_silence_about_reuse_is_recorded_if_no_server_of_the_kind_tells(tmp_path):
    server = measure(tmp_path, Silent(says_reuse="nothing")).result["server"]
    assert server["prefix_reuse"] is None


def test_a_probe_of_a_silent_server_measures(tmp_path):
    backend = Silent(says_reuse="nothing", prefix_reuse=True)
    with pytest.raises(FlowError, match="the server reuses prefixes although"):
        measure(tmp_path, backend, "probe")


def test_hits_of_a_silent_server_are_refused(tmp_path):
    with pytest.raises(FlowError, match="says that it reuses prefixes"):
        measure(tmp_path, Silent(says_reuse="nothing", readings=[HITS[1]]))


def test_a_probe_of_two_servers_looks_at_both(tmp_path):
    result = measure(tmp_path, FakeBackend(readings=HITS[:1]), "probe", engine=TWO).result
    assert result["reuse"]["servers"] == ["off, counted"] * 2
    backend = FakeBackend(
        says_reuse=False,
        readings=[{"allow_block_sharing": False}],
        by_server=[{}, {"prefix_reuse": True}],
    )
    with pytest.raises(FlowError, match="server 1 reuses prefixes"):
        measure(tmp_path / "b", backend, "probe", engine=TWO)


@pytest.fixture
def running():
    with fakeserver.running() as server:
        yield server


def test_a_server_of_somebody_else(tmp_path, running):
    engine = {"backend": "external", "url": running.base_url}
    record = measure(tmp_path, FakeExternal(says_reuse="nothing"), engine=engine)
    server = record.result["server"]
    assert record.result["state"] == "complete"
    assert (server["url"], server["argv"], server["startup_s"]) == (running.base_url, [], None)
    assert (server["prefix_reuse"], server["memory"]) == (None, None)
    assert running.process.poll() is None
    assert running.stats()["requests"] == 32 + 3 + 1
    assert not list((tmp_path / "run/attempts/1").glob("server*"))
    held = [path.name for path in (tmp_path / "locks").iterdir()]
    assert held == [f"fp8flow-http_127_0_0_1_{running.port}.lock"]


def test_a_probe_of_a_server_of_somebody_else(tmp_path, running):
    engine = {"backend": "external", "url": running.base_url}
    result = measure(tmp_path, FakeExternal(), "probe", engine=engine).result
    assert result["server"]["prefix_reuse"] is False
    assert result["prefix_reuse_proof"] == "not shown"


def test_a_page_that_somebody_elses_server_lacks(tmp_path, running):
    class Other(FakeExternal):
        pages: ClassVar = {"/v1/models": "json", "/no/such/page": "text"}

        def parse_settings(self, pages, log):
            return {"pages": sorted(path for path in pages if pages[path] is not None)}

    engine = {"backend": "external", "url": running.base_url}
    server = measure(tmp_path, Other(), engine=engine).result["server"]
    assert server["settings"] == {"pages": ["/v1/models"]}
    assert server["prefix_reuse"] is None


def test_nobody_at_the_url(tmp_path):
    engine = {"backend": "external", "url": "http://127.0.0.1:9"}
    with pytest.raises(FlowError, match=r"http://127\.0\.0\.1:9/fp8flow/settings gives no JSON"):
        measure(tmp_path, FakeExternal(), engine=engine)


def test_a_server_of_somebody_else_that_ends_in_the_run(tmp_path):
    with fakeserver.running(ttft_ms=5, die_after_requests=20) as server:
        engine = {"backend": "external", "url": server.base_url}
        with pytest.raises(FlowError, match="gives no JSON"):
            measure(tmp_path, FakeExternal(), engine=engine, warmup_requests=0)
    outcome = json.loads((tmp_path / "run/attempts/1/outcome.json").read_text())
    assert (outcome["state"], outcome["counts"]["failed"] > 0) == ("failed", True)


LAUNCHER = """
import os, subprocess, sys
os.environ["BY_LAUNCHER"] = sys.argv[1]
sys.exit(subprocess.run(sys.argv[2:]).returncode)
"""


def test_a_launcher_starts_the_server(tmp_path, workload):
    """It stays, as a container's does, and the listener is its child."""
    program = tmp_path / "a launcher.py"
    program.write_text(LAUNCHER)
    launcher = shlex.join([sys.executable, str(program), "two words"])
    resources = Resources(1, 20.0, 2.0, launcher)
    with serve(FakeBackend(), workload, {}, resources, tmp_path, 30.0) as serving:
        tree = serving.server.process.tree()
        seen = [Path(f"/proc/{pid}/environ").read_bytes() for pid in tree]
        assert sum(b"BY_LAUNCHER=two words" in environment for environment in seen) == 1
    assert serving.facts["launcher"] == shlex.split(launcher)
    assert serving.facts["argv"][1].endswith("fakeserver.py")


def test_the_environment_of_the_server(tmp_path, workload, monkeypatch):
    for name in ("VLLM_ATTENTION_BACKEND", "RANK", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "job's")
    monkeypatch.setenv("PYTHONPATH", "/kept")
    engine = {"environment": {"VLLM_USE_V2": "1"}}
    with serve(FakeBackend(), workload, engine, RESOURCES, tmp_path, 30.0) as serving:
        raw = Path(f"/proc/{serving.server.process.pid}/environ").read_text()
    seen = dict(line.split("=", 1) for line in raw.split("\0") if line)
    assert not {"VLLM_ATTENTION_BACKEND", "RANK"} & set(seen)
    assert (seen["VLLM_USE_V2"], seen["PYTHONPATH"]) == ("1", "/kept")
    assert seen["XDG_CACHE_HOME"].startswith(seen["TMPDIR"])
    assert serving.facts["environment"] == {"OMP_NUM_THREADS": "5", "VLLM_USE_V2": "1"}
    assert {"VLLM_ATTENTION_BACKEND", "RANK"} <= set(serving.facts["dropped_variables"])


class Gpu(FakeBackend):
    """A fake server that is said to need GPUs."""

    uses_gpu = True


def test_too_few_gpus_are_told_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("fp8flow.accelerator.installed_gpus", list)
    engine = {"replicas": 2, "tensor_parallel": 4}
    expected = r"engine\.replicas 2 x engine\.tensor_parallel 4: needed 8 GPU\(s\), found 0"
    with pytest.raises(FlowError, match=expected):
        measure(tmp_path, Gpu(), engine=engine)
    assert not (tmp_path / "run").exists() and not (tmp_path / "locks").exists()


def test_every_server_has_gpus_of_its_own(tmp_path, monkeypatch):
    from fp8flow.accelerator import Gpu as Device

    devices = [Device(n, f"GPU-{n}", 0) for n in range(5)]
    monkeypatch.setattr("fp8flow.accelerator.installed_gpus", lambda: devices)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-3,2,1")

    record = measure(tmp_path, Gpu(), engine={"replicas": 2, "tensor_parallel": 2})
    servers = record.result["server"]["servers"]
    assert [one["gpus"] for one in servers] == [["GPU-1", "GPU-2"], ["GPU-3", "GPU-4"]]
    assert record.result["server"]["memory"]["gpu_bytes"] == 0
    names = {path.name for path in (tmp_path / "locks").iterdir()}
    assert names == {f"fp8flow-GPU-{n}.lock" for n in (1, 2, 3, 4)}


def make_checkpoint(folder, result, settings=None):
    manifest = folder / "checkpoint" / "manifest.json"
    with build_product(manifest, Spec("quantize", settings or {})) as product:
        (product.folder / "config.json").write_text("{}")
        product.result.update(result)
    return manifest


@pytest.mark.parametrize("form", ["unified_hf", "tensorrt_llm"])
def test_what_is_served_is_told_by_the_records(tmp_path, form):
    _, dataset = make_inputs(tmp_path)
    result = {"method": "fp8_static", "quant_algo": "FP8", "kv_cache": "fp8", "format": form}
    checkpoint = make_checkpoint(tmp_path, result)
    engine = tmp_path / "engine" / "manifest.json"
    with build_product(engine, Spec("build_engine")) as product:
        (product.folder / "rank0.engine").write_text("engine")
    workload = read_workload(checkpoint, dataset, "m", engine)
    folder = checkpoint.parent
    tokenizer = folder / "tokenizer" if form == "tensorrt_llm" else folder
    assert workload.served == Served(folder, tokenizer, "FP8", "fp8", engine.parent)
    assert set(workload.inputs) == {"checkpoint", "dataset", "engine"}
    (engine.parent / "rank0.engine").write_text("other!")
    with pytest.raises(FlowError, match=r"rank0\.engine has other content"):
        read_workload(checkpoint, dataset, "m", engine)


def test_an_unquantized_checkpoint_is_served_as_such(tmp_path):
    checkpoint, dataset = make_inputs(tmp_path)
    served = read_workload(checkpoint, dataset, "m").served
    assert (served.quant_algo, served.kv_cache, served.engine) == (None, "auto", None)


@pytest.mark.parametrize(
    ("given", "engine", "launcher"),
    [
        ([], None, ""),
        (["--engine", "--launcher", ""], None, ""),
        (["--engine", "", "--launcher"], None, ""),
        (["--engine", "a/manifest.json", "--launcher", "run in"], "a/manifest.json", "run in"),
    ],
)
def test_options_that_a_rule_leaves_empty(given, engine, launcher):
    parser = argparse.ArgumentParser()
    add_load_arguments(parser)
    needed = ["--checkpoint", "c", "--dataset", "d", "--output", "o"]
    task = Task.of(parser.parse_args([*given, *needed]), make_spec(), FakeBackend())
    assert task.engine == (engine and Path(engine))
    assert task.resources.launcher == launcher


def test_the_engine_path_needs_the_engine(tmp_path):
    checkpoint, dataset = make_inputs(tmp_path)
    spec = make_spec(engine={"path": "engine"})
    task = Task(spec, checkpoint, dataset, tmp_path / "run/run.json", FakeBackend(), RESOURCES)
    with pytest.raises(FlowError, match="give --engine"):
        serve_and_record(task, None, connections=1, timeout_s=1.0)


def test_the_digest_of_the_engine_is_recorded(tmp_path):
    checkpoint, dataset = make_inputs(tmp_path)
    engine = tmp_path / "engine" / "manifest.json"
    with build_product(engine, Spec("build_engine")) as product:
        (product.folder / "rank0.engine").write_text("engine")
    task = Task(
        *(make_spec(), checkpoint, dataset, tmp_path / "run/run.json"),
        *(FakeBackend(), RESOURCES, engine),
    )
    record = run_load_job(task, "performance")
    digest = verify_record(engine).digest
    assert record.result["workload"]["engine_digest"] == record.data["inputs"]["engine"] == digest
