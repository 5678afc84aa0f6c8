"""What one LoadGen run leaves: queries.parquet, outputs.parquet and outcome.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fp8flow.client import Completion
from fp8flow.errors import FlowError
from fp8flow.loadgen_log import DETAIL_LOG, parse_detail, scheduled_ns
from fp8flow.loadgen_settings import OFFICIAL_ROWS, LoadJob

if TYPE_CHECKING:
    from fp8flow.loadgen import LoadGenRun, Query


def _schedule(run: LoadGenRun, job: LoadJob) -> tuple[list[int | None], str]:
    """Return when each query was scheduled, ns since the start of the test, and how it is known.

    LoadGen measures from that time. The start of its clock is taken from the query that was
    issued with the least delay, which can be late by the time of one call between threads.
    """
    if job.scenario == "Offline":
        return [query.issued_ns - run.start_ns for query in run.queries], "time of issue"
    unknown: list[int | None] = [None] * len(run.queries)
    try:
        schedule, how = scheduled_ns(parse_detail(job.output_dir / DETAIL_LOG), len(run.queries))
    except FlowError as error:
        return unknown, str(error)
    if schedule is None:
        return unknown, how
    if len(schedule) != len(run.queries):
        return unknown, f"{len(run.queries)} queries came, but LoadGen made {len(schedule)}"
    issued = [query.issued_ns - run.start_ns for query in run.queries]
    origin = min((i - s for i, s in zip(issued, schedule, strict=True)), default=0)
    return [origin + time_ns for time_ns in schedule], how


def _is_empty(completion: Completion) -> bool:
    """Tell whether an answer holds nothing but its end: no text and at most one token."""
    return not completion.text and len(completion.token_ids or ()) <= 1


def _query_row(
    query: Query, scheduled: int | None, start_ns: int, lengths: Sequence[int]
) -> dict[str, Any]:
    completion = query.completion or Completion(error="aborted", detail="the run ended before")
    status = "failed" if completion.error else "empty" if _is_empty(completion) else "ok"

    def relative(value: int | None) -> int | None:
        return value - start_ns if value else None

    return {
        "id": query.query_id,
        "index": query.index,
        "server": query.server,
        "scheduled_ns": scheduled,
        "issued_ns": relative(query.issued_ns),
        "sent_ns": relative(completion.sent_ns),
        "first_token_ns": relative(completion.first_token_ns),
        "done_ns": relative(completion.done_ns),
        "input_tokens": lengths[query.index],
        "output_tokens": None if completion.error else len(completion.token_ids or ()),
        "usage_tokens": completion.completion_tokens,
        "status": status,
        "finish_reason": completion.finish_reason,
        "error": completion.error,
        "detail": completion.detail,
    }


def write_queries(run: LoadGenRun, job: LoadJob, lengths: Sequence[int]) -> str:
    """Write queries.parquet: one row per query in order of issue, ns since the start of the test.

    Returns:
        how ``scheduled_ns``, the time that LoadGen measures from, is known, or why it is null.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    times = ("scheduled_ns", "issued_ns", "sent_ns", "first_token_ns", "done_ns")
    counts = ("input_tokens", "output_tokens", "usage_tokens")
    texts = ("status", "finish_reason", "error", "detail")
    schema = pa.schema(
        [("id", pa.uint64()), ("index", pa.int64()), ("server", pa.int16())]
        + [(name, pa.int64()) for name in times]
        + [(name, pa.int32()) for name in counts]
        + [(name, pa.string()) for name in texts]
    )
    schedule, how = _schedule(run, job)
    rows = [
        _query_row(query, scheduled, run.start_ns, lengths)
        for query, scheduled in zip(run.queries, schedule, strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema), job.output_dir / "queries.parquet")
    return how


def write_outputs(run: LoadGenRun, job: LoadJob) -> None:
    """Write outputs.parquet: index, token ids and text of every answer, in order of issue."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [("index", pa.int64()), ("token_ids", pa.list_(pa.int32())), ("text", pa.string())]
    )
    rows = [
        {
            "index": query.index,
            "token_ids": query.completion.token_ids or [],
            "text": query.completion.text,
        }
        for query in run.queries
        if query.completion is not None and query.completion.error is None
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema), job.output_dir / "outputs.parquet")


def _reason(run: LoadGenRun, failed: int) -> str | None:
    if run.abort_reason is not None:
        return f"{run.abort_reason}; {run.first_failure}" if run.first_failure else run.abort_reason
    if failed:
        return f"{failed} of {len(run.queries)} queries failed; first: {run.first_failure}"
    if not run.loadgen_finished:
        return "LoadGen did not finish"
    return None


def _versions() -> dict[str, str]:
    import platform
    from importlib import metadata

    names = ("mlcommons-loadgen", "aiohttp", "uvloop", "pyarrow")
    return {name: metadata.version(name) for name in names} | {"python": platform.python_version()}


def outcome(run: LoadGenRun, job: LoadJob, user_conf: str) -> dict[str, Any]:
    """Return outcome.json: what happened, without any statistics."""
    answers = [q.completion for q in run.queries if q.completion and q.completion.error is None]
    failures = dict(run.failures)
    if lost := len(run.queries) - run.completed - sum(failures.values()):
        failures["aborted"] = failures.get("aborted", 0) + lost
    failed = sum(failures.values())
    reason = _reason(run, failed)
    lengths = [(len(c.token_ids or ()), c.completion_tokens) for c in answers]
    return {
        "state": "complete" if reason is None else "failed",
        "reason": reason,
        "scenario": job.scenario,
        "mode": job.mode,
        "counts": {
            "issued": len(run.queries),
            "completed": run.completed,
            "failed": failed,
            "empty": sum(map(_is_empty, answers)),
            "failures_by_kind": failures,
            "first_failure": run.first_failure,
        },
        "usage_mismatches": sum(1 for n, usage in lengths if usage is not None and usage != n),
        "without_usage": sum(1 for _, usage in lengths if usage is None),
        "shorter_than_minimum": sum(1 for n, _ in lengths if n < job.min_output_tokens),
        "loadgen_finished": run.loadgen_finished,
        "client": {
            "cpu_s": round(run.cpu_s, 3),
            "wall_s": round(run.wall_s, 3),
            "cpu_share_of_one_core": round(run.cpu_s / run.wall_s, 4) if run.wall_s else None,
            "max_connections": job.max_connections,
            "most_in_flight": run.most_in_flight,
            "most_waiting": run.most_waiting,
        },
        "settings": _settings_of(job, user_conf),
        "versions": _versions(),
    }


def _settings_of(job: LoadJob, user_conf: str) -> dict[str, Any]:
    return {
        "source": "official" if job.official else "explicit",
        "why": "" if job.official else job.why or f"not asked for; needs {OFFICIAL_ROWS} rows",
        "requested": {
            "target_qps": job.target_qps,
            "min_duration_ms": job.requested_duration_ms,
            "min_queries": job.min_queries,
            "limits_ms": list(job.limits_ms) if job.limits_ms else None,
        },
        "user_conf": user_conf,
        "max_output_tokens": job.max_output_tokens,
        "min_output_tokens": job.min_output_tokens,
        "request_fields": job.request_fields,
        "audit": job.audit_config is not None,
    }
