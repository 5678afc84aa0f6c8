"""The ``result`` of run.json: one run in numbers, from its logs and its queries.

The same form for every harness, scenario and mode. LoadGen's own statistics are used where its log
has them; everything else comes from queries.parquet, and both are compared. What could not be
measured is null.

A percentile p is the value at sorted index floor(n x p), as in LoadGen.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8flow.early_stopping import percentile_estimate
from fp8flow.errors import FlowError
from fp8flow.loadgen_log import (
    ACCURACY_LOG,
    DETAIL_LOG,
    DetailLog,
    json_exact,
    listed,
    parse_detail,
)

PERCENTILES = (50.0, 90.0, 95.0, 97.0, 99.0, 99.9)
TOLERANCE = 0.01
DEFINITION = (
    "output tokens (or completed samples) divided by the time from the first scheduled query to "
    "the last completion; failed queries count nothing"
)
# What LoadGen calls the score of a run (LoadGen's log; MLPerf v6.1 rules rank by it).
_SCORE_KEYS = {"Offline": "result_tokens_per_second"}
_SERVER_SCORE_KEY = "result_completed_tokens_per_second"
_LOADGEN_KEYS = {
    "ttft": ("first_token_{}_latency_ns", "first_token_{:.2f}_percentile_latency_ns"),
    "tpot": ("time_to_output_token_{}", "time_per_output_token_{:.2f}_percentile_ns"),
    "latency": ("{}_latency_ns", "{:.2f}_percentile_latency_ns"),
}


@dataclass
class Series:
    """Latencies of the completed queries of one run, ns.

    ``measured_from`` is ``scheduled`` or ``issued``, when the schedule is not known.
    """

    ttft: list[int] = field(default_factory=list)
    tpot: list[int] = field(default_factory=list)
    latency: list[int] = field(default_factory=list)
    measured_from: str = "scheduled"


def percentile(ordered: Sequence[int], percent: float) -> int:
    """Return the value at sorted index floor(n x p) of a series that is sorted already."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100.0))]


def summarise(values: Sequence[int], measured_from: str) -> dict[str, Any] | None:
    """Return mean, extremes, percentiles and the early-stopping estimate; None without values.

    ``sources`` and ``origins`` say of each statistic who computed it, ``queries`` (the client) or
    ``loadgen``, and from which time, ``scheduled`` or ``issued``; ``source`` and ``from`` are those
    of p99.
    """
    if not values:
        return None
    ordered = sorted(values)
    statistics = {
        "mean": sum(ordered) / len(ordered),
        "min": ordered[0],
        "max": ordered[-1],
        **{f"p{p:g}": percentile(ordered, p) for p in PERCENTILES},
        "early_stopping_p99": percentile_estimate(ordered),
        "count": len(ordered),
    }
    return statistics | {
        "from": measured_from,
        "source": "queries",
        "sources": dict.fromkeys(statistics, "queries"),
        "origins": dict.fromkeys(statistics, measured_from),
    }


def latencies(rows: Sequence[Mapping[str, Any]]) -> Series:
    """Return the latencies of the completed queries among ``rows`` (see queries.parquet).

    TPOT is (latency - TTFT) / (tokens - 1) in whole ns (LoadGen); an answer of one token has
    none. An answer without text has its first token at its end, as reported to LoadGen.
    """
    done = [row for row in rows if row["status"] != "failed"]
    scheduled = all(row["scheduled_ns"] is not None for row in rows)
    series = Series(measured_from="scheduled" if scheduled else "issued")
    origin = f"{series.measured_from}_ns"
    for row in done:
        first = row["done_ns"] if row["first_token_ns"] is None else row["first_token_ns"]
        series.ttft.append(first - row[origin])
        series.latency.append(row["done_ns"] - row[origin])
        if row["output_tokens"] > 1:
            series.tpot.append((row["done_ns"] - first) // (row["output_tokens"] - 1))
    return series


def _from_loadgen(log: DetailLog, name: str) -> dict[str, Any]:
    """Return LoadGen's own statistics of one latency; empty if its log has none."""
    plain, percentiles = _LOADGEN_KEYS[name]
    results = log.part("result_")
    found = {key: results.get(plain.format(key)) for key in ("mean", "min", "max")}
    found |= {f"p{p:g}": results.get(percentiles.format(p)) for p in PERCENTILES}
    return {key: value for key, value in found.items() if value is not None}


def _latency_block(
    series: Series, log: DetailLog | None, disagreements: list[str]
) -> dict[str, dict[str, Any] | None]:
    block: dict[str, dict[str, Any] | None] = {}
    for name in ("ttft", "tpot", "latency"):
        own = summarise(getattr(series, name), series.measured_from)
        theirs = _from_loadgen(log, name) if log else {}
        if own is not None and theirs:
            _compare_latency(name, own, theirs, disagreements)
            own = _with_loadgens(own, theirs)
        block[name] = own
    return block


def _with_loadgens(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the client's statistics with those that LoadGen has in their place.

    LoadGen has no early-stopping estimate and no count, and measures from the scheduled time.
    """
    sources = own["sources"] | dict.fromkeys(theirs, "loadgen")
    origins = own["origins"] | dict.fromkeys(theirs, "scheduled")
    return {
        **own,
        **theirs,
        "from": origins["p99"],
        "source": sources["p99"],
        "sources": sources,
        "origins": origins,
    }


def _compare_latency(
    name: str, own: dict[str, Any], theirs: dict[str, Any], disagreements: list[str]
) -> None:
    """Note a mean that differs by more than the tolerance and by more than a millisecond."""
    mine, loadgens = own["mean"], theirs.get("mean", own["mean"])
    if abs(mine - loadgens) > max(TOLERANCE * abs(loadgens), 1e6):
        disagreements.append(
            f"mean {name}: {mine:.0f} ns from {own['from']} time by the client, "
            f"{loadgens:.0f} ns by LoadGen"
        )


def _start_ns(rows: Sequence[Mapping[str, Any]]) -> int:
    return min(
        row["issued_ns"] if row["scheduled_ns"] is None else row["scheduled_ns"] for row in rows
    )


def throughput(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], float | None]:
    """Return the throughput block and the measured duration in seconds."""
    done = [row for row in rows if row["status"] != "failed"]
    nothing = {"output_tokens_per_s": None, "samples_per_s": None, "tokens_per_sample": None}
    if not done:
        return {**nothing, "definition": DEFINITION}, None
    duration_s = (max(row["done_ns"] for row in done) - _start_ns(rows)) / 1e9
    tokens = sum(row["output_tokens"] for row in done)
    block = {
        "output_tokens_per_s": tokens / duration_s,
        "samples_per_s": len(done) / duration_s,
        "tokens_per_sample": tokens / len(done),
        "definition": DEFINITION,
    }
    return block, duration_s


def _score(log: DetailLog | None, scenario: str) -> dict[str, Any]:
    """Return the score that LoadGen logged, null if it has none, and the key of its log."""
    key = _SCORE_KEYS.get(scenario, _SERVER_SCORE_KEY)
    value = log.values.get(key) if log else None
    number = value if isinstance(value, int | float) else None
    return {"loadgen_tokens_per_s": number, "loadgen_field": key}


def _compare_throughput(
    rows: Sequence[Mapping[str, Any]], log: DetailLog, scenario: str, disagreements: list[str]
) -> None:
    """Compare with LoadGen's numbers, each by LoadGen's own definition.

    Server: until the completion of the query issued last, with one sample less.
    """
    results = log.part("result_")
    start_ns = _start_ns(rows)
    tokens = sum(row["output_tokens"] for row in rows)
    if scenario == "Offline":
        end_ns, samples = max(row["done_ns"] for row in rows), len(rows)
        names = ("tokens_per_second", "samples_per_second")
    else:
        end_ns, samples = rows[-1]["done_ns"], len(rows) - 1
        names = ("completed_tokens_per_second", "completed_samples_per_sec")
    for name, amount in zip(names, (tokens, samples), strict=True):
        own, theirs = amount / ((end_ns - start_ns) / 1e9), results.get(name)
        if theirs is None:
            disagreements.append(f"LoadGen's log has no result_{name}")
        elif abs(own - theirs) > TOLERANCE * max(abs(own), abs(theirs)):
            disagreements.append(f"{name}: {own:.6g} by the client, {theirs:.6g} by LoadGen")


def _tokens(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    done = [row for row in rows if row["status"] != "failed"]
    outputs = [row["output_tokens"] for row in done]
    reasons = Counter(row["finish_reason"] for row in done)
    return {
        "input_total": sum(row["input_tokens"] for row in done),
        "output_total": sum(outputs),
        "output_min": min(outputs, default=None),
        "output_max": max(outputs, default=None),
        "output_mean": sum(outputs) / len(outputs) if outputs else None,
        "finish_reasons": dict(sorted(reasons.items())),
    }


def recount(outputs: Path, tokenizer: Path) -> dict[str, int]:
    """Tokenize every answer's text again and compare the number of tokens with what was counted.

    Special tokens, for example the end of sequence, have no text and are left out. Tokenizing is
    no exact inverse of generating, so single differences are normal; a systematic one is not.

    Args:
        outputs: outputs.parquet of the run.
        tokenizer: tokenizer.json, or the folder it lies in.
    """
    import pyarrow.parquet as pq
    from tokenizers import Tokenizer

    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    encoder = Tokenizer.from_file(str(file))
    added = encoder.get_added_tokens_decoder()
    special = {token_id for token_id, token in added.items() if token.special}
    counted = {"recount_mismatches": 0, "recount_total": 0, "recount_expected": 0}
    with pq.ParquetFile(outputs) as table:
        for batch in table.iter_batches(batch_size=1024, columns=["token_ids", "text"]):
            encoded = encoder.encode_batch(batch["text"].to_pylist(), add_special_tokens=False)
            for ids, again in zip(batch["token_ids"].to_pylist(), encoded, strict=True):
                expected = sum(1 for token_id in ids if token_id not in special)
                counted["recount_mismatches"] += len(again.ids) != expected
                counted["recount_total"] += len(again.ids)
                counted["recount_expected"] += expected
    return counted


def _count_problems(
    rows: Sequence[Mapping[str, Any]], outcome: Mapping[str, Any], log: DetailLog
) -> list[str]:
    """Return what does not add up: queries, answers and what LoadGen says it asked for."""
    counts = outcome["counts"]
    problems = []
    if counts["issued"] != counts["completed"] + counts["failed"]:
        problems.append(
            f"{counts['issued']} queries issued, but {counts['completed']} completed and "
            f"{counts['failed']} failed"
        )
    if len(rows) != counts["issued"]:
        problems.append(f"queries.parquet has {len(rows)} rows for {counts['issued']} queries")
    failed = sum(1 for row in rows if row["status"] == "failed")
    if failed != counts["failed"]:
        problems.append(f"queries.parquet has {failed} failed rows, not {counts['failed']}")
    generated = log.values.get("generated_query_count")
    samples = log.values.get("generated_samples_per_query")
    if generated is not None and samples is not None and generated * samples != counts["issued"]:
        problems.append(f"LoadGen made {generated * samples} queries, {counts['issued']} arrived")
    return problems


def _accuracy_problems(
    attempt_dir: Path, rows: Sequence[Mapping[str, Any]], log: DetailLog
) -> list[str]:
    """Return what is missing or double in an accuracy run, also in LoadGen's accuracy log."""
    total = log.values.get("qsl_reported_total_count")
    problems = []
    if sorted(row["index"] for row in rows) != list(range(total or 0)):
        problems.append(f"the accuracy run did not ask for each of {total} samples exactly once")
    try:
        logged = json.loads((attempt_dir / ACCURACY_LOG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [*problems, f"{ACCURACY_LOG} cannot be read: {error}"]
    if sorted(entry["qsl_idx"] for entry in logged) != list(range(total or 0)):
        problems.append(f"{ACCURACY_LOG} does not hold each of {total} samples exactly once")
    return problems


def _loadgen_block(log: DetailLog | None, outcome: Mapping[str, Any]) -> dict[str, Any]:
    if log is None:
        return {"version": outcome.get("versions", {}).get("mlcommons-loadgen"), "valid": None}
    values = log.values
    validity = values.get("result_validity")
    return {
        "version": log.version,
        "valid": None if validity is None else validity == "VALID",
        "performance_constraints_met": values.get("result_perf_constraints_met"),
        "min_duration_met": values.get("result_min_duration_met"),
        "min_queries_met": values.get("result_min_queries_met"),
        "early_stopping_met": values.get("early_stopping_met"),
        "invalid_reason": values.get("result_invalid_reason") or None,
        "early_stopping_ttft": values.get("early_stopping_ttft_result") or None,
        "early_stopping_tpot": values.get("early_stopping_tpot_result") or None,
        "result": log.part("result_"),
        "errors": listed(log.errors),
        "warnings": listed(log.warnings),
        "unreadable_lines": len(log.unreadable),
    }


def _settings_block(log: DetailLog | None, outcome: Mapping[str, Any]) -> dict[str, Any]:
    own = dict(outcome.get("settings", {}))
    asked = own.pop("requested", {})
    effective = log.part("effective_") if log else {}
    requested = log.part("requested_") if log else {}
    if outcome["mode"] == "accuracy" and "min_duration_ms" in requested:
        requested["min_duration_ms"] = None  # LoadGen logs its default, which it does not use
    return {**own, "effective": effective, "requested": requested, "asked_for": asked}


def _limits_ns(outcome: Mapping[str, Any]) -> dict[str, int] | None:
    limits = outcome.get("settings", {}).get("requested", {}).get("limits_ms")
    if not limits:
        return None
    return {"ttft": round(limits[0] * 1e6), "tpot": round(limits[1] * 1e6)}


def _min_duration_s(outcome: Mapping[str, Any]) -> float | None:
    """Return the shortest run asked for; None for accuracy, where durations mean nothing."""
    requested_ms = outcome["settings"]["requested"]["min_duration_ms"]
    if requested_ms is None or outcome["mode"] == "accuracy":
        return None
    return float(requested_ms) / 1e3


def _read_outcome(attempt_dir: Path) -> dict[str, Any]:
    path = attempt_dir / "outcome.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FlowError(f"{path} is missing: the load generator was stopped in the run") from error
    except ValueError as error:
        raise FlowError(f"{path} is not JSON: {error}") from error
    return found


def _read_rows(attempt_dir: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = pq.read_table(attempt_dir / "queries.parquet").to_pylist()
    return rows


def _read_log(attempt_dir: Path, mode: str, problems: list[str]) -> DetailLog | None:
    try:
        log = parse_detail(attempt_dir / DETAIL_LOG)
    except FlowError as error:
        problems.append(str(error))
        return None
    if not log.is_complete(mode):
        problems.append(f"{DETAIL_LOG} ends before its results")
    return log


def build_run_result(
    attempt_dir: Path,
    *,
    tokenizer: Path | None = None,
    server: Mapping[str, Any] | None = None,
    workload: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the result of run.json for one LoadGen attempt.

    ``state`` is failed, with the reason, if a query failed, the run was cut short, or the numbers
    of queries do not add up. Numbers that LoadGen and the client see differently are listed under
    ``disagreements``. ``measured_from`` is what the client's statistics start at, among them the
    early-stopping estimates, and ``measured_from_reason`` how that time is known or why the
    scheduled one is not.

    Args:
        attempt_dir: ``attempts/<n>`` with the worker's files.
        tokenizer: tokenizer.json or its folder, for the recount of tokens; None leaves it out.
        server: what is known about the server; passed through.
        workload: digests of what was measured; passed through.

    Raises:
        FlowError: if there is no outcome.json, so that the run has no result at all.
    """
    outcome = _read_outcome(attempt_dir)
    scenario, mode = outcome["scenario"], outcome["mode"]
    rows = _read_rows(attempt_dir)
    problems = [outcome["reason"]] if outcome["reason"] else []
    disagreements: list[str] = []
    log = _read_log(attempt_dir, mode, problems)
    if log is not None and not problems:
        problems += _count_problems(rows, outcome, log)
        if mode == "accuracy":
            problems += _accuracy_problems(attempt_dir, rows, log)
        elif rows:
            _compare_throughput(rows, log, scenario, disagreements)
    compared = None if problems else log
    block, duration_s = throughput(rows)
    series = latencies(rows)
    tokens = _tokens(rows) | _recounted(attempt_dir, tokenizer)
    for name in ("usage_mismatches", "without_usage", "shorter_than_minimum"):
        tokens[name] = outcome[name]
    result = {
        "harness": "loadgen",
        "scenario": scenario,
        "mode": mode,
        "state": "failed" if problems else "complete",
        "reason": "; ".join(problems) or None,
        "attempt": int(attempt_dir.name) if attempt_dir.name.isdigit() else None,
        "counts": outcome["counts"],
        "duration_s": duration_s,
        "min_duration_s": _min_duration_s(outcome),
        "throughput": block | _score(compared, scenario),
        "measured_from": series.measured_from if rows else None,
        "measured_from_reason": outcome["scheduled"],
        "latency_ns": _latency_block(series, compared, disagreements),
        "tokens": tokens,
        "settings": _settings_block(log, outcome),
        "loadgen": _loadgen_block(log, outcome),
        "limits_ns": _limits_ns(outcome),
        "client": outcome["client"],
        "scheduled": outcome["scheduled"],
        "server": dict(server or {}),
        "workload": dict(workload or {}),
        "disagreements": disagreements,
    }
    exact: dict[str, Any] = json_exact(result)
    return exact


def _recounted(attempt_dir: Path, tokenizer: Path | None) -> dict[str, Any]:
    if tokenizer is None:
        return {"recount_mismatches": None, "recount_reason": "no tokenizer was given"}
    return dict(recount(attempt_dir / "outputs.parquet", tokenizer))
