"""One accelerator, one measurement: a lock against a second Snakemake on the host.

Inside one Snakemake the resource ``gpu`` (or all cores as threads) keeps measurements apart. The
lock is the kernel's (``flock``), so it is free again when its holder is killed. The folder is /tmp,
shared by all users of the host, or the environment variable FP8FLOW_LOCK_DIR.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from fp8flow.errors import FlowError
from fp8flow.log import get_logger

_POLL_S = 0.5
_REMIND_S = 60.0

logger = get_logger(__name__)


def visible_gpus() -> dict[str, int]:
    """Return ``{UUID: memory in use, bytes}`` of the GPUs that CUDA would show to this process.

    Empty without NVIDIA driver or GPU.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library or no driver: there is no GPU to ask
        return {}
    try:
        found = {}
        wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = str(pynvml.nvmlDeviceGetUUID(handle))
            if wanted is None or _is_chosen(wanted, index, uuid):
                found[uuid] = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        return found
    finally:
        pynvml.nvmlShutdown()


def _is_chosen(wanted: str, index: int, uuid: str) -> bool:
    chosen = [part.strip() for part in wanted.split(",") if part.strip()]
    return any(part == str(index) or uuid.startswith(part) for part in chosen)


def accelerator_keys(uses_gpu: bool) -> list[str]:
    """Return the names of what a measurement occupies: GPU UUIDs, or ``cpu`` for the whole host."""
    if not uses_gpu:
        return ["cpu"]
    return sorted(visible_gpus()) or ["gpu"]


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


def _acquire(descriptor: int, key: str) -> None:
    started = reminded = time.monotonic()
    waiting = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            now = time.monotonic()
            if not waiting or now - reminded >= _REMIND_S:
                logger.info(
                    "waiting for the accelerator %s (%.0f s so far): held by %s",
                    *(key, now - started, _holder(descriptor)),
                )
                waiting, reminded = True, now
            time.sleep(_POLL_S)
    if waiting:
        logger.info("got the accelerator %s after %.0f s", key, time.monotonic() - started)
    _note_holder(descriptor)


@contextlib.contextmanager
def accelerator_lock(keys: list[str]) -> Iterator[tuple[int, ...]]:
    """Hold the locks of some accelerators, waiting for them as long as it takes.

    Yields the locks' file descriptors: a process that inherits them prolongs the lock until it
    ends, which the guard of a server uses to keep it until the server is really gone.

    Raises:
        FlowError: if a lock file cannot be opened.
    """
    descriptors: list[int] = []
    try:
        # Everybody takes them in the same order, so nobody waits for somebody who waits for him.
        for key in sorted(keys):
            descriptors.append(_open(lock_path(key)))
            _acquire(descriptors[-1], key)
        yield tuple(descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
