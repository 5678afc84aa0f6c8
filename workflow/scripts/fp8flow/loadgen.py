"""One MLPerf LoadGen run against an HTTP server.

LoadGen lives in a thread of its own and hands queries to the asyncio loop in the main thread,
which streams the answers and reports them back. LoadGen stamps times at these calls, so nothing
else is done between an event's arrival and the call. One process per run: see
:func:`fp8flow.loadgen_settings.make_settings`.
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
from functools import partial
from pathlib import Path
from typing import Any

from fp8flow.client import Completion, CompletionClient
from fp8flow.loadgen_output import outcome, write_outputs, write_queries
from fp8flow.loadgen_settings import (
    LIMITS_MS,
    OFFICIAL_ROWS,
    SEEDS,
    LoadJob,
    make_settings,
    read_bodies,
    user_conf_text,
)
from fp8flow.log import get_logger
from fp8flow.records import atomic_write_text

__all__ = [
    "LIMITS_MS",
    "OFFICIAL_ROWS",
    "SEEDS",
    "LoadGenRun",
    "LoadJob",
    "Query",
    "run_job",
    "token_array",
]

# What LoadGen gets for a failed query, so that the run can end; such a run never counts.
_FILLER = array.array("i", [0, 0])
# The issue thread of LoadGen waits for the interpreter lock at most this long.
_SWITCH_INTERVAL_S = 0.0005
_ABORT_GRACE_S = 5.0
# Every request ends within its timeout; without any end for so much longer, something is lost.
_STALL_MARGIN_S = 30.0
_STALL_CHECK_S = 1.0
# So many refused connections in a row mean that the server is gone, at any rate of queries.
_REFUSED_LIMIT = 8

logger = get_logger(__name__)


def token_array(ids: Sequence[int]) -> array.array[int]:
    """Return token ids as LoadGen takes them, int32.

    Raises:
        ValueError: if one is no integer, negative, or too large.
    """
    try:
        data = array.array("i", ids)
    except (OverflowError, TypeError):
        data = None
    # JSON's true and false would pass as 1 and 0.
    if data is None or bool in set(map(type, ids)) or min(data, default=0) < 0:
        wrong = [i for i in ids if type(i) is not int or not 0 <= i < 1 << 31]
        raise ValueError(f"{len(wrong)} token ids are no int32 >= 0, the first: {wrong[0]!r:.100}")
    return data


class Query:
    """One query: what LoadGen asked, when, and what came of it."""

    __slots__ = ("completion", "first_reported", "index", "issued_ns", "query_id", "server")

    def __init__(self, query_id: int, index: int, issued_ns: int) -> None:
        self.query_id = query_id
        self.index = index
        self.issued_ns = issued_ns
        self.server = 0
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
        for number, query in enumerate(queries, len(self.queries)):
            query.server = number % len(self._job.base_urls)
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
                    query.server,
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
            logger.error("the client failed", exc_info=error)
            self.abort(f"the client failed: {error!r}")
        self._fill()

    def _fail(self, query: Query) -> None:
        now = time.perf_counter_ns()
        completion = Completion(now, None, now, error="aborted", detail=self.abort_reason)
        self._report_done(query, completion)

    def _ids(self, completion: Completion) -> array.array[int]:
        """Return the output ids, re-tokenized when the server streams none.

        Without ids that LoadGen can take, the completion becomes a ``malformed`` failure and the
        filler is returned.
        """
        try:
            if completion.token_ids is None:
                if self._encode is None:
                    raise ValueError(
                        "the server streams no token_ids; ask for them in the request fields, or "
                        "give the tokenizer"
                    )
                completion.token_ids = self._encode(completion.text)
            return token_array(completion.token_ids)
        except ValueError as error:
            completion.error, completion.detail = "malformed", str(error)
            return _FILLER

    def _report_first(self, query: Query, completion: Completion) -> None:
        ids = completion.token_ids
        if ids is None and self._encode is not None:
            ids = self._encode(completion.text)
        try:
            data = token_array(ids or (0,))
        except ValueError:
            data = _FILLER[:1]  # the whole answer will be refused for these ids
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

    async def _watch_for_stall(self) -> None:
        """Give the run up if queries stay open that nothing will end."""
        assert self._loop is not None
        allowed_s = self._job.request_timeout_s + _STALL_MARGIN_S
        before, since_s = 0, self._loop.time()
        while self.abort_reason is None:
            await asyncio.sleep(_STALL_CHECK_S)
            done = self.completed + sum(self.failures.values())
            still_open = len(self.queries) - done
            if not still_open or done != before:
                before, since_s = done, self._loop.time()
            if still_open and not self._tasks and not self._waiting:
                self.abort(f"{still_open} queries are open, but no request for them is")
            elif self._loop.time() - since_s > allowed_s:
                self.abort(f"none of {still_open} open queries ended in {allowed_s:g} s")

    async def execute(self, settings: Any) -> None:
        """Run the test.

        Raises:
            Exception: whatever LoadGen raised.
        """
        job = self._job
        self._loop = asyncio.get_running_loop()
        self._install_signal_handlers()
        async with CompletionClient.open(
            job.base_urls, job.max_connections, job.request_timeout_s
        ) as self._client:
            thread = threading.Thread(target=self._drive, args=(settings,), daemon=True)
            gc.collect()
            gc.freeze()
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
            cpu_s, self.start_ns = time.process_time(), time.perf_counter_ns()
            thread.start()
            watchers = [
                self._loop.create_task(watcher)
                for watcher in (self._show_progress(), self._watch_for_stall())
            ]
            await self._ended.wait()
            for watcher in watchers:
                watcher.cancel()
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
    import uvloop

    bodies, lengths = read_bodies(job)
    job.output_dir.mkdir(parents=True, exist_ok=True)
    user_conf = job.output_dir / "user.conf"
    text = user_conf_text(job, len(bodies))
    user_conf.write_text(text, encoding="utf-8")
    settings = make_settings(job, len(bodies), user_conf)
    run = LoadGenRun(job, bodies, _encoder(job.tokenizer))
    uvloop.run(run.execute(settings))
    how = write_queries(run, job, lengths)
    write_outputs(run, job)
    result = outcome(run, job, text) | {"scheduled": how}
    atomic_write_text(job.output_dir / "outcome.json", json.dumps(result, indent=1) + "\n")
    return result
