"""Values of a checkpoint's scales and FP8 weights: read in parallel, checked and summarised.

Weights are scanned as bytes in small blocks: an 8-billion-parameter checkpoint takes seconds and
next to no memory.
"""

from __future__ import annotations

import math
import os
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from fp8flow.weights import FP8_DTYPE, TensorInfo

# The names under which scales are reported, whatever the format calls them.
REPORTED = ("weight_scale", "input_scale", "k_scale", "v_scale")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
# E4M3 without infinities: 0x7E is 448, its largest number; 0x7F is NaN. Bit 7 is the sign.
_MAGNITUDE_BITS, _MAX_BITS, _NAN_BITS = 0x7F, 0x7E, 0x7F
# Fits a core's second-level cache, together with the mask that it is compared into.
_BLOCK_BYTES = 1 << 19
_MOST_THREADS = 16


@dataclass(frozen=True)
class Fp8Count:
    """Elements of one FP8 tensor: all, those of magnitude 448, and NaN."""

    elements: int
    at_limit: int
    nan: int


@dataclass
class Values:
    """What was read from a checkpoint, by tensor name.

    Attributes:
        scales: the values of each scale tensor.
        weights: the count over each FP8 weight.
    """

    scales: dict[str, list[float]] = field(default_factory=dict)
    weights: dict[str, Fp8Count] = field(default_factory=dict)


def count_fp8(info: TensorInfo) -> Fp8Count:
    """Count the elements of an E4M3 tensor that are NaN or as large as the format allows."""
    import numpy as np

    buffer = bytearray(_BLOCK_BYTES)
    block, view = np.frombuffer(buffer, np.uint8), memoryview(buffer)
    left, at_limit, nan = info.elements, 0, 0
    with info.file.open("rb", buffering=0) as stream:
        stream.seek(info.offset)
        while left:
            got = stream.readinto(view[: min(left, _BLOCK_BYTES)])
            if not got:
                raise OSError(f"{info.file} ended before its header says")
            part = block[:got]
            np.bitwise_and(part, _MAGNITUDE_BITS, out=part)
            at_limit += int(np.count_nonzero(part == _MAX_BITS))
            nan += int(np.count_nonzero(part == _NAN_BITS))
            left -= got
    return Fp8Count(info.elements, at_limit, nan)


def _read_floats(info: TensorInfo) -> list[float]:
    """Return the values of a float32 tensor."""
    import numpy as np

    values: list[float] = np.fromfile(
        info.file, "<f4", count=info.elements, offset=info.offset
    ).tolist()
    return values


def read_values(tensors: Mapping[str, TensorInfo], kinds: Mapping[str, str]) -> Values:
    """Read the scales and count the FP8 weights, several tensors at a time.

    Args:
        tensors: float32 scales, FP8 weights and others, by name.
        kinds: last parts of the names of scales -> the name in :data:`REPORTED` or another one.
    """
    scales = [name for name in tensors if name.rpartition(".")[2] in kinds]
    weights = [name for name, info in tensors.items() if info.dtype == FP8_DTYPE]
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        read = pool.map(lambda name: _read_floats(tensors[name]), scales)
        counts = pool.map(lambda name: count_fp8(tensors[name]), weights)
        return Values(dict(zip(scales, read, strict=True)), dict(zip(weights, counts, strict=True)))


def value_problems(values: Values) -> Iterator[str]:
    """Yield what is wrong with scales or weights, by tensor name."""
    for name, numbers in sorted(values.scales.items()):
        bad = [value for value in numbers if not math.isfinite(value) or value <= 0]
        if bad:
            yield f"{name} holds {bad[0]}; scales are finite and above zero"
    for name, count in sorted(values.weights.items()):
        if count.nan:
            yield f"{name} holds {count.nan} NaN"


@dataclass
class _Summary:
    scales: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    weights: int = 0
    at_limit: int = 0

    def add(self, count: Fp8Count) -> None:
        self.weights += count.elements
        self.at_limit += count.at_limit

    def as_dict(self) -> dict[str, Any]:
        """Return min, median and max of each kind of scale, and the saturated share."""
        names = [*REPORTED, *sorted(set(self.scales) - set(REPORTED))]
        summary: dict[str, Any] = {kind: _spread(self.scales.get(kind, [])) for kind in names}
        summary["saturation"] = self.at_limit / self.weights if self.weights else None
        return summary


def _spread(values: list[float]) -> dict[str, float | int] | None:
    if not values:
        return None
    return {
        "min": min(values),
        "median": statistics.median(values),
        "max": max(values),
        "count": len(values),
    }


def _layer_of(name: str) -> int | None:
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def scale_report(values: Values, kinds: Mapping[str, str]) -> dict[str, Any]:
    """Summarise scales and saturation by layer, outside the layers, and in total.

    Args:
        values: what was read.
        kinds: last parts of the names of scales -> the name they are reported under.

    Returns:
        ``layers`` (a list, each with ``layer``), ``other`` (None: nothing outside the layers) and
        ``total``, each with the spread (min, median, max, count) of every kind of scale, None
        where there is none, and ``saturation``: the share of FP8 weights of magnitude 448.
    """
    layers: dict[int | None, _Summary] = defaultdict(_Summary)
    total = _Summary()
    for name, numbers in sorted(values.scales.items()):
        kind = kinds[name.rpartition(".")[2]]
        for summary in (layers[_layer_of(name)], total):
            summary.scales[kind] += numbers
    for name, count in sorted(values.weights.items()):
        for summary in (layers[_layer_of(name)], total):
            summary.add(count)
    inside = sorted(number for number in layers if number is not None)
    return {
        "layers": [{"layer": number, **layers[number].as_dict()} for number in inside],
        "other": layers[None].as_dict() if None in layers else None,
        "total": total.as_dict(),
    }
