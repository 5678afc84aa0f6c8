"""Readers of MLPerf LoadGen's logs, and its Server schedule.

The detail log has one ``:::MLLOG {json}`` line per fact. A log that was cut off in the middle is
read up to the cut and marked as incomplete.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8flow.errors import FlowError

if TYPE_CHECKING:
    import numpy as np

DETAIL_LOG = "mlperf_log_detail.txt"
SUMMARY_LOG = "mlperf_log_summary.txt"
ACCURACY_LOG = "mlperf_log_accuracy.json"

_PREFIX = ":::MLLOG "
# Written once all results are; the accuracy mode has no results and ends with power_end.
_LAST_KEYS = {"performance": "result_validity", "accuracy": "power_end"}
_EXACT_IN_JSON = 1 << 53


@dataclass
class DetailLog:
    """Content of mlperf_log_detail.txt.

    Attributes:
        values: last value of each key; integers are exact, also beyond 2**63.
        errors: entries that LoadGen flagged as errors, ``key: value``, with their numbers.
        warnings: likewise warnings.
        unreadable: lines that are no MLLOG entry, for example a last one that was cut off.
    """

    values: dict[str, Any] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    warnings: Counter[str] = field(default_factory=Counter)
    unreadable: list[str] = field(default_factory=list)

    def part(self, prefix: str) -> dict[str, Any]:
        """Return the values of the keys with a prefix such as ``effective_``, without it."""
        size = len(prefix)
        return {key[size:]: value for key, value in self.values.items() if key.startswith(prefix)}

    def is_complete(self, mode: str) -> bool:
        """Tell whether LoadGen wrote the log to its end; mode: performance or accuracy."""
        return _LAST_KEYS[mode] in self.values

    @property
    def version(self) -> str | None:
        """LoadGen's version with its git revision."""
        return self.values.get("loadgen_version")


def parse_detail(path: Path) -> DetailLog:
    """Read mlperf_log_detail.txt.

    Raises:
        FlowError: if there is no such file, or nothing in it is an MLLOG entry.
    """
    log = DetailLog()
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise FlowError(f"cannot read LoadGen's log {path}: {error.strerror}") from error
    for line in text.splitlines():
        if line.strip():
            _take_line(log, line)
    if not log.values:
        raise FlowError(f"{path} holds no MLLOG entry; LoadGen did not run")
    return log


def _take_line(log: DetailLog, line: str) -> None:
    if not line.startswith(_PREFIX):
        log.unreadable.append(line[:200])
        return
    try:
        # NaN and infinities stay text: records are strict JSON.
        entry = json.loads(line[len(_PREFIX) :], parse_constant=str)
        key, value, metadata = entry["key"], entry["value"], entry["metadata"]
    except (ValueError, KeyError, TypeError):
        log.unreadable.append(line[:200])
        return
    log.values[key] = value
    if metadata.get("is_error"):
        log.errors[f"{key}: {value}"] += 1
    if metadata.get("is_warning"):
        log.warnings[f"{key}: {value}"] += 1


def listed(entries: Counter[str]) -> list[str]:
    """Return distinct messages, each with its number if it came more than once."""
    return [text if n == 1 else f"{text} ({n} times)" for text, n in entries.items()]


def json_exact(value: Any) -> Any:
    """Return ``value`` with integers that JSON readers would round written as strings."""
    if isinstance(value, dict):
        return {key: json_exact(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_exact(item) for item in value]
    if isinstance(value, int) and abs(value) > _EXACT_IN_JSON:
        return str(value)
    return value


def parse_summary(path: Path) -> dict[str, str]:
    """Return the ``name : value`` lines of mlperf_log_summary.txt; empty in accuracy mode.

    Raises:
        FlowError: if there is no such file.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise FlowError(f"cannot read LoadGen's log {path}: {error.strerror}") from error
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs if value.strip()}


def server_schedule_ns(seed: int, target_qps: float, count: int) -> np.ndarray:
    """Return when LoadGen's Server scenario schedules its queries, int64 ns since the start.

    LoadGen draws exponential gaps from a 32-bit Mersenne twister, two draws each, and cuts them
    to whole nanoseconds. The result has ``count`` + 1 entries; the last one is what the log calls
    ``generated_query_duration`` and proves that the reconstruction is exact.

    Args:
        seed: effective schedule seed.
        target_qps: effective target QPS.
        count: number of queries.
    """
    import numpy as np

    generator = np.random.MT19937()
    generator._legacy_seeding(seed & 0xFFFFFFFF)
    draws = generator.random_raw(2 * count).astype(np.float64)
    uniform = np.minimum((draws[0::2] + draws[1::2] * 2.0**32) / 2.0**64, np.nextafter(1.0, 0.0))
    gaps = (-np.log(1.0 - uniform) / target_qps * 1e9).astype(np.int64)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(gaps)])


def scheduled_ns(log: DetailLog, count: int) -> tuple[list[int] | None, str]:
    """Return the schedule of a Server run's first ``count`` queries and how it was found.

    Returns:
        (ns since the start of the schedule, in order of issue), or None and the reason if it
        cannot be proven against the log.
    """
    try:
        seed = log.values["effective_schedule_rng_seed"]
        qps = log.values["effective_target_qps"]
        generated = log.values["generated_query_count"]
        end_ns = log.values["generated_query_duration"]
    except KeyError as error:
        return None, f"LoadGen's log has no {error.args[0]}"
    schedule = server_schedule_ns(seed, qps, generated)
    if int(schedule[-1]) != end_ns:
        return None, "the schedule computed from LoadGen's seed does not end where LoadGen's does"
    return schedule[:count].tolist(), "computed from LoadGen's seed; its end agrees with the log"
