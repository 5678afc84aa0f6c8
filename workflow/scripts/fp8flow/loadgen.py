"""One MLPerf LoadGen run against an HTTP server: the job, its settings and the run itself.

LoadGen lives in a thread of its own and hands queries to the asyncio loop in the main thread,
which streams the answers and reports them back. LoadGen stamps times at these calls, so nothing
else is done between an event's arrival and the call.

Official settings are those of the mlperf.conf inside the LoadGen wheel plus our user.conf (MLPerf
Inference v6.1). LoadGen reads them correctly only once per process: one process per run.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import gc
import json
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from fp8flow.client import Completion, CompletionClient, request_body
from fp8flow.errors import FlowError
from fp8flow.loadgen_log import DETAIL_LOG, parse_detail, scheduled_ns
from fp8flow.log import get_logger
from fp8flow.records import atomic_write_text

# MLPerf Inference v6.1, llama3.1-8b in datacenter: data set size, seeds and latency limits.
OFFICIAL_ROWS = 13_368
SEEDS = {
    "qsl_rng_seed": 2_085_463_073_848_966_840,
    "sample_index_rng_seed": 2_747_215_439_041_700_203,
    "schedule_rng_seed": 16_159_082_839_903_944_936,
}
LIMITS_MS = {"Server": (2000.0, 100.0), "Interactive": (500.0, 30.0)}
LOADGEN_MODELS = {
    "Offline": "llama3_1-8b",
    "Server": "llama3_1-8b",
    "Interactive": "llama3_1-8b-interactive",
}
MODES = ("performance", "accuracy")

# What LoadGen gets for a failed query, so that the run can end; such a run never counts.
_FILLER = array.array("i", [0, 0])
# The issue thread of LoadGen waits for the interpreter lock at most this long.
_SWITCH_INTERVAL_S = 0.0005
_ABORT_GRACE_S = 5.0
# So many refused connections in a row mean that the server is gone, at any rate of queries.
_REFUSED_LIMIT = 8

logger = get_logger(__name__)


@dataclass(frozen=True)
class LoadJob:
    """Everything that one run needs; the keys of job.json.

    Attributes:
        dataset: samples.parquet of the evaluation set.
        base_url: ``http://host:port`` of the server.
        model: served model name.
        scenario: Offline, Server or Interactive (LoadGen's Server with tighter limits).
        mode: performance or accuracy.
        official: settings from LoadGen's built-in mlperf.conf; needs all 13,368 rows.
        why: why the settings are not the official ones; goes into the result.
        target_qps: Poisson rate, or expected rate of Offline.
        min_duration_ms: shortest performance run.
        min_queries: smallest number of queries; None: the official number, or one data set.
        ttft_limit_ms: p99 TTFT limit; None: the benchmark's. Not with ``official``.
        tpot_limit_ms: p99 TPOT limit; None: the benchmark's. Not with ``official``.
        max_output_tokens: cap on the answer's length.
        min_output_tokens: shorter answers are counted in the outcome.
        max_connections: most requests in flight at the server.
        request_timeout_s: a request that takes longer fails.
        request_fields: fields of the request body that the backend needs beyond the common ones.
        output_dir: attempt folder; gets the logs, queries.parquet, outcome.json.
        tokenizer: tokenizer.json, for servers that stream text without token ids.
        audit_config: audit.config of a compliance test.
        stop_after_consecutive_failures: the run is given up after so many failures in a row.
        progress_interval_s: time between two lines of progress.
    """

    dataset: Path
    base_url: str
    model: str
    scenario: str
    mode: str
    target_qps: float
    output_dir: Path
    max_output_tokens: int
    min_duration_ms: int = 600_000
    min_output_tokens: int = 1
    min_queries: int | None = None
    ttft_limit_ms: float | None = None
    tpot_limit_ms: float | None = None
    official: bool = False
    why: str = ""
    max_connections: int = 512
    request_timeout_s: float = 600.0
    request_fields: dict[str, Any] = field(default_factory=dict)
    tokenizer: Path | None = None
    audit_config: Path | None = None
    stop_after_consecutive_failures: int = 50
    progress_interval_s: float = 5.0

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("scenario", self.scenario, tuple(LOADGEN_MODELS)),
            ("mode", self.mode, MODES),
        ):
            if value not in allowed:
                raise FlowError(f"job: {name} is {value!r}; allowed: {', '.join(allowed)}")
        if self.official and not (self.ttft_limit_ms is None and self.tpot_limit_ms is None):
            raise FlowError("job: ttft_limit_ms and tpot_limit_ms cannot go with official settings")
        if self.audit_config is not None and not self.audit_config.is_file():
            raise FlowError(f"job: audit_config {self.audit_config} does not exist")

    @property
    def loadgen_scenario(self) -> str:
        """LoadGen's name of the scenario; Interactive is a Server run with other limits."""
        return "Offline" if self.scenario == "Offline" else "Server"

    @property
    def limits_ms(self) -> tuple[float, float] | None:
        """The p99 limits (TTFT, TPOT) in force; None for Offline, which has none."""
        if self.scenario not in LIMITS_MS:
            return None
        ttft, tpot = LIMITS_MS[self.scenario]
        return (self.ttft_limit_ms or ttft, self.tpot_limit_ms or tpot)

    @classmethod
    def read(cls, path: Path) -> LoadJob:
        """Read job.json.

        Raises:
            FlowError: if it is not JSON, a key is unknown or missing, or a value is not allowed.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise FlowError(f"cannot read the job {path}: {error}") from error
        known = {entry.name for entry in fields(cls)}
        if unknown := sorted(data.keys() - known):
            raise FlowError(f"{path}: unknown keys {unknown}; allowed: {sorted(known)}")
        for name in ("dataset", "output_dir", "tokenizer", "audit_config"):
            if data.get(name) is not None:
                data[name] = Path(data[name])
        try:
            return cls(**data)
        except TypeError as error:
            raise FlowError(f"{path}: {error}") from error


def user_conf_text(job: LoadJob, rows: int) -> str:
    """Return user.conf with what LoadGen lets a submitter set; also a record of explicit runs."""
    scenario = job.loadgen_scenario
    values: dict[str, float | int] = {
        "target_qps": job.target_qps,
        "min_duration": job.min_duration_ms,
    }
    if job.min_queries is not None or not job.official:
        values["min_query_count"] = job.min_queries or rows
    if not job.official:
        values["performance_sample_count_override"] = rows
        if job.limits_ms is not None:
            values["ttft_latency"], values["tpot_latency"] = job.limits_ms
    return "".join(f"*.{scenario}.{key} = {value:.15g}\n" for key, value in values.items())


def make_settings(job: LoadJob, rows: int, user_conf: Path) -> Any:
    """Return LoadGen's TestSettings for ``job`` and a data set of ``rows`` samples.

    Call it once per process: LoadGen leaves seeds at zero on a second FromConfig.

    Raises:
        FlowError: if official settings are asked for another number of rows, or LoadGen cannot
            read user.conf.
    """
    import mlperf_loadgen as lg

    settings = lg.TestSettings()
    if job.official:
        if rows != OFFICIAL_ROWS:
            raise FlowError(
                f"official settings need {OFFICIAL_ROWS} rows; {job.dataset} has {rows}"
            )
        failed = settings.FromConfig(
            str(user_conf), LOADGEN_MODELS[job.scenario], job.loadgen_scenario, 1
        )
        if failed:
            raise FlowError(f"LoadGen cannot read {user_conf}")
    else:
        _set_explicitly(settings, job, rows)
    settings.scenario = getattr(lg.TestScenario, job.loadgen_scenario)
    mode = "AccuracyOnly" if job.mode == "accuracy" else "PerformanceOnly"
    settings.mode = getattr(lg.TestMode, mode)
    return settings


def _set_explicitly(settings: Any, job: LoadJob, rows: int) -> None:
    """Set what mlperf.conf would, for a data set of another size (LoadGen, mlperf.conf v6.1)."""
    for name, seed in SEEDS.items():
        setattr(settings, name, seed)
    settings.use_token_latencies = True
    settings.sample_concatenate_permutation = True
    settings.performance_sample_count_override = rows
    settings.min_duration_ms = job.min_duration_ms
    settings.min_query_count = job.min_queries or rows
    settings.server_target_qps = job.target_qps
    settings.offline_expected_qps = job.target_qps
    settings.server_target_latency_ns = 0
    if job.limits_ms is not None:
        settings.ttft_latency, settings.tpot_latency = (round(v * 1e6) for v in job.limits_ms)


def read_bodies(job: LoadJob) -> tuple[list[bytes], list[int]]:
    """Return request bodies and input lengths (tokens) of all rows, in index order.

    Raises:
        FlowError: if the file cannot be read, is empty, or its index is not 0, 1, 2, ...
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    bodies: list[bytes] = []
    lengths: list[int] = []
    try:
        with pq.ParquetFile(job.dataset) as file:
            for batch in file.iter_batches(batch_size=256, columns=["index", "token_ids"]):
                first = len(bodies)
                if batch["index"].to_pylist() != list(range(first, first + len(batch))):
                    raise FlowError(f"{job.dataset}: the index column is not 0, 1, 2, ...")
                for ids in batch["token_ids"].to_pylist():
                    bodies.append(
                        request_body(job.model, ids, job.max_output_tokens, job.request_fields)
                    )
                    lengths.append(len(ids))
    except (OSError, pa.ArrowException) as error:
        raise FlowError(f"cannot read the data set {job.dataset}: {error}") from error
    if not bodies:
        raise FlowError(f"the data set {job.dataset} has no rows")
    return bodies, lengths


class Query:
    """One query: what LoadGen asked, when, and what came of it."""

    __slots__ = ("completion", "first_reported", "index", "issued_ns", "query_id")

    def __init__(self, query_id: int, index: int, issued_ns: int) -> None:
        self.query_id = query_id
        self.index = index
        self.issued_ns = issued_ns
        self.completion: Completion | None = None
        self.first_reported = False


class LoadGenRun:
    """The run: connects LoadGen's callbacks with the client. Used once."""

    def __init__(
        self,
        job: LoadJob,
        bodies: Sequence[bytes],
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        import mlperf_loadgen as lg

        self._lg = lg
        self._job = job
        self._bodies = bodies
        self._encode = encode
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: CompletionClient | None = None
        self._waiting: deque[Query] = deque()
        self._tasks: set[asyncio.Task[Completion]] = set()
        self._ended = asyncio.Event()
        self._failures_in_a_row = 0
        self._refused_in_a_row = 0
        self._error: BaseException | None = None
        self.queries: list[Query] = []
        self.completed = 0
        self.failures: Counter[str] = Counter()
        self.first_failure: str | None = None
        self.output_tokens = 0
        self.most_in_flight = 0
        self.most_waiting = 0
        self.loadgen_finished = False
        self.abort_reason: str | None = None
        self.start_ns = 0
        self.wall_s = 0.0
        self.cpu_s = 0.0

    # LoadGen's thread -------------------------------------------------------------------------

    def _issue(self, samples: Any) -> None:
        now = time.perf_counter_ns()
        queries = [Query(sample.id, sample.index, now) for sample in samples]
        assert self._loop is not None
        # After an abort LoadGen goes on with its schedule while the loop is closed; an exception
        # would cross into C++ and end the process before the outcome is written.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._submit, queries)

    def _drive(self, settings: Any) -> None:
        """Run the test from start to end; blocks."""
        lg = self._lg
        try:
            rows = len(self._bodies)
            sut = lg.ConstructSUT(self._issue, lambda: None)
            qsl = lg.ConstructQSL(rows, rows, lambda _samples: None, lambda _samples: None)
            audit = self._job.audit_config or self._job.output_dir / "no_audit.config"
            log_settings = _log_settings(lg, self._job.output_dir)
            lg.StartTestWithLogSettings(sut, qsl, settings, log_settings, str(audit))
            lg.DestroyQSL(qsl)
            lg.DestroySUT(sut)
            self.loadgen_finished = True
        except Exception as error:
            self._error = error
        finally:
            assert self._loop is not None
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._ended.set)

    # The loop's thread ------------------------------------------------------------------------

    def _submit(self, queries: list[Query]) -> None:
        self.queries.extend(queries)
        self._waiting.extend(queries)
        self._fill()
        self.most_waiting = max(self.most_waiting, len(self._waiting))

    def _fill(self) -> None:
        """Start waiting queries while there are connections."""
        if self.abort_reason is not None:
            while self._waiting:
                self._fail(self._waiting.popleft())
            return
        assert self._loop is not None and self._client is not None
        while self._waiting and len(self._tasks) < self._job.max_connections:
            query = self._waiting.popleft()
            task = self._loop.create_task(
                self._client.stream(
                    self._bodies[query.index],
                    partial(self._report_first, query),
                    partial(self._report_done, query),
                )
            )
            self._tasks.add(task)
            task.add_done_callback(self._task_ended)
        self.most_in_flight = max(self.most_in_flight, len(self._tasks))

    def _task_ended(self, task: asyncio.Task[Completion]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
            self.abort(f"the client failed: {error!r}")
        self._fill()

    def _fail(self, query: Query) -> None:
        now = time.perf_counter_ns()
        completion = Completion(now, None, now, error="aborted", detail=self.abort_reason)
        self._report_done(query, completion)

    def _ids(self, completion: Completion) -> array.array[int]:
        """Return the output ids, re-tokenized when the server streams none."""
        if completion.token_ids is None:
            if self._encode is None:
                completion.error = "malformed"
                completion.detail = (
                    "the server streams no token_ids; ask for them in the request fields, or give "
                    "the tokenizer"
                )
                return _FILLER
            completion.token_ids = self._encode(completion.text)
        return array.array("i", completion.token_ids)

    def _report_first(self, query: Query, completion: Completion) -> None:
        ids = completion.token_ids
        if ids is None and self._encode is not None:
            ids = self._encode(completion.text)
        data = array.array("i", ids or (0,))
        address, length = data.buffer_info()
        response = self._lg.QuerySampleResponse(query.query_id, address, length * data.itemsize)
        self._lg.FirstTokenComplete([response])
        query.first_reported = True

    def _report_done(self, query: Query, completion: Completion) -> None:
        data = _FILLER if completion.error is not None else self._ids(completion)
        if not query.first_reported:
            self._report_first(query, completion)
        address, length = data.buffer_info()
        size = length * data.itemsize
        response = self._lg.QuerySampleResponse(query.query_id, address, size, length)
        self._lg.QuerySamplesComplete([response])
        query.completion = completion
        self._count(query, completion)

    def _count(self, query: Query, completion: Completion) -> None:
        if completion.error is None:
            self.completed += 1
            self.output_tokens += len(completion.token_ids or ())
            self._failures_in_a_row = self._refused_in_a_row = 0
            return
        self.failures[completion.error] += 1
        if self.first_failure is None:
            self.first_failure = f"sample {query.index}: {completion.error}: {completion.detail}"
            logger.error("first failure: %s", self.first_failure)
        if completion.error != "aborted":
            self._stop_if_lost(completion.error)

    def _stop_if_lost(self, kind: str) -> None:
        self._failures_in_a_row += 1
        self._refused_in_a_row = self._refused_in_a_row + 1 if kind == "connect" else 0
        if self._refused_in_a_row >= _REFUSED_LIMIT:
            self.abort(f"no connection to the server for {_REFUSED_LIMIT} requests in a row")
        elif self._failures_in_a_row >= self._job.stop_after_consecutive_failures:
            self.abort(f"{self._failures_in_a_row} requests in a row failed")

    def abort(self, reason: str) -> None:
        """Fail everything that is open, now and from now on, and end the run soon."""
        if self.abort_reason is not None:
            return
        self.abort_reason = reason
        logger.error("giving up: %s", reason)
        assert self._loop is not None
        self._loop.call_soon(self._abort_open)
        # A Server schedule goes on until its end whatever happens; do not wait for that.
        self._loop.call_later(_ABORT_GRACE_S, self._ended.set)

    def _abort_open(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        self._fill()

    async def _show_progress(self) -> None:
        while True:
            before = self.output_tokens
            await asyncio.sleep(self._job.progress_interval_s)
            rate = (self.output_tokens - before) / self._job.progress_interval_s
            failed = sum(self.failures.values())
            logger.info(
                "%s %s: %d of %d issued queries done, %d failed, %d waiting, %.1f tokens/s",
                *(self._job.scenario, self._job.mode, self.completed + failed),
                *(len(self.queries), failed, len(self._waiting), rate),
            )

    async def execute(self, settings: Any) -> None:
        """Run the test.

        Raises:
            Exception: whatever LoadGen or the client raised that is no failure of a request.
        """
        job = self._job
        self._loop = asyncio.get_running_loop()
        self._install_signal_handlers()
        async with CompletionClient.open(
            job.base_url, job.max_connections, job.request_timeout_s
        ) as self._client:
            thread = threading.Thread(target=self._drive, args=(settings,), daemon=True)
            gc.collect()
            gc.freeze()
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
            cpu_s, self.start_ns = time.process_time(), time.perf_counter_ns()
            thread.start()
            progress = self._loop.create_task(self._show_progress())
            await self._ended.wait()
            progress.cancel()
            self.cpu_s = time.process_time() - cpu_s
            self.wall_s = (time.perf_counter_ns() - self.start_ns) / 1e9
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._error is not None:
            raise self._error

    def _install_signal_handlers(self) -> None:
        import signal

        assert self._loop is not None
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._loop.add_signal_handler(signum, self._stop, f"stopped by {signum.name}")

    def _stop(self, reason: str) -> None:
        self.abort(reason)
        self._ended.set()


def _log_settings(lg: Any, folder: Path) -> Any:
    output = lg.LogOutputSettings()
    output.outdir = str(folder)
    output.copy_summary_to_stdout = False
    settings = lg.LogSettings()
    settings.log_output = output
    settings.enable_trace = False
    return settings


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
    if schedule is None or len(schedule) != len(run.queries):
        return unknown, how
    issued = [query.issued_ns - run.start_ns for query in run.queries]
    origin = min((i - s for i, s in zip(issued, schedule, strict=True)), default=0)
    return [origin + time_ns for time_ns in schedule], how


def _query_row(
    query: Query, scheduled: int | None, start_ns: int, lengths: Sequence[int]
) -> dict[str, Any]:
    completion = query.completion or Completion(error="aborted", detail="the run ended before")
    status = "failed" if completion.error else "ok" if completion.text else "empty"

    def relative(value: int | None) -> int | None:
        return value - start_ns if value else None

    return {
        "id": query.query_id,
        "index": query.index,
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
        [("id", pa.uint64()), ("index", pa.int64())]
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

    names = ("mlcommons-loadgen", "aiohttp", "pyarrow")
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
            "empty": sum(1 for c in answers if not c.text),
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
            "min_duration_ms": job.min_duration_ms,
            "min_queries": job.min_queries,
            "limits_ms": list(job.limits_ms) if job.limits_ms else None,
        },
        "user_conf": user_conf,
        "max_output_tokens": job.max_output_tokens,
        "min_output_tokens": job.min_output_tokens,
        "request_fields": job.request_fields,
        "audit": job.audit_config is not None,
    }


def _encoder(path: Path | None) -> Callable[[str], list[int]] | None:
    if path is None:
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return encode


def run_job(job: LoadJob) -> dict[str, Any]:
    """Run ``job`` and write its files; outcome.json comes last. Returns the outcome.

    Raises:
        FlowError: if the job cannot be started.
    """
    bodies, lengths = read_bodies(job)
    job.output_dir.mkdir(parents=True, exist_ok=True)
    user_conf = job.output_dir / "user.conf"
    text = user_conf_text(job, len(bodies))
    user_conf.write_text(text, encoding="utf-8")
    settings = make_settings(job, len(bodies), user_conf)
    run = LoadGenRun(job, bodies, _encoder(job.tokenizer))
    asyncio.run(run.execute(settings))
    how = write_queries(run, job, lengths)
    write_outputs(run, job)
    result = outcome(run, job, text) | {"scheduled": how}
    atomic_write_text(job.output_dir / "outcome.json", json.dumps(result, indent=1) + "\n")
    return result
