"""The job that measures: it owns server and load generator, keeps every attempt, and writes the
record of the run last.

A run that LoadGen brought to its end is data, failed queries included: it gets a record, with state
``failed`` if need be. A server that died, or a load generator that did, leaves no record, only the
attempt with its logs and failure.json.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fp8flow.accelerator import accelerator_keys, accelerator_lock
from fp8flow.backends import Backend, get_backend
from fp8flow.cli import Stopped, script_main
from fp8flow.client import Completion, request_body, run_requests
from fp8flow.errors import FlowError
from fp8flow.loadgen import OFFICIAL_ROWS
from fp8flow.log import get_logger
from fp8flow.ports import check_client_limits, choose_port
from fp8flow.records import Record, atomic_write_text, new_attempt, verify_record, write_record
from fp8flow.runs import build_run_result
from fp8flow.server import (
    GuardedProcess,
    RunningServer,
    describe_exit,
    guarded,
    log_tail,
    running_server,
)
from fp8flow.spec import Spec, canonical_json, sha256_text

HOST = "127.0.0.1"
SAMPLES = "samples.parquet"
FAILURE = "failure.json"
OUTCOME = "outcome.json"
_FIRST_TOKENS = 4
_FIRST_PROMPTS = 3
_WARM_UP_SEED = 20_260_401
_WORKER_GRACE_S = 8.0
_POLL_S = 0.2
# How long a dead server's guard may take to say so after the client has seen it.
_DEATH_NOTICE_S = 1.0
# Launchers of a cluster job would make MPI inside the server believe that it is a rank of it.
_FOREIGN_PREFIXES = ("SLURM_", "PMI", "OMPI_", "PRTE_", "HYDRA_", "FLUX_")

logger = get_logger(__name__)

Prompts = Sequence[Any]  # of int32 arrays; NumPy is not imported at import


@dataclass(frozen=True)
class Resources:
    """How a job runs; nothing here changes its product.

    Attributes:
        threads: CPU threads of the server.
        ready_timeout_s: longest time until the server is ready.
        stop_grace_s: time between TERM and KILL.
    """

    threads: int = 1
    ready_timeout_s: float = 600.0
    stop_grace_s: float = 20.0


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that all commands with a server share."""
    defaults = Resources()
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="manifest.json of the checkpoint")
    add("--dataset", type=Path, required=True, help="manifest.json of the evaluation set")
    add("--output", type=Path, required=True, help="the record to write (JSON)")
    add(
        "--threads",
        type=int,
        default=os.cpu_count() or 1,
        help="CPU threads of the server (default: all of this host)",
    )
    add(
        "--ready-timeout-s",
        type=float,
        default=defaults.ready_timeout_s,
        help="longest time until the server is ready (default: %(default)s)",
    )
    add(
        "--stop-grace-s",
        type=float,
        default=defaults.stop_grace_s,
        help="time the server gets to stop before it is killed (default: %(default)s)",
    )


@dataclass(frozen=True)
class Task:
    """One command with a server: what it works on, how, and where its record goes.

    Attributes:
        spec: what determines the product.
        checkpoint: manifest.json of the checkpoint.
        dataset: manifest.json of the evaluation set.
        output: the record to write; attempts go to ``attempts/<n>`` beside it.
        backend: the engine.
    """

    spec: Spec
    checkpoint: Path
    dataset: Path
    output: Path
    backend: Backend
    resources: Resources = field(default_factory=Resources)

    @classmethod
    def of(cls, args: argparse.Namespace, spec: Spec, backend: Backend) -> Task:
        """Return the task given on a command line (see :func:`add_load_arguments`)."""
        resources = Resources(args.threads, args.ready_timeout_s, args.stop_grace_s)
        return cls(spec, args.checkpoint, args.dataset, args.output, backend, resources)


@dataclass
class Workload:
    """What is served and asked: the verified inputs of a job.

    ``prompts`` are the token ids of all samples, int32 arrays in index order.
    """

    checkpoint: Record
    dataset: Record
    model_name: str
    prompts: Prompts

    @property
    def samples(self) -> Path:
        """The evaluation set's file."""
        return self.dataset.root / SAMPLES

    @property
    def inputs(self) -> dict[str, Record]:
        """The records, for the record of the run."""
        return {"checkpoint": self.checkpoint, "dataset": self.dataset}


@dataclass
class Serving:
    """A server that gave its first token, and what was found out about it."""

    server: RunningServer
    backend: Backend
    workload: Workload
    facts: dict[str, Any] = field(default_factory=dict)

    def ask(
        self, prompts: Prompts, *, max_tokens: int, connections: int, timeout_s: float
    ) -> list[Completion]:
        """Send prompts outside the measurement; one completion per prompt, in order."""
        fields = self.backend.request_fields(1)
        name = self.workload.model_name
        bodies = [request_body(name, prompt.tolist(), max_tokens, fields) for prompt in prompts]
        return run_requests(
            self.server.base_url, bodies, max_connections=connections, timeout_s=timeout_s
        )

    def require_answers(
        self, completions: Sequence[Completion], what: str, allow_empty: bool = False
    ) -> None:
        """Check that every request was answered.

        Args:
            completions: what became of the requests.
            what: they were sent for, for the message.
            allow_empty: to random tokens an answer that ends at once is a proper one.

        Raises:
            FlowError: with the first failure, or the end of the server's log if it died.
        """
        allowed = {None, "empty"} if allow_empty else {None}
        failed = [c for c in completions if c.error not in allowed]
        if not failed:
            return
        time.sleep(_DEATH_NOTICE_S)
        self.server.require_alive(f"in {what}")
        raise FlowError(
            f"{what}: {len(failed)} of {len(completions)} requests failed; first: "
            f"{failed[0].error}: {failed[0].detail}. End of the server's log "
            f"({self.server.log_path}):\n{log_tail(self.server.log_path)}"
        )


MakeResult = Callable[[], dict[str, Any]]
Use = Callable[[Serving, Path], MakeResult]


def read_workload(checkpoint: Path, dataset: Path, model_name: str) -> Workload:
    """Verify and read what a job works on.

    Args:
        checkpoint: manifest.json of the checkpoint.
        dataset: manifest.json of the evaluation set.
        model_name: the name that the server gives the model.

    Raises:
        FlowError: if an input is missing, was changed after it was made, or has no samples.
    """
    import pyarrow.parquet as pq

    records = verify_record(checkpoint), verify_record(dataset)
    samples = dataset.parent / SAMPLES
    column = pq.read_table(samples, columns=["token_ids"])["token_ids"].combine_chunks()
    if not len(column):
        raise FlowError(f"{samples} has no samples")
    # Views into one buffer: lists of Python integers would take ten times the memory.
    flat = column.flatten().to_numpy().astype("int32", copy=False)
    offsets = column.offsets.to_numpy() - column.offsets[0].as_py()
    prompts = [flat[a:b] for a, b in itertools.pairwise(offsets)]
    return Workload(*records, model_name, prompts)


def warm_up_prompts(prompts: Prompts, count: int) -> Prompts:
    """Return ``count`` different prompts that are not in the set, of lengths as in the set.

    They are made of ids that occur in the set, so every vocabulary has them.
    """
    import numpy as np

    generator = np.random.default_rng(_WARM_UP_SEED)
    vocabulary = np.unique(np.concatenate(prompts))
    known = {prompt.tobytes() for prompt in prompts}
    made: list[Any] = []
    extra = 0
    while len(made) < count:
        length = len(prompts[int(generator.integers(len(prompts)))]) + extra
        prompt = generator.choice(vocabulary, length)
        if prompt.tobytes() in known:
            extra += 1  # a tiny set may have no other prompt of its own lengths
            continue
        known.add(prompt.tobytes())
        made.append(prompt)
    return made


def server_environment(backend: Backend, threads: int) -> dict[str, str]:
    """Return a server's environment: the job's, without what a cluster's launcher has set, and
    what the backend wants."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN_PREFIXES)}
    return kept | backend.serve_environment(threads)


def read_settings(
    server: RunningServer, backend: Backend, consequence: str = "nothing was measured"
) -> dict[str, Any]:
    """Return the effective settings of the server.

    Args:
        server: a server that is ready.
        backend: the engine.
        consequence: what it means if the server reuses prefixes, for the message.

    Raises:
        FlowError: if they cannot be read, or the server reuses prefixes of earlier prompts or has
            counted that it did.
    """
    settings = backend.parse_settings(server.get_json(backend.settings_path))
    reuse = settings.get("prefix_reuse")
    hits = (settings.get("counters") or {}).get("prefix_hit_tokens")
    if reuse is not False or hits:
        shown = "says that it reuses" if reuse or hits else "does not say whether it reuses"
        raise FlowError(
            f"the {backend.name} server {shown} prefixes of earlier prompts (prefix_reuse: "
            f"{json.dumps(reuse)}, prefix_hit_tokens: {json.dumps(hits)} at {server.base_url}"
            f"{backend.settings_path}); MLPerf Inference forbids caching across queries, so "
            f"{consequence}. Switch it off in the engine"
        )
    return settings


def read_settings_again(serving: Serving) -> dict[str, Any]:
    """Return the settings of a server after its load; all but the counters must be as before.

    Raises:
        FlowError: if the server reused a prefix meanwhile, or a setting has changed.
    """
    void = "what was measured does not count"
    before = serving.facts["settings"]
    after = read_settings(serving.server, serving.backend, void)
    changed = [
        f"{key} was {json.dumps(before.get(key))} and is {json.dumps(after.get(key))}"
        for key in sorted({*before, *after} - {"counters"})
        if before.get(key) != after.get(key)
    ]
    if changed:
        raise FlowError(
            f"the {serving.backend.name} server changed its settings while it was in use "
            f"({'; '.join(changed)}), so {void}. Find out what else talks to it, and run again"
        )
    return after


def _first_token(serving: Serving, timeout_s: float) -> None:
    """Ask for the first real tokens, which may compile or load things."""
    started = time.monotonic()
    answers: list[Completion] = []
    for prompt in warm_up_prompts(serving.workload.prompts, _FIRST_PROMPTS):
        answers = serving.ask(
            [prompt], max_tokens=_FIRST_TOKENS, connections=1, timeout_s=timeout_s
        )
        serving.require_answers(answers, "the first request", allow_empty=True)
        if answers[0].error is None:
            break
    serving.require_answers(answers, "the first request")
    serving.facts["first_answer_s"] = round(time.monotonic() - started, 3)
    logger.info("the server gave its first token (%.1f s)", serving.facts["first_answer_s"])


@contextlib.contextmanager
def serve(
    backend: Backend,
    workload: Workload,
    settings: Mapping[str, Any],
    resources: Resources,
    log_path: Path,
    timeout_s: float,
    locks: tuple[int, ...] = (),
) -> Iterator[Serving]:
    """Run a server that has given its first token; it is gone at the end.

    Args:
        backend: the engine.
        workload: what is served.
        settings: ``engine.serve`` of the configuration.
        resources: how to run it.
        log_path: the server's log.
        timeout_s: limit for the first answer.
        locks: descriptors of the accelerator's locks.

    Raises:
        FlowError: if the server does not come up, gives no token, reuses prefixes, dies in the
            block or leaves something behind.
    """
    port = choose_port(HOST)
    argv = backend.serve_command(
        workload.checkpoint.root,
        settings,
        model_name=workload.model_name,
        host=HOST,
        port=port,
        threads=resources.threads,
    )
    with running_server(
        argv,
        host=HOST,
        port=port,
        log_path=log_path,
        ready_timeout_s=resources.ready_timeout_s,
        stop_grace_s=resources.stop_grace_s,
        env=server_environment(backend, resources.threads),
        uses_gpu=backend.uses_gpu,
        keep_open=locks,
    ) as server:
        facts: dict[str, Any] = {
            "backend": backend.name,
            "argv": [Path(argv[0]).name, *argv[1:]],
            "threads": resources.threads,
            "startup_s": round(server.startup_s, 3),
            "settings": read_settings(server, backend),
        }
        facts["prefix_reuse"] = facts["settings"]["prefix_reuse"]
        serving = Serving(server, backend, workload, facts)
        _first_token(serving, timeout_s)
        yield serving


def warm_up(serving: Serving, harness: Mapping[str, Any]) -> None:
    """Send the configured number of prompts that are not in the set."""
    count = harness["warmup_requests"]
    if not count:
        serving.facts["warmup_requests"] = 0
        return
    started = time.monotonic()
    # Not those that were, or could have been, asked for the first token.
    prompts = warm_up_prompts(serving.workload.prompts, count + _FIRST_PROMPTS)[_FIRST_PROMPTS:]
    answers = serving.ask(
        prompts,
        max_tokens=harness["max_output_tokens"],
        connections=min(count, harness["max_connections"]),
        timeout_s=harness["request_timeout_s"],
    )
    serving.require_answers(answers, "the warm-up", allow_empty=True)
    serving.facts["warmup_requests"] = count
    logger.info("warm-up: %d requests in %.1f s", count, time.monotonic() - started)


def job_settings(spec: Spec, mode: str, serving: Serving, attempt: Path) -> dict[str, Any]:
    """Return job.json of the load generator (see fp8flow.loadgen.LoadJob)."""
    harness, scenario = spec.settings["harness"], spec.settings["scenario_settings"]
    own_limits = [key for key in ("ttft_limit_ms", "tpot_limit_ms") if scenario[key] is not None]
    rows = len(serving.workload.prompts)
    why = ""
    if rows != OFFICIAL_ROWS:
        why = f"the data set has {rows} rows; the benchmark's has {OFFICIAL_ROWS}"
    elif own_limits:
        why = f"{' and '.join(own_limits)} set in the configuration"
    tokenizer = serving.workload.checkpoint.root / "tokenizer.json"
    given = ("target_qps", "min_duration_ms", "min_queries", "ttft_limit_ms", "tpot_limit_ms")
    job = {key: scenario[key] for key in given if key in scenario}
    for key in ("max_output_tokens", "min_output_tokens", "max_connections", "request_timeout_s"):
        job[key] = harness[key]
    return job | {
        "dataset": str(serving.workload.samples),
        "base_url": serving.server.base_url,
        "model": serving.workload.model_name,
        "scenario": spec.settings["scenario"],
        "mode": mode,
        "official": not why,
        "why": why,
        "request_fields": serving.backend.request_fields(harness["min_output_tokens"]),
        "output_dir": str(attempt),
        "tokenizer": None if serving.backend.streams_token_ids else str(tokenizer),
    }


class _Follower:
    """Shows what is appended to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def show(self) -> None:
        """Write what is new to stderr."""
        with contextlib.suppress(OSError), self._path.open("rb") as stream:
            stream.seek(self._read)
            new = stream.read()
            self._read += len(new)
            sys.stderr.write(new.decode("utf-8", "replace"))
            sys.stderr.flush()


def _progress_so_far(attempt: Path) -> str:
    """Return what is known of the queries of an attempt that was cut short."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        counts = json.loads((attempt / OUTCOME).read_text(encoding="utf-8"))["counts"]
        return (
            f"{counts['issued']} queries issued, {counts['completed']} completed, "
            f"{counts['failed']} failed"
        )
    return f"the load generator's last words: {log_tail(attempt / 'loadgen.log', 1).strip()}"


def _worker_command(job: Path) -> list[str]:
    program = Path(__file__).resolve().parents[1] / "loadgen_worker.py"
    return [sys.executable, str(program), "--job", str(job)]


def _watch(worker: GuardedProcess, server: RunningServer, attempt: Path) -> None:
    """Wait for the load generator while the server lives.

    Raises:
        FlowError: if the server dies, or the load generator ends without an outcome.
    """
    follower = _Follower(attempt / "loadgen.log")
    while worker.alive() and server.process.alive():
        follower.show()
        time.sleep(_POLL_S)
    if worker.exit_code != 0:
        time.sleep(_DEATH_NOTICE_S)
    if (death := server.death()) is not None:
        worker.stop()
        follower.show()
        raise FlowError(f"the server died in the run ({_progress_so_far(attempt)}): it {death}")
    follower.show()
    outcome = _outcome(attempt)
    if worker.exit_code not in (0, 1) or not outcome or _was_stopped(outcome):
        log = attempt / "loadgen.log"
        raise FlowError(
            f"the load generator {describe_exit(worker.exit_code)} in the run "
            f"({_progress_so_far(attempt)}). End of its log ({log}):\n{log_tail(log)}"
        )


def _outcome(attempt: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((attempt / OUTCOME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def _was_stopped(outcome: Mapping[str, Any]) -> bool:
    """Tell whether a signal ended the load generator; what it wrote then is no measurement."""
    return str(outcome.get("reason") or "").startswith("stopped by")


def run_load_generator(job: Mapping[str, Any], server: RunningServer, attempt: Path) -> None:
    """Run LoadGen in a process of its own, which ends with this one.

    Raises:
        FlowError: if it or the server does not last until the end.
    """
    path = attempt / "job.json"
    atomic_write_text(path, json.dumps(job, indent=1) + "\n")
    options = {"log_path": attempt / "loadgen.log", "grace_s": _WORKER_GRACE_S}
    with guarded(_worker_command(path), **options) as worker:
        _watch(worker, server, attempt)


def _describe_attempt(attempt: Path) -> str:
    """Return what became of an attempt."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        failure = json.loads((attempt / FAILURE).read_text(encoding="utf-8"))
        return f"{attempt.name} failed ({str(failure['reason']).splitlines()[0]})"
    outcome = _outcome(attempt)
    if outcome and not _was_stopped(outcome):
        return f"{attempt.name} {outcome.get('state', 'ended')}"
    return f"{attempt.name} was interrupted"


def report_earlier_attempts(folder: Path) -> None:
    """Say in one line which attempts are there already; they are kept and never reused."""
    attempts = [p for p in (folder / "attempts").glob("*") if p.name.isdigit()]
    if attempts:
        attempts.sort(key=lambda path: int(path.name))
        last = _describe_attempt(attempts[-1])
        logger.info(
            "found %d earlier attempt(s) in %s, the last: %s; starting a new one, they are kept",
            *(len(attempts), folder / "attempts", last),
        )


@contextlib.contextmanager
def kept_failure(attempt: Path) -> Iterator[None]:
    """Write failure.json into the attempt when the block fails or is stopped by a signal."""
    try:
        yield
    except BaseException as error:
        failure = {
            "reason": f"stopped by {error}" if isinstance(error, Stopped) else str(error),
            "kind": type(error).__name__,
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "logs": sorted(path.name for path in attempt.glob("*.log")),
        }
        with contextlib.suppress(OSError):
            atomic_write_text(attempt / FAILURE, json.dumps(failure, indent=1) + "\n")
        logger.error("the attempt is kept in %s", attempt)
        raise


@contextlib.contextmanager
def new_kept_attempt(folder: Path, backend: Backend) -> Iterator[tuple[Path, tuple[int, ...]]]:
    """Wait for the accelerator, then yield a new attempt's folder and the locks' descriptors."""
    with accelerator_lock(accelerator_keys(backend.uses_gpu)) as locks:
        report_earlier_attempts(folder)
        attempt = new_attempt(folder)
        with kept_failure(attempt):
            yield attempt, locks


def _workload_facts(spec: Spec, workload: Workload) -> dict[str, Any]:
    digests = {
        "dataset_digest": workload.dataset.digest,
        "checkpoint_digest": workload.checkpoint.digest,
    }
    whole = canonical_json({**digests, "settings": spec.settings})
    return {**digests, "workload_sha256": sha256_text(whole)}


def serve_and_record(task: Task, use: Use, *, connections: int, timeout_s: float) -> Record:
    """Serve, use the server, stop it, and write the record of what came out.

    Args:
        task: what to serve and where the record goes; the attempt goes to ``attempts/<n>`` there.
        use: gets the server and the attempt's folder; returns the function that makes the result
            once the server is gone.
        connections: most connections that are open at a time.
        timeout_s: limit for the first answer.

    Raises:
        FlowError: if the server does not work, or does not stay as it was; there is no record
            then, and failure.json in the attempt says why.
    """
    started = time.time()
    check_client_limits(connections)
    workload = read_workload(task.checkpoint, task.dataset, task.spec.settings["model"]["name"])
    settings = task.spec.settings["engine"]["serve"]
    with new_kept_attempt(task.output.parent, task.backend) as (attempt, locks):
        log_path = attempt / "server.log"
        server = serve(task.backend, workload, settings, task.resources, log_path, timeout_s, locks)
        with server as serving:
            result_of = use(serving, attempt)
            serving.facts["memory"] = serving.server.memory()
            serving.facts["settings_after"] = read_settings_again(serving)
        result = result_of()
    names = [p.relative_to(task.output.parent).as_posix() for p in sorted(attempt.iterdir())]
    return write_record(
        task.output, task.spec, result, inputs=workload.inputs, files=names, started=started
    )


def run_load_job(task: Task, mode: str) -> Record:
    """Measure once and write the record of the run.

    Args:
        task: its output is run.json.
        mode: performance or accuracy.

    Raises:
        FlowError: if server or load generator did not last until the end, or the server did not
            keep its settings; there is no run.json then.
    """
    harness = task.spec.settings["harness"]

    def measure(serving: Serving, attempt: Path) -> MakeResult:
        warm_up(serving, harness)
        job = job_settings(task.spec, mode, serving, attempt)
        run_load_generator(job, serving.server, attempt)
        return lambda: build_run_result(
            attempt,
            tokenizer=serving.workload.checkpoint.root,
            server=serving.facts,
            workload=_workload_facts(task.spec, serving.workload),
        )

    record = serve_and_record(
        task,
        measure,
        connections=harness["max_connections"],
        timeout_s=harness["request_timeout_s"],
    )
    _tell(record.result)
    return record


def run_command(description: str | None, work: Callable[[Task], object]) -> int:
    """Run a command with a server: parse its arguments, do ``work``; return the exit status."""

    def run(args: argparse.Namespace, spec: Spec) -> None:
        work(Task.of(args, spec, get_backend(spec.settings["engine"]["backend"])))

    return script_main(description, add_load_arguments, run)


def main(mode: str, description: str | None) -> int:
    """Be the command run_performance or run_accuracy; return the exit status."""
    return run_command(description, lambda task: run_load_job(task, mode))


def _tell(result: Mapping[str, Any]) -> None:
    counts = result["counts"]
    if result["state"] != "complete":
        logger.warning(
            "THE RUN FAILED and is no valid measurement: %s (%d of %d queries failed). It is "
            "recorded as it is",
            *(result["reason"], counts["failed"], counts["issued"]),
        )
        return
    rate, duration_s = result["throughput"]["output_tokens_per_s"], result["duration_s"]
    logger.info(
        "%s %s: %d queries in %.1f s, %.1f output tokens/s",
        *(result["scenario"], result["mode"], counts["completed"], duration_s or 0.0, rate or 0.0),
    )
    if result["loadgen"]["valid"] is False:
        logger.warning("LoadGen calls the run INVALID: %s", result["loadgen"]["invalid_reason"])
