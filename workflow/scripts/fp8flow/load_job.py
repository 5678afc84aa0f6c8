"""The job that measures: it owns servers and load generator, keeps every attempt, and writes the
record of the run last.

A run that LoadGen brought to its end is data, failed queries included: it gets a record, with state
``failed`` if need be. A server that died, or a load generator that did, leaves no record, only the
attempt with its logs and failure.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fp8flow.accelerator import Accelerators, Gpu, accelerator_lock, gpu_groups, require_gpus
from fp8flow.backends import Backend, get_backend
from fp8flow.cli import Stopped, script_main
from fp8flow.errors import FlowError
from fp8flow.loadgen import OFFICIAL_ROWS
from fp8flow.log import get_logger
from fp8flow.ports import check_client_limits
from fp8flow.records import Record, atomic_write_text, new_attempt, write_record
from fp8flow.runs import build_run_result
from fp8flow.serve import Resources, memory_of, serve, warm_up
from fp8flow.server import Endpoint, GuardedProcess, describe_exit, guarded, log_tail
from fp8flow.serving import DEATH_NOTICE_S, Serving, read_settings_again
from fp8flow.spec import Spec, canonical_json, sha256_text
from fp8flow.workload import Workload, read_workload

FAILURE = "failure.json"
OUTCOME = "outcome.json"
_WORKER_GRACE_S = 8.0
_POLL_S = 0.2

logger = get_logger(__name__)


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that all commands with a server share."""
    defaults = Resources()
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="manifest.json of the checkpoint")
    add("--dataset", type=Path, required=True, help="manifest.json of the evaluation set")
    add("--engine", type=Path, nargs="?", help="manifest.json of the TensorRT engine, if any")
    add("--output", type=Path, required=True, help="the record to write (JSON)")
    add(
        "--launcher",
        nargs="?",
        const="",
        default=defaults.launcher,
        help="command that starts the server's command line, for example a container's "
        "(default: none)",
    )
    add(
        "--threads",
        type=int,
        default=os.cpu_count() or 1,
        help="CPU threads of all servers together (default: all of this host)",
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
        backend: the inference engine.
        engine: manifest.json of the TensorRT engine, for the backend that serves one.
    """

    spec: Spec
    checkpoint: Path
    dataset: Path
    output: Path
    backend: Backend
    resources: Resources = field(default_factory=Resources)
    engine: Path | None = None

    @classmethod
    def of(cls, args: argparse.Namespace, spec: Spec, backend: Backend) -> Task:
        """Return the task given on a command line (see :func:`add_load_arguments`)."""
        resources = Resources(
            args.threads, args.ready_timeout_s, args.stop_grace_s, args.launcher or ""
        )
        # A rule without an engine gives the option without a value.
        engine = None if args.engine in (None, Path()) else args.engine
        return cls(spec, args.checkpoint, args.dataset, args.output, backend, resources, engine)


MakeResult = Callable[[], dict[str, Any]]
Use = Callable[[Serving, Path], MakeResult]


def job_settings(spec: Spec, mode: str, serving: Serving, attempt: Path) -> dict[str, Any]:
    """Return job.json of the load generator (see fp8flow.loadgen.LoadJob)."""
    harness, scenario = spec.settings["harness"], spec.settings["scenario_settings"]
    own_limits = [key for key in ("ttft_limit_ms", "tpot_limit_ms") if scenario[key] is not None]
    rows = len(serving.workload.prompts)
    why = ""
    if serving.workload.dataset.result.get("source") == "synthetic":
        why = "the data set is made of random tokens"
    elif rows != OFFICIAL_ROWS:
        why = f"the data set has {rows} rows; the benchmark's has {OFFICIAL_ROWS}"
    elif own_limits:
        why = f"{' and '.join(own_limits)} set in the configuration"
    tokenizer = serving.workload.served.tokenizer / "tokenizer.json"
    given = ("target_qps", "min_duration_ms", "min_queries", "ttft_limit_ms", "tpot_limit_ms")
    job = {key: scenario[key] for key in given if key in scenario}
    for key in ("max_output_tokens", "min_output_tokens", "max_connections", "request_timeout_s"):
        job[key] = harness[key]
    return job | {
        "dataset": str(serving.workload.samples),
        "base_urls": serving.base_urls,
        "model": serving.workload.model_name,
        "scenario": spec.settings["scenario"],
        "mode": mode,
        "official": not why,
        "why": why,
        "request_fields": serving.backend.request_fields(
            harness["min_output_tokens"], harness["max_output_tokens"]
        ),
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


def _dead(servers: Sequence[Endpoint]) -> Endpoint | None:
    return next((server for server in servers if server.death() is not None), None)


def _watch(worker: GuardedProcess, servers: Sequence[Endpoint], attempt: Path) -> None:
    """Wait for the load generator while all servers live.

    Raises:
        FlowError: if a server dies, or the load generator ends without an outcome.
    """
    follower = _Follower(attempt / "loadgen.log")
    while worker.alive() and _dead(servers) is None:
        follower.show()
        time.sleep(_POLL_S)
    if worker.exit_code != 0:
        time.sleep(DEATH_NOTICE_S)
    if (dead := _dead(servers)) is not None:
        worker.stop()
        follower.show()
        dead.require_alive(f"in the run ({_progress_so_far(attempt)})")
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


def run_load_generator(job: Mapping[str, Any], servers: Sequence[Endpoint], attempt: Path) -> None:
    """Run LoadGen in a process of its own, which ends with this one.

    Raises:
        FlowError: if it or a server does not last until the end.
    """
    path = attempt / "job.json"
    atomic_write_text(path, json.dumps(job, indent=1) + "\n")
    options = {"log_path": attempt / "loadgen.log", "grace_s": _WORKER_GRACE_S}
    with guarded(_worker_command(path), **options) as worker:
        _watch(worker, servers, attempt)


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


def gpu_candidates(backend: Backend, engine: Mapping[str, Any]) -> list[Gpu]:
    """Return the GPUs to choose from; none for servers without.

    Raises:
        FlowError: if the configuration needs more than there are.
    """
    if not (backend.starts_server and backend.uses_gpu):
        return []
    servers, each = _shape(engine)
    why = f"engine.replicas {servers} x engine.tensor_parallel {each}"
    return require_gpus(servers * each, why)


def _shape(engine: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many servers there are, and the GPUs of each."""
    return int(engine.get("replicas", 1)), int(engine.get("tensor_parallel", 1))


@contextlib.contextmanager
def occupied(
    backend: Backend, engine: Mapping[str, Any], candidates: Sequence[Gpu]
) -> Iterator[Accelerators]:
    """Lock what the servers occupy: some of the GPUs, the host, or somebody else's server."""
    servers, each = _shape(engine)
    if candidates:
        with gpu_groups(candidates, servers, each) as chosen:
            yield chosen
        return
    with accelerator_lock(["cpu" if backend.starts_server else engine["url"]]) as locks:
        yield Accelerators(((),) * servers, locks)


@contextlib.contextmanager
def new_kept_attempt(
    folder: Path, backend: Backend, engine: Mapping[str, Any], candidates: Sequence[Gpu]
) -> Iterator[tuple[Path, Accelerators]]:
    """Wait for the accelerators, then yield a new attempt's folder and what is occupied."""
    with occupied(backend, engine, candidates) as accelerators:
        report_earlier_attempts(folder)
        attempt = new_attempt(folder)
        with kept_failure(attempt):
            yield attempt, accelerators


def _workload_facts(spec: Spec, workload: Workload) -> dict[str, Any]:
    digests = {
        "dataset_digest": workload.dataset.digest,
        "checkpoint_digest": workload.checkpoint.digest,
    }
    if workload.engine is not None:
        digests["engine_digest"] = workload.engine.digest
    whole = canonical_json({**digests, "settings": spec.settings})
    return {**digests, "workload_sha256": sha256_text(whole)}


def _require_engine(task: Task) -> None:
    if task.spec.settings["engine"].get("path") == "engine" and task.engine is None:
        raise FlowError("engine.path is 'engine': give --engine, the manifest.json of the engine")


def serve_and_record(task: Task, use: Use, *, connections: int, timeout_s: float) -> Record:
    """Serve, use the servers, stop them, and write the record of what came out.

    Args:
        task: what to serve and where the record goes; the attempt goes to ``attempts/<n>`` there.
        use: gets the servers and the attempt's folder; returns the function that makes the result
            once they are gone.
        connections: most connections that are open at a time.
        timeout_s: limit for the first answer.

    Raises:
        FlowError: if there are too few GPUs, or a server does not work or does not stay as it was;
            there is no record then, and failure.json in the attempt says why.
    """
    started = time.time()
    backend, engine = task.backend, task.spec.settings["engine"]
    check_client_limits(connections)
    _require_engine(task)
    candidates = gpu_candidates(backend, engine)
    name = task.spec.settings["model"]["name"]
    workload = read_workload(task.checkpoint, task.dataset, name, task.engine)
    folder = task.output.parent
    with new_kept_attempt(folder, backend, engine, candidates) as (attempt, accelerators):
        server = serve(backend, workload, engine, task.resources, attempt, timeout_s, accelerators)
        with server as serving:
            result_of = use(serving, attempt)
            serving.facts["memory"] = memory_of(serving.servers)
            serving.facts["settings_after"] = read_settings_again(serving)
        result = result_of()
    names = [p.relative_to(folder).as_posix() for p in sorted(attempt.iterdir())]
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
        run_load_generator(job, serving.servers, attempt)
        return lambda: build_run_result(
            attempt,
            tokenizer=serving.workload.served.tokenizer,
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
