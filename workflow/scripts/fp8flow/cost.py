"""What work on a model took: seconds of its phases, and the most memory on GPU and host."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


def device() -> str:
    """Return ``cuda`` if torch sees a GPU, else ``cpu``."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Cost:
    """What the work took: seconds of its phases, and the most memory."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; what the GPU still has to do belongs to it."""
        started = time.monotonic()
        yield
        _finish_gpu_work()
        self.seconds[f"{name}_s"] = round(time.monotonic() - started, 3)

    def as_dict(self) -> dict[str, Any]:
        """Return load_s, calibrate_s, export_s, inspect_s and the peaks, bytes.

        ``peak_gpu_bytes`` is what was allocated for tensors, None without a GPU;
        ``peak_rss_bytes`` is the process's, pages of mapped files included.
        """
        names = ("load_s", "calibrate_s", "export_s", "inspect_s")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            **{name: self.seconds.get(name) for name in names},
            "peak_gpu_bytes": _peak_gpu_bytes(),
            "peak_rss_bytes": peak,
        }


def _finish_gpu_work() -> None:
    if "torch" in sys.modules and device() == "cuda":
        sys.modules["torch"].cuda.synchronize()


def _peak_gpu_bytes() -> int | None:
    if "torch" not in sys.modules or device() != "cuda":
        return None
    return int(sys.modules["torch"].cuda.max_memory_allocated())
