"""Accelerators: which GPUs there are, and one measurement on each at a time.

Inside one Snakemake the resource ``gpu`` (or all cores as threads) keeps measurements apart. The
lock is against a second Snakemake on the host. It is the kernel's (``flock``), so it is free again
when its holder is killed. The folder is /tmp, shared by all users of the host, or the environment
variable FP8FLOW_LOCK_DIR.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from fp8flow.errors import FlowError
from fp8flow.log import get_logger

_POLL_S = 0.5
_REMIND_S = 60.0
_SMI_TIMEOUT_S = 60.0
_SMI_GPU = re.compile(r"^GPU (\d+): .*\(UUID: (GPU-[^)]+)\)")
_SMI_SLICE = re.compile(r"^\s+MIG .*\(UUID: (MIG-[^)]+)\)")
# More than a driver keeps for itself: somebody else computes there.
_BUSY_BYTES = 2 << 30

logger = get_logger(__name__)


@dataclass(frozen=True)
class Gpu:
    """A GPU as CUDA knows it, or an instance of one in MIG mode.

    Attributes:
        index: of the GPU, in the order of the PCI bus.
        uuid: ``GPU-...``, or ``MIG-...`` for an instance.
        memory_used_bytes: by all processes and the driver; None without NVML.
    """

    index: int
    uuid: str
    memory_used_bytes: int | None = None

    @property
    def device(self) -> str:
        """How CUDA_VISIBLE_DEVICES names it (with CUDA_DEVICE_ORDER=PCI_BUS_ID).

        By its number, since engines read that as an integer; an instance has none.
        """
        return self.uuid if self.uuid.startswith("MIG-") else str(self.index)


def installed_gpus() -> list[Gpu]:
    """Return the GPUs of this host; of a GPU in MIG mode its instances. Empty without driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library or no driver
        return _smi_gpus()
    try:
        found: list[Gpu] = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            device = pynvml.nvmlDeviceGetHandleByIndex(index)
            found += [_nvml_gpu(pynvml, index, handle) for handle in _instances(pynvml, device)]
        return found
    except pynvml.NVMLError as error:
        logger.warning("NVML does not tell about the GPUs (%s); asking nvidia-smi", error)
        return _smi_gpus()
    finally:
        pynvml.nvmlShutdown()


def _nvml_gpu(pynvml: Any, index: int, handle: Any) -> Gpu:
    uuid = pynvml.nvmlDeviceGetUUID(handle)
    name = uuid.decode() if isinstance(uuid, bytes) else str(uuid)
    return Gpu(index, name, int(pynvml.nvmlDeviceGetMemoryInfo(handle).used))


def _instances(pynvml: Any, device: Any) -> list[Any]:
    """Return the MIG instances of a device; the device itself if it is not divided."""
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(device)
    except pynvml.NVMLError:  # a GPU without MIG
        return [device]
    if current != pynvml.NVML_DEVICE_MIG_ENABLE:
        return [device]
    found = []
    for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(device)):
        with contextlib.suppress(pynvml.NVMLError):  # a slot without an instance
            found.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(device, number))
    return found


def _smi_gpus() -> list[Gpu]:
    """Return what ``nvidia-smi -L`` lists."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"],
            capture_output=True,
            text=True,
            timeout=_SMI_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_smi_list(done.stdout)


def parse_smi_list(text: str) -> list[Gpu]:
    """Return the GPUs of the output of ``nvidia-smi -L``, a divided one by its instances."""
    found: list[Gpu] = []
    index = 0
    for line in text.splitlines():
        if match := _SMI_GPU.match(line):
            index = int(match[1])
            found.append(Gpu(index, match[2]))
        elif match := _SMI_SLICE.match(line):
            if found and found[-1].index == index and found[-1].uuid.startswith("GPU-"):
                found.pop()  # it is used through its instances only
            found.append(Gpu(index, match[1]))
    return found


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves to this process, in its order.

    Like CUDA it takes numbers and UUIDs, also abbreviated, and ends at the first entry that names
    no device, so that an empty value hides all.
    """
    installed = installed_gpus()
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return installed
    chosen: list[Gpu] = []
    for entry in wanted.split(","):
        gpu = _named(entry.strip(), installed)
        if gpu is None or gpu in chosen:
            break
        chosen.append(gpu)
    return chosen


def _named(entry: str, installed: Sequence[Gpu]) -> Gpu | None:
    """Return the GPU that an entry of CUDA_VISIBLE_DEVICES names; by number, its first instance."""
    if entry.isdigit():
        return next((gpu for gpu in installed if gpu.index == int(entry)), None)
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    found = [gpu for gpu in installed if gpu.uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None


def memory_used(uuids: Sequence[str]) -> dict[str, int]:
    """Return ``{UUID: memory in use, bytes}`` of some GPUs, as far as NVML tells."""
    if not uuids:
        return {}
    return {
        gpu.uuid: gpu.memory_used_bytes
        for gpu in installed_gpus()
        if gpu.uuid in uuids and gpu.memory_used_bytes is not None
    }


def computing_on(uuids: Sequence[str]) -> list[int]:
    """Return the processes that compute on some GPUs, as far as NVML tells.

    Inside a container that can be none, or numbers of the host.
    """
    found: set[int] = set()
    with contextlib.suppress(Exception):  # no library, no driver, or no permission
        import pynvml

        pynvml.nvmlInit()
        try:
            for uuid in uuids:
                handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
                running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
                found |= {int(process.pid) for process in running}
        finally:
            pynvml.nvmlShutdown()
    return sorted(found)


def require_gpus(count: int, why: str) -> list[Gpu]:
    """Return the visible GPUs; those that nobody computes on come first.

    Args:
        count: how many are needed.
        why: what needs them, for the message.

    Raises:
        FlowError: if there are fewer, with what is there and what to do.
    """
    visible = visible_gpus()
    if len(visible) >= count:
        return sorted(visible, key=lambda gpu: (gpu.memory_used_bytes or 0) >= _BUSY_BYTES)
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    installed = len(visible) if mask is None else len(installed_gpus())
    seen = f"CUDA_VISIBLE_DEVICES={mask!r} leaves {len(visible)} of {installed}"
    where = "`nvidia-smi -L` lists" if mask is None else seen + ":"
    listed = ", ".join(gpu.uuid for gpu in visible) or "none"
    advice = (
        "lower engine.replicas or engine.tensor_parallel"
        + (", or widen CUDA_VISIBLE_DEVICES" if installed >= count else "")
        if visible
        else "run on a machine with a GPU and its driver, in a job that asked for it"
    )
    raise FlowError(
        f"{why}: needed {count} GPU(s), found {len(visible)} ({where} {listed}); {advice}"
    )


def gpu_environment(gpus: Sequence[Gpu]) -> dict[str, str]:
    """Return the variables that confine a process to some GPUs."""
    if not gpus:
        return {}
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(gpu.device for gpu in gpus),
    }


def warn_of_others(gpus: Sequence[Gpu]) -> None:
    """Warn of GPUs on which somebody else computes already."""
    for gpu in gpus:
        used = gpu.memory_used_bytes or 0
        if used >= _BUSY_BYTES:
            logger.warning(
                "%.1f GiB of the memory of %s are in use already; what is measured there is "
                "disturbed, and the server may not find room",
                *(used / 2**30, gpu.uuid),
            )


def accelerator_keys(uses_gpu: bool) -> list[str]:
    """Return the names of what a job occupies: GPU UUIDs, or ``cpu`` for the whole host."""
    if not uses_gpu:
        return ["cpu"]
    return sorted(gpu.uuid for gpu in visible_gpus()) or ["gpu"]


def lock_folder() -> Path:
    """Return the folder of the lock files; not TMPDIR, which can differ between jobs."""
    return Path(os.environ.get("FP8FLOW_LOCK_DIR", "/tmp"))  # noqa: S108


def lock_path(key: str) -> Path:
    """Return the lock file of one accelerator."""
    return lock_folder() / f"fp8flow-{re.sub(r'[^A-Za-z0-9-]+', '_', key)}.lock"


def _open(path: Path) -> int:
    """Open a lock file, read-only if it belongs to somebody else: that is enough to lock it."""
    common = os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        try:
            return os.open(path, os.O_RDWR | common)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_RDWR | os.O_CREAT | common, 0o644)
        except PermissionError:
            return os.open(path, os.O_RDONLY | common)
    except OSError as error:
        raise FlowError(
            f"cannot open the accelerator lock {path}: {error.strerror}; set FP8FLOW_LOCK_DIR to a "
            "folder that all users of this host can write to"
        ) from error


def _holder(descriptor: int) -> str:
    """Return who holds a lock, as that job has written it down."""
    try:
        noted = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {noted['pid']} in {noted['cwd']} since {noted['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "a job that left no note"


def _note_holder(descriptor: int) -> None:
    note = {
        "pid": os.getpid(),
        "cwd": str(Path.cwd()),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    # In somebody else's file no note can be left; the lock holds all the same.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(note).encode(), 0)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _try_some(descriptors: Mapping[str, int], count: int) -> list[str]:
    """Lock ``count`` of the files, the first ones that are free; all or none."""
    held: list[str] = []
    for key, descriptor in descriptors.items():
        if len(held) < count and _try_lock(descriptor):
            held.append(key)
    if len(held) == count:
        return held
    # Who kept some while waiting for others could wait for somebody who waits for him.
    for key in held:
        fcntl.flock(descriptors[key], fcntl.LOCK_UN)
    return []


def _acquire(descriptors: Mapping[str, int], count: int) -> list[str]:
    started = reminded = time.monotonic()
    name = " or ".join(descriptors) if count < len(descriptors) else ", ".join(descriptors)
    waiting = False
    while not (held := _try_some(descriptors, count)):
        now = time.monotonic()
        if not waiting or now - reminded >= _REMIND_S:
            holders = {_holder(descriptor) for descriptor in descriptors.values()}
            logger.info(
                "waiting for the accelerator %s (%.0f s so far): held by %s",
                *(name, now - started, "; ".join(sorted(holders))),
            )
            waiting, reminded = True, now
        # Not in step with another one that wants several, too.
        time.sleep(_POLL_S * random.uniform(0.5, 1.0))  # noqa: S311
    if waiting:
        waited_s = time.monotonic() - started
        logger.info("got the accelerator %s after %.0f s", ", ".join(held), waited_s)
    for key in held:
        _note_holder(descriptors[key])
    return held


@contextlib.contextmanager
def accelerator_locks(keys: Sequence[str], count: int) -> Iterator[dict[str, int]]:
    """Hold the locks of ``count`` of some accelerators, waiting for them as long as it takes.

    Args:
        keys: names of the accelerators, the preferred ones first.
        count: how many are needed.

    Yields ``{name: descriptor}`` of those that are held: a process that inherits the descriptors
    prolongs the locks until it ends, which the guard of a server uses to keep them until the
    server is really gone.

    Raises:
        FlowError: if a lock file cannot be opened.
    """
    descriptors: dict[str, int] = {}
    try:
        for key in keys:
            descriptors[key] = _open(lock_path(key))
        held = _acquire(descriptors, count)
        for key in set(descriptors) - set(held):
            os.close(descriptors.pop(key))
        yield {key: descriptors[key] for key in held}
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


@contextlib.contextmanager
def accelerator_lock(keys: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Hold the locks of all of some accelerators (see :func:`accelerator_locks`).

    Yields the locks' file descriptors.
    """
    with accelerator_locks(keys, len(keys)) as held:
        yield tuple(held.values())


@dataclass(frozen=True)
class Accelerators:
    """What a job occupies.

    Attributes:
        groups: the GPUs of each server; empty groups for servers without.
        locks: descriptors of the locks.
    """

    groups: tuple[tuple[Gpu, ...], ...] = ((),)
    locks: tuple[int, ...] = ()


@contextlib.contextmanager
def gpu_groups(candidates: Sequence[Gpu], servers: int, each: int) -> Iterator[Accelerators]:
    """Lock GPUs for some servers and divide them.

    Args:
        candidates: GPUs to choose from, the preferred ones first (see :func:`require_gpus`).
        servers: number of servers.
        each: GPUs of one server.

    Raises:
        FlowError: if a lock file cannot be opened.
    """
    by_uuid = {gpu.uuid: gpu for gpu in candidates}
    with accelerator_locks(list(by_uuid), servers * each) as held:
        # Neighbours on the bus are in one group.
        chosen = sorted((by_uuid[uuid] for uuid in held), key=lambda gpu: (gpu.index, gpu.uuid))
        used = memory_used([gpu.uuid for gpu in chosen])
        chosen = [replace(gpu, memory_used_bytes=used.get(gpu.uuid)) for gpu in chosen]
        warn_of_others(chosen)
        groups = tuple(tuple(chosen[i * each : (i + 1) * each]) for i in range(servers))
        yield Accelerators(groups, tuple(held.values()))
