"""Which GPUs there are and which are used; NVML and nvidia-smi are stood in for."""

import sys
from types import SimpleNamespace

import pytest

from fp8flow import accelerator, server
from fp8flow.accelerator import Gpu, gpu_environment, gpu_groups, parse_smi_list, require_gpus
from fp8flow.errors import FlowError

SMI = """\
GPU 0: NVIDIA H200 (UUID: GPU-aaaa1111-0000)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bbbb2222-0000)
  MIG 3g.20gb     Device  0: (UUID: MIG-cccc3333-0000)
  MIG 3g.20gb     Device  1: (UUID: MIG-dddd4444-0000)
GPU 2: NVIDIA H200 (UUID: GPU-aaaa5555-0000)
"""
UUIDS = ["GPU-aaaa1111-0000", "MIG-cccc3333-0000", "MIG-dddd4444-0000", "GPU-aaaa5555-0000"]


@pytest.fixture(autouse=True)
def locks(tmp_path, monkeypatch):
    monkeypatch.setenv("FP8FLOW_LOCK_DIR", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A host without NVML whose nvidia-smi lists SMI."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] && cat <<'END'\n{SMI}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setitem(sys.modules, "pynvml", None)


def test_the_list_of_nvidia_smi():
    found = parse_smi_list(SMI)
    assert [gpu.uuid for gpu in found] == UUIDS
    assert [gpu.index for gpu in found] == [0, 1, 1, 2]
    assert parse_smi_list("No devices found.\n") == []


@pytest.mark.parametrize(
    ("mask", "chosen"),
    [
        (None, UUIDS),
        ("", []),
        ("0", UUIDS[:1]),
        ("2,0", [UUIDS[3], UUIDS[0]]),
        ("1", UUIDS[1:2]),  # CUDA takes the first instance
        (" GPU-aaaa5 , 0", [UUIDS[3], UUIDS[0]]),
        ("MIG-dddd4444-0000", [UUIDS[2]]),
        ("GPU-aaaa", []),  # two begin so
        ("0,9,2", UUIDS[:1]),  # CUDA ends at what is not there
        ("0,-1,2", UUIDS[:1]),
        ("0,0", UUIDS[:1]),
        ("NoDevFiles", []),
    ],
)
def test_visible(smi, monkeypatch, mask, chosen):
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert [gpu.uuid for gpu in accelerator.visible_gpus()] == chosen


def test_no_driver(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert accelerator.installed_gpus() == []
    with pytest.raises(FlowError, match=r"needed 1 GPU\(s\), found 0 .*on a machine with a GPU"):
        require_gpus(1, "this")


@pytest.mark.parametrize(
    ("count", "mask", "expected"),
    [
        (5, None, "this: needed 5 GPU.s., found 4 .*GPU-aaaa1111.*lower engine.replicas or"),
        (2, "0", "found 1 .*'0' leaves 1 of 4: GPU-aaaa1111.*or widen CUDA_VISIBLE_DEVICES"),
        (1, "", "found 0 .*CUDA_VISIBLE_DEVICES='' leaves 0 of 4: none"),
    ],
)
def test_too_few(smi, monkeypatch, count, mask, expected):
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    with pytest.raises(FlowError, match=expected):
        require_gpus(count, "this")


def nvml(*devices, mig=()):
    """Return a stand-in for pynvml: devices are (UUID, bytes used); mig maps number to others."""
    mig = dict(mig)

    class NVMLError(Exception):
        pass

    def mode(handle):
        if handle[0].startswith("OLD"):
            raise NVMLError("not supported")
        return (int(devices.index(handle) in mig), 0)

    def instance(handle, number):
        try:
            return mig[devices.index(handle)][number]
        except IndexError:
            raise NVMLError("not found") from None

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_DEVICE_MIG_ENABLE=1,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(devices),
        nvmlDeviceGetHandleByIndex=lambda index: devices[index],
        nvmlDeviceGetUUID=lambda handle: handle[0],
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=handle[1]),
        nvmlDeviceGetMigMode=mode,
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: 7,
        nvmlDeviceGetMigDeviceHandleByIndex=instance,
    )


def test_nvml(monkeypatch):
    found = nvml((b"OLD-0", 1), ("GPU-1", 2), ("GPU-2", 3), mig={1: [("MIG-x", 4), ("MIG-y", 5)]})
    monkeypatch.setitem(sys.modules, "pynvml", found)
    found.nvmlDeviceGetMigMode = lambda handle: (int(handle[0] == "GPU-1"), 0)
    assert accelerator.installed_gpus() == [
        *(Gpu(0, "OLD-0", 1), Gpu(1, "MIG-x", 4), Gpu(1, "MIG-y", 5), Gpu(2, "GPU-2", 3))
    ]
    assert accelerator.memory_used(["MIG-y", "GPU-2"]) == {"MIG-y": 5, "GPU-2": 3}


def test_a_gpu_without_mig(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(("OLD-0", 1)))
    assert accelerator.installed_gpus() == [Gpu(0, "OLD-0", 1)]


def test_how_servers_are_confined():
    """Engines read the numbers as integers, so UUIDs are for instances only."""
    gpus = [Gpu(3, "GPU-x"), Gpu(1, "MIG-y")]
    assert gpu_environment(gpus) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "3,MIG-y",
    }
    assert gpu_environment([]) == {}


def test_idle_gpus_come_first(monkeypatch):
    gpus = [Gpu(0, "GPU-0", 90 << 30), Gpu(1, "GPU-1", 1 << 29), Gpu(2, "GPU-2", 0)]
    monkeypatch.setattr(accelerator, "installed_gpus", lambda: gpus)
    assert [gpu.index for gpu in require_gpus(1, "this")] == [1, 2, 0]


def test_groups_take_free_gpus_and_hold_only_those(monkeypatch, caplog):
    gpus = [Gpu(n, f"GPU-{n}", n << 30) for n in range(5)]
    monkeypatch.setattr(accelerator, "installed_gpus", lambda: gpus)
    with gpu_groups(gpus, 1, 1) as other:
        assert other.groups == ((gpus[0],),)
        with gpu_groups([*gpus[1:], gpus[0]], 2, 2) as mine:
            assert mine.groups == ((gpus[1], gpus[2]), (gpus[3], gpus[4]))
            assert len(mine.locks) == 4 and not set(mine.locks) & set(other.locks)
        with gpu_groups(gpus, 1, 1) as third:
            assert third.groups == ((gpus[1],),)
    assert "2.0 GiB of the memory of GPU-2 are in use already" in caplog.text
    assert "GPU-1 " not in caplog.text


def test_memory_that_is_free_again_is_no_problem(monkeypatch):
    used = {"GPU-0": 100 << 30}
    monkeypatch.setattr(server, "memory_used", lambda uuids: dict(used))
    assert server._gpu_problems({"GPU-0": 100 << 30}) == []
    assert server._gpu_problems({"GPU-0": (100 << 30) - (200 << 20)}) == []
    assert server._gpu_problems({}) == []


@pytest.mark.parametrize("others", [[], [77]])
def test_memory_that_is_not_free_again(monkeypatch, caplog, others):
    """It is the servers' fault only if nobody else computes there."""
    monkeypatch.setattr(server, "memory_used", lambda uuids: {"GPU-0": 5 << 30})
    monkeypatch.setattr(server, "computing_on", lambda uuids: others)
    monkeypatch.setattr(server, "_RELEASE_LIMIT_S", 0.1)
    problems = server._gpu_problems({"GPU-0": 1 << 30})
    if others:
        assert problems == [] and "by processes [77] that are not this job's" in caplog.text
    else:
        assert "4.0 GiB of GPU-0" in problems[0]
