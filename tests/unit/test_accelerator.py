import fcntl
import logging
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from fp8flow import accelerator
from fp8flow.accelerator import (
    accelerator_keys,
    accelerator_lock,
    accelerator_locks,
    lock_path,
)
from fp8flow.errors import FlowError

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow" / "scripts"


@pytest.fixture(autouse=True)
def locks(tmp_path, monkeypatch):
    monkeypatch.setenv("FP8FLOW_LOCK_DIR", str(tmp_path))
    return tmp_path


def start(code: str) -> subprocess.Popen:
    """Start a process that has imported the lock."""
    head = "import sys, time, os, subprocess\nfrom fp8flow.accelerator import accelerator_lock\n"
    head += "from fp8flow.log import configure_logging\nconfigure_logging(None)\n"
    return subprocess.Popen(
        [sys.executable, "-u", "-c", head + textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SCRIPTS)},
    )


HOLD = """
    with accelerator_lock(["cpu"]):
        print("held", flush=True)
        sys.stdin.readline()
    print("released", flush=True)
"""


def is_free(key: str = "cpu") -> bool:
    descriptor = os.open(lock_path(key), os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def test_the_second_waits_and_says_for_whom():
    first = start(HOLD)
    assert first.stdout.readline() == "held\n"
    second = start(HOLD)
    waiting = second.stdout.readline()
    assert "waiting for the accelerator cpu" in waiting
    assert f"process {first.pid} in {Path.cwd()} since 20" in waiting
    first.communicate("\n")
    lines = [second.stdout.readline(), second.stdout.readline()]
    assert "got the accelerator cpu" in lines[0] and lines[1] == "held\n"
    assert not is_free()
    second.communicate("\n")
    assert is_free()


def test_the_lock_is_free_when_its_holder_was_killed(caplog):
    first = start(HOLD)
    assert first.stdout.readline() == "held\n"
    first.kill()
    first.communicate()
    with caplog.at_level(logging.INFO), accelerator_lock(["cpu"]):
        assert not is_free()
    assert "waiting" not in caplog.text
    assert is_free()


def test_who_inherits_the_descriptor_prolongs_the_lock():
    first = start(
        """
        with accelerator_lock(["cpu"]) as locks:
            child = subprocess.Popen(["sleep", "60"], pass_fds=locks)
            other = subprocess.Popen(["sleep", "60"])
            print(child.pid, other.pid, flush=True)
            sys.stdin.readline()
        """
    )
    child, other = map(int, first.stdout.readline().split())
    try:
        first.kill()
        first.wait()
        assert not is_free()
        os.kill(child, 9)
        deadline = time.monotonic() + 20
        while not is_free() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert is_free()
    finally:
        os.kill(other, 9)
        first.stdout.close()


def test_different_accelerators_do_not_wait_for_each_other():
    with accelerator_lock(["GPU-1"]), accelerator_lock(["GPU-2"]):
        assert not is_free("GPU-1") and not is_free("GPU-2")
    assert is_free("GPU-1") and is_free("GPU-2")


def test_all_are_released_when_the_block_fails():
    with pytest.raises(KeyError), accelerator_lock(["b", "a"]):
        raise KeyError
    assert is_free("a") and is_free("b")


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("FP8FLOW_LOCK_DIR", str(file / "below"))
    expected = r"cannot open the accelerator lock .*FP8FLOW_LOCK_DIR"
    with pytest.raises(FlowError, match=expected), accelerator_lock(["cpu"]):
        pytest.fail("locked")


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "target").write_text("precious")
    lock_path("cpu").symlink_to(tmp_path / "target")
    expected = "cannot open the accelerator lock"
    with pytest.raises(FlowError, match=expected), accelerator_lock(["cpu"]):
        pytest.fail("locked")
    assert (tmp_path / "target").read_text() == "precious"


def test_keys(monkeypatch):
    assert accelerator_keys(uses_gpu=False) == ["cpu"]
    gpus = [accelerator.Gpu(0, "GPU-b"), accelerator.Gpu(1, "GPU-a")]
    monkeypatch.setattr(accelerator, "installed_gpus", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert accelerator_keys(uses_gpu=True) == ["GPU-a", "GPU-b"]
    monkeypatch.setattr(accelerator, "installed_gpus", list)
    assert accelerator_keys(uses_gpu=True) == ["gpu"]


def test_some_of_several_are_taken_and_the_others_stay_free():
    with accelerator_lock(["GPU-1"]), accelerator_locks(["GPU-1", "GPU-2", "GPU-3"], 2) as held:
        assert list(held) == ["GPU-2", "GPU-3"]
        with accelerator_locks(["GPU-4", "GPU-5"], 1) as others:
            assert list(others) == ["GPU-4"]
            assert is_free("GPU-5")
    assert all(is_free(f"GPU-{n}") for n in range(1, 6))


def test_who_waits_for_several_holds_none():
    first = start(HOLD)
    assert first.stdout.readline() == "held\n"
    second = start(HOLD.replace('["cpu"]', '["another", "cpu"]'))
    assert "waiting for the accelerator another, cpu" in second.stdout.readline()
    with accelerator_lock(["another"]):
        first.communicate("\n")
    assert "got the accelerator another, cpu" in second.stdout.readline()
    assert second.stdout.readline() == "held\n"
    assert not is_free("another")
    second.communicate("\n")
