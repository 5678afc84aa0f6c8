"""From a configuration to servers that have given their first token."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fp8flow.accelerator import Accelerators, Gpu, gpu_environment
from fp8flow.backends import Backend, Place, Served
from fp8flow.client import Completion
from fp8flow.errors import FlowError
from fp8flow.log import get_logger
from fp8flow.ports import choose_ports
from fp8flow.records import atomic_write_text
from fp8flow.server import Endpoint, ServerPlan, running_servers
from fp8flow.serving import Serving, note_settings, sums
from fp8flow.workload import Workload, warm_up_prompts

HOST = "127.0.0.1"
_FIRST_TOKENS = 4
_FIRST_PROMPTS = 3
_FOREIGN_PREFIXES = (
    # Launchers of a cluster job would make MPI inside the server believe that it is a rank of it.
    *("SLURM_", "PMI", "OMPI_", "PRTE_", "HYDRA_", "FLUX_"),
    # Hidden settings of an engine; engine.environment is the place for them.
    *("VLLM_", "SGLANG_", "SGL_", "TRTLLM_", "TLLM_", "TORCHDYNAMO_", "TORCHINDUCTOR_"),
)
_FOREIGN = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("CUDA_LAUNCH_BLOCKING", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    }
)

logger = get_logger(__name__)


@dataclass(frozen=True)
class Resources:
    """How a job runs; nothing here changes its product.

    Attributes:
        threads: CPU threads of all servers together.
        ready_timeout_s: longest time until the servers are ready.
        stop_grace_s: time between TERM and KILL.
        launcher: what comes before a server's command line, as in a shell.
    """

    threads: int = 1
    ready_timeout_s: float = 600.0
    stop_grace_s: float = 20.0
    launcher: str = ""

    @property
    def launcher_words(self) -> list[str]:
        """The launcher as words of a command line."""
        return shlex.split(self.launcher)

    def threads_each(self, servers: int) -> int:
        """Return the CPU threads of one of several servers."""
        return max(1, self.threads // servers)


def inherited_environment() -> dict[str, str]:
    """Return what a server takes over of the job's environment.

    Left out is what a cluster's launcher has set, and what would change an engine's behaviour
    without being part of the configuration.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _FOREIGN and not name.startswith(_FOREIGN_PREFIXES)
    }


def _first_token(serving: Serving, server: Endpoint, timeout_s: float) -> float:
    """Ask for the first real tokens, which may compile or load things; return the time, s."""
    started = time.monotonic()
    answers: list[Completion] = []
    for prompt in warm_up_prompts(serving.workload.prompts, _FIRST_PROMPTS):
        answers = serving.ask(
            [prompt], max_tokens=_FIRST_TOKENS, connections=1, timeout_s=timeout_s, server=server
        )
        serving.require_answers(answers, "the first request", allow_empty=True)
        if answers[0].error is None:
            break
    serving.require_answers(answers, "the first request")
    taken_s = round(time.monotonic() - started, 3)
    logger.info("%s gave its first token (%.1f s)", server.name, taken_s)
    return taken_s


def _first_tokens(serving: Serving, timeout_s: float) -> None:
    """Have every server give its first token."""
    for server, fact in zip(serving.servers, serving.facts["servers"], strict=True):
        fact["first_answer_s"] = _first_token(serving, server, timeout_s)
    serving.facts["first_answer_s"] = max(f["first_answer_s"] for f in serving.facts["servers"])


def _write_serve_files(
    backend: Backend, engine: Mapping[str, Any], served: Served, folder: Path
) -> list[str]:
    """Write the files that the servers read beside their logs; return their names."""
    files = backend.serve_files(engine, served)
    for name, text in files.items():
        if Path(name).name != name or (folder / name).exists():
            raise FlowError(f"{backend.name}: the server's file {name!r} cannot be written there")
        atomic_write_text(folder / name, text)
    return sorted(files)


def _require_program(name: str, backend: Backend, path: str | None) -> None:
    if "/" not in name and shutil.which(name, path=path) is None:
        raise FlowError(
            f"the program {name}, which engine.backend {backend.name} needs, is not on PATH: "
            "activate the environment or container that has it, or let Snakemake bring it (--sdm)"
        )


def _plans(
    backend: Backend,
    workload: Workload,
    engine: Mapping[str, Any],
    resources: Resources,
    folder: Path,
    groups: Sequence[Sequence[Gpu]],
) -> list[ServerPlan]:
    """Return one server for each group of GPUs."""
    from fp8flow.launch import cache_environment

    count, inherited = len(groups), inherited_environment()
    threads = resources.threads_each(count)
    own = backend.serve_environment(engine, threads)
    plans = []
    for number, (port, gpus) in enumerate(zip(choose_ports(HOST, count), groups, strict=True)):
        place = Place(HOST, port, workload.model_name, threads, folder)
        variables = {**own, **gpu_environment(gpus)}
        argv = [*resources.launcher_words, *backend.serve_command(engine, workload.served, place)]
        _require_program(argv[0], backend, inherited.get("PATH"))
        plans.append(
            ServerPlan(
                argv,
                host=HOST,
                port=port,
                log_path=folder / ("server.log" if count == 1 else f"server-{number}.log"),
                env=inherited,
                gpus=tuple(gpu.uuid for gpu in gpus),
                more_environment=lambda scratch, more=variables: {  # type: ignore[misc]
                    **cache_environment(scratch),
                    **more,
                },
                name="the server" if count == 1 else f"server {number}",
            )
        )
    return plans


def _plan_facts(plan: ServerPlan, skipped: int) -> dict[str, Any]:
    """Return what is recorded of one server.

    Args:
        plan: the server.
        skipped: how many words of its command line are the launcher's.
    """
    argv = plan.argv[skipped:]
    return {
        "argv": [Path(argv[0]).name, *argv[1:]],
        "port": plan.port,
        "gpus": list(plan.gpus),
        "log": plan.log_path.name,
    }


@contextlib.contextmanager
def _started(
    backend: Backend,
    workload: Workload,
    engine: Mapping[str, Any],
    resources: Resources,
    folder: Path,
    accelerators: Accelerators,
) -> Iterator[Serving]:
    """Start servers; they are gone at the end."""
    files = _write_serve_files(backend, engine, workload.served, folder)
    plans = _plans(backend, workload, engine, resources, folder, accelerators.groups)
    launcher, threads = resources.launcher_words, resources.threads_each(len(plans))
    dropped = sorted(set(os.environ) - set(inherited_environment()))
    with running_servers(
        plans,
        ready_timeout_s=resources.ready_timeout_s,
        stop_grace_s=resources.stop_grace_s,
        keep_open=accelerators.locks,
    ) as servers:
        each = [
            {**_plan_facts(plan, len(launcher)), "startup_s": round(server.startup_s, 3)}
            for plan, server in zip(plans, servers, strict=True)
        ]
        facts: dict[str, Any] = {
            "backend": backend.name,
            "argv": each[0]["argv"],
            "launcher": launcher,
            "files": files,
            "environment": backend.serve_environment(engine, threads),
            "dropped_variables": dropped,
            "replicas": len(plans),
            "threads": threads,
            "startup_s": max(fact["startup_s"] for fact in each),
            "servers": each,
        }
        yield Serving(servers, backend, workload, engine, facts)


def _external(backend: Backend, workload: Workload, engine: Mapping[str, Any]) -> Serving:
    """Return a server that runs already; nothing is started, watched or stopped."""
    address = urlsplit(engine["url"])
    server = Endpoint(address.hostname or "", address.port or 80, f"the server at {engine['url']}")
    facts = {
        "backend": backend.name,
        "argv": [],
        "launcher": [],
        "url": server.base_url,
        "replicas": 1,
        "startup_s": None,
        "servers": [{"argv": [], "port": server.port, "gpus": [], "log": None, "startup_s": None}],
    }
    return Serving([server], backend, workload, engine, facts)


@contextlib.contextmanager
def serve(
    backend: Backend,
    workload: Workload,
    engine: Mapping[str, Any],
    resources: Resources,
    folder: Path,
    timeout_s: float,
    accelerators: Accelerators | None = None,
) -> Iterator[Serving]:
    """Have servers that have given their first token; those that were started are gone at the end.

    Args:
        backend: the inference engine.
        workload: what is served.
        engine: section ``engine`` of the configuration.
        resources: how to run them.
        folder: for their logs and the files that they read.
        timeout_s: limit for the first answer.
        accelerators: what they occupy; one server without GPU when left out.

    Raises:
        FlowError: if a server does not come up, gives no token, does not run with what it was
            told, reuses prefixes, dies in the block or leaves something behind.
    """
    with contextlib.ExitStack() as stack:
        if backend.starts_server:
            used = accelerators or Accelerators()
            started = _started(backend, workload, engine, resources, folder, used)
            serving = stack.enter_context(started)
        else:
            serving = _external(backend, workload, engine)
        note_settings(serving)
        _first_tokens(serving, timeout_s)
        yield serving


def warm_up(serving: Serving, harness: Mapping[str, Any]) -> None:
    """Send the configured number of prompts that are not in the set; each server gets some."""
    asked = harness["warmup_requests"]
    count = max(asked, len(serving.servers)) if asked else 0
    serving.facts["warmup_requests"] = count
    if not count:
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
    logger.info("warm-up: %d requests in %.1f s", count, time.monotonic() - started)


def memory_of(servers: Sequence[Endpoint]) -> dict[str, Any] | None:
    """Return the memory of all servers together, bytes; None where nothing is known of it."""
    return sums([server.memory() for server in servers]) or None
