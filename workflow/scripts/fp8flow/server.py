"""The servers of a job: started under guards, ready, watched, stopped, and checked to be gone."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fp8flow import guard
from fp8flow.accelerator import computing_on, memory_used
from fp8flow.errors import FlowError
from fp8flow.log import get_logger
from fp8flow.ports import port_is_free, require_free_port

READY_PATH = "/health"
TAG = "FP8FLOW_GUARDED"
TAIL_LINES = 30
# A job that was killed has nobody to wait for a slow end.
_ABANDONED_GRACE_S = 3.0
_START_LIMIT_S = 30.0
_STOP_SLACK_S = 15.0
_POLL_S = 0.2
_REMIND_S = 10.0
_RELEASE_LIMIT_S = 30.0
_GPU_SLACK_BYTES = 256 << 20
_BEFORE_READY = "before it was ready"
_BEFORE_OTHERS = "before the others were ready"

logger = get_logger(__name__)


def log_tail(path: Path, lines: int = TAIL_LINES) -> str:
    """Return the last lines of a log, indented; what a progress bar overwrote is left out."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - 64 * 1024))
            text = stream.read().decode("utf-8", "replace")
    except OSError as error:
        return f"  ({path} cannot be read: {error.strerror})"
    found = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    shown = [line for line in found if line.strip()][-lines:]
    return "\n".join(f"  {line}" for line in shown) or "  (nothing was logged)"


def describe_exit(code: int | None) -> str:
    """Return what an exit code means; None: not known."""
    if code is None:
        return "ended, nobody knows how"
    if code >= 0:
        return f"exited with status {code}"
    name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
    hint = " (the kernel does that when memory runs out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


class GuardedProcess:
    """A child under a guard process, which stops its whole tree when this process ends.

    Attributes:
        pid: process id of the child.
        exit_code: once it has ended; negative: signal number; None also if the guard was killed.
        killed: processes that did not react to TERM, after :meth:`stop`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_path: Path,
        grace_s: float,
        env: Mapping[str, str] | None = None,
        keep_open: tuple[int, ...] = (),
        scratch: Path | None = None,
    ) -> None:
        """Start the child; its output is appended to ``log_path``.

        Args:
            command: program and arguments.
            log_path: for standard output and error.
            grace_s: time between TERM and KILL.
            env: environment; this process's when left out.
            keep_open: descriptors that stay open until the tree is gone (locks).
            scratch: folder to remove then.

        Raises:
            FlowError: if the program cannot be started.
        """
        self.pid = 0
        self.exit_code: int | None = None
        self.killed: list[int] = []
        self._grace_s = grace_s
        self._scratch = scratch
        self._failure: str | None = None
        self._rest = b""
        self._tag = uuid.uuid4().hex
        guarded, self._pipe = os.pipe()
        self._status, status = os.pipe()
        os.set_blocking(self._status, False)
        arguments = ["--pipe", guarded, "--status", status, "--grace-s", grace_s]
        arguments += ["--abandoned-grace-s", min(grace_s, _ABANDONED_GRACE_S)]
        arguments += ["--scratch", scratch] if scratch else []
        program = [sys.executable, "-I", "-S", guard.__file__]
        try:
            with log_path.open("ab") as log:
                self._guard = subprocess.Popen(
                    [*program, *map(str, arguments), "--", *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(guarded, status, *keep_open),
                    env={**(os.environ if env is None else env), TAG: self._tag},
                    # A KILL to the job's group must not hit the guard.
                    start_new_session=True,
                )
        finally:
            os.close(guarded)
            os.close(status)
        self._await_start()

    def _await_start(self) -> None:
        deadline = time.monotonic() + _START_LIMIT_S
        while not self.pid and self._failure is None and time.monotonic() < deadline:
            if not self.alive():
                break
            time.sleep(0.01)
        if not self.pid:
            self.stop()
            raise FlowError(self._failure or f"the guard {describe_exit(self._guard.returncode)}")

    def _read_status(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._status, 4096):
                self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        for line in map(json.loads, lines):
            self.pid = line.get("started", self.pid)
            self.exit_code = line.get("exited", self.exit_code)
            self.killed = line.get("killed", self.killed)
            self._failure = line.get("failed", self._failure)

    def alive(self) -> bool:
        """Tell whether the child runs."""
        if self._status < 0:
            return False
        guard_ended = self._guard.poll() is not None
        self._read_status()
        return not guard_ended and self.exit_code is None and self._failure is None

    def tree(self) -> list[int]:
        """Return the processes of the child's tree."""
        return guard.descendants(self._guard.pid)

    def survivors(self) -> list[int]:
        """Return living processes that were started in the child's tree, wherever they are now."""
        tag = f"{TAG}={self._tag}".encode()
        found = []
        for pid, (_, state) in guard.parent_pids().items():
            with contextlib.suppress(OSError):
                if state not in "ZX" and tag in Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(pid)
        return found

    def request_stop(self) -> None:
        """Have the guard stop the whole tree, without waiting; harmless when it has been told."""
        if self._pipe < 0:
            return
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, guard.ORDERLY)
        os.close(self._pipe)
        self._pipe = -1

    def stop(self) -> None:
        """Stop the whole tree and wait until it is gone; harmless when it has been stopped."""
        self.request_stop()
        if self._status < 0:
            return
        try:
            self._guard.wait(self._grace_s + _STOP_SLACK_S)
        except subprocess.TimeoutExpired:
            guard.signal_all(self.tree(), signal.SIGKILL)
            self._guard.kill()
            self._guard.wait()
        self._read_status()
        os.close(self._status)
        self._status = -1
        self._kill_survivors()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _kill_survivors(self) -> None:
        """Kill what is left when the guard itself was killed."""
        deadline = time.monotonic() + _STOP_SLACK_S
        while (left := self.survivors()) and time.monotonic() < deadline:
            self.killed += [pid for pid in left if pid not in self.killed]
            guard.signal_all(left, signal.SIGKILL)
            time.sleep(0.05)


@contextlib.contextmanager
def guarded(command: Sequence[str], **options: Any) -> Iterator[GuardedProcess]:
    """Run a child under a guard (see :class:`GuardedProcess`) and stop its tree at the end."""
    process = GuardedProcess(command, **options)
    try:
        yield process
    finally:
        process.stop()


def get(host: str, port: int, path: str, timeout_s: float = 5.0) -> tuple[int, bytes]:
    """Return status and body of a GET request; no proxy comes between, whatever is configured.

    Raises:
        OSError: if there is no connection, or it breaks.
    """
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    except http.client.HTTPException as error:
        raise OSError(f"no HTTP answer: {error!r}") from error
    finally:
        connection.close()


@dataclass
class Endpoint:
    """A server that can be asked; this class alone is one that somebody else runs.

    Attributes:
        name: how messages call it.
    """

    host: str
    port: int
    name: str = "the server"

    @property
    def base_url(self) -> str:
        """Address without path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def death(self) -> str | None:
        """Return how it ended; None while it runs, or if nobody could know."""
        return None

    def require_alive(self, when: str) -> None:
        """Check that the server runs.

        Raises:
            FlowError: with the exit code and the end of the server's log.
        """
        if (death := self.death()) is not None:
            raise FlowError(f"{self.name} died {when}: it {death}")

    def log_text(self) -> str:
        """Return what it has logged so far."""
        return ""

    def log_end(self) -> str:
        """Return a sentence with the end of its log."""
        return f"{self.name} is not one of this job, look at its log"

    def get_page(
        self,
        path: str,
        kind: Literal["json", "text"],
        timeout_s: float = 10.0,
        optional: bool = False,
    ) -> Any:
        """Return what the server has at ``path``.

        Args:
            path: of the URL.
            kind: how to read it.
            timeout_s: limit for the answer.
            optional: return None if the server has no such page.

        Raises:
            FlowError: if it answers with anything else.
        """
        url = self.base_url + path
        try:
            status, body = get(self.host, self.port, path, timeout_s)
            if status == 404 and optional:
                return None
            if status != 200:
                raise FlowError(f"{url} answers with status {status}")
            return json.loads(body) if kind == "json" else body.decode("utf-8")
        except (OSError, ValueError) as error:
            self.require_alive(f"before it answered {path}")
            wanted = "JSON" if kind == "json" else "text"
            raise FlowError(f"{url} gives no {wanted}: {error}") from error

    def memory(self) -> dict[str, Any]:
        """Return nothing: the memory of somebody else's processes is not known."""
        return {}


@dataclass(frozen=True)
class ServerPlan:
    """One server to start.

    Attributes:
        argv: command line, with what launches it.
        host: address that it listens on.
        port: port that it listens on.
        log_path: for its standard output and error.
        env: its environment, but for TMPDIR; this process's when left out.
        gpus: UUIDs of the GPUs whose memory must be free again afterwards.
        more_environment: returns variables that win over ``env``, given the folder for the
            server's temporary files.
        name: how messages call it.
    """

    argv: Sequence[str]
    host: str
    port: int
    log_path: Path
    env: Mapping[str, str] | None = None
    gpus: tuple[str, ...] = ()
    more_environment: Callable[[Path], Mapping[str, str]] | None = None
    name: str = "the server"


def _process_memory(pids: Sequence[int]) -> dict[str, int | None]:
    """Return the memory of processes together, bytes; None for what the kernel does not tell."""
    found: dict[str, list[int | None]] = {"rss_bytes": [], "peak_rss_bytes": []}
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            status = Path(f"/proc/{pid}/status").read_text()
            lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
            if lines.get("State", "").strip().startswith("Z"):
                continue  # it has ended and has no memory any more
            for name, key in (("rss_bytes", "VmRSS"), ("peak_rss_bytes", "VmHWM")):
                value = lines.get(key, "").split()
                found[name].append(int(value[0]) * 1024 if value else None)
    return {
        name: None if None in values else sum(value or 0 for value in values)
        for name, values in found.items()
    }


@dataclass(kw_only=True)
class RunningServer(Endpoint):
    """A server that this job has started.

    Attributes:
        startup_s: time from the start of the process to its readiness.
        gpus_before: memory in use before the start, bytes, by UUID of its GPUs.
    """

    log_path: Path
    process: GuardedProcess
    startup_s: float = 0.0
    gpus_before: Mapping[str, int] = field(default_factory=dict)

    def death(self) -> str | None:
        """Return how the server ended, with the end of its log; None while it runs."""
        if self.process.alive():
            return None
        how = describe_exit(self.process.exit_code)
        return f"{how}. End of its log ({self.log_path}):\n{log_tail(self.log_path)}"

    def log_text(self) -> str:
        """Return what it has logged so far."""
        try:
            return self.log_path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def log_end(self) -> str:
        """Return a sentence with the end of its log."""
        return f"End of the log of {self.name} ({self.log_path}):\n{log_tail(self.log_path)}"

    def memory(self) -> dict[str, Any]:
        """Return the memory of its processes: resident now and at its peak, bytes.

        The peaks of several processes need not have been at the same time. For GPUs the memory
        in use beyond that before the start.
        """
        found: dict[str, Any] = _process_memory(self.process.tree())
        if self.gpus_before:
            used = memory_used(list(self.gpus_before))
            found["gpu_bytes"] = sum(used[gpu] - self.gpus_before[gpu] for gpu in used)
        return found


def _is_ready(server: RunningServer, started: float) -> bool:
    with contextlib.suppress(OSError):
        if get(server.host, server.port, READY_PATH)[0] == 200:
            server.startup_s = time.monotonic() - started
            server.require_alive("as soon as it was ready")
            _require_own_listener(server)
            logger.info(
                "%s is ready at %s after %.1f s",
                *(server.name, server.base_url, server.startup_s),
            )
            return True
    return False


def _wait_ready(servers: Sequence[RunningServer], timeout_s: float) -> None:
    """Wait until all are ready; the end of any, ready or not, ends the waiting."""
    started = reminded = time.monotonic()
    pending = list(servers)
    while True:
        for server in servers:
            server.require_alive(_BEFORE_READY if server in pending else _BEFORE_OTHERS)
        pending = [server for server in pending if not _is_ready(server, started)]
        if not pending:
            return
        now = time.monotonic()
        if now - started > timeout_s:
            raise FlowError(_not_ready(pending[0], timeout_s))
        if now - reminded >= _REMIND_S:
            reminded = now
            for server in pending:
                last = log_tail(server.log_path, 1).strip()
                logger.info("waiting for %s, %.0f s so far: %s", server.name, now - started, last)
        time.sleep(_POLL_S)


def _not_ready(server: RunningServer, timeout_s: float) -> str:
    return (
        f"{server.name} was not ready after {timeout_s:g} s ({server.base_url}{READY_PATH} "
        "never answered 200). If it only needs longer, raise the resource ready_timeout_s. "
        f"End of its log ({server.log_path}):\n{log_tail(server.log_path)}"
    )


def _listens(pid: int, port: int) -> bool | None:
    """Tell whether a process listens on a port; None if it cannot be looked into."""
    import psutil

    try:
        connections = psutil.Process(pid).net_connections(kind="tcp")
    except psutil.AccessDenied:
        return None
    except (psutil.Error, OSError):  # it has ended
        return False
    return any(c.status == psutil.CONN_LISTEN and c.laddr[1] == port for c in connections)


def _listeners_are_told() -> bool:
    """Tell whether this kernel says which process listens where; some sandboxes do not."""
    with socket.create_server(("127.0.0.1", 0)) as own:
        return bool(_listens(os.getpid(), own.getsockname()[1]))


def _require_own_listener(server: RunningServer) -> None:
    """Check that it is our server that answers, and not one that took the port meanwhile.

    The listener can be any process below the guard: a launcher's child, or one of several that
    answer HTTP.
    """
    found = [_listens(pid, server.port) for pid in server.process.tree()]
    if any(found):
        return
    if None in found or not _listeners_are_told():
        logger.warning(
            "which process answers at %s cannot be told here; that it is %s is taken for granted",
            *(server.base_url, server.name),
        )
        return
    raise FlowError(
        f"{server.base_url} is answered by a process that this job did not start; "
        f"`ss -tlnp 'sport = :{server.port}'` shows which. End that, and run again"
    )


def _wait_until(condition: Callable[[], bool], limit_s: float, poll_s: float = 0.1) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True


def _held_gpus(before: Mapping[str, int]) -> dict[str, int]:
    """Return the memory beyond that before the start, bytes, of GPUs that are not free again."""
    now = memory_used(list(before))
    grown = {uuid: now.get(uuid, 0) - used for uuid, used in before.items()}
    return {uuid: more for uuid, more in grown.items() if more > _GPU_SLACK_BYTES}


def _gpu_problems(before: Mapping[str, int]) -> list[str]:
    """Wait until the GPUs are free again; return what is wrong if they are not."""
    if _wait_until(lambda: not _held_gpus(before), _RELEASE_LIMIT_S, poll_s=0.5):
        return []
    held = ", ".join(f"{more / 2**30:.1f} GiB of {gpu}" for gpu, more in _held_gpus(before).items())
    if others := computing_on(list(before)):
        # Those of the servers are gone, so this is no fault of theirs.
        logger.warning(
            "%s are in use that were free before the servers started, by processes %s that are "
            "not this job's: what was measured may be disturbed",
            *(held, others),
        )
        return []
    return [f"GPU memory is still in use that was free before the servers started: {held}"]


def _stop(servers: Sequence[RunningServer]) -> list[str]:
    """Stop the servers, all at the same time; return what they left behind."""
    for server in servers:
        server.process.request_stop()
    problems = []
    before: dict[str, int] = {}
    for server in servers:
        server.process.stop()
        if killed := server.process.killed:
            logger.warning(
                "%d processes of %s did not end on TERM and were killed", len(killed), server.name
            )
        if left := server.process.survivors():
            problems.append(f"processes {left} of {server.name} are still there")
        if not _wait_until(lambda at=server: port_is_free(at.host, at.port), 5.0):  # type: ignore[misc]
            problems.append(f"port {server.port} is still taken")
        before |= server.gpus_before
    return problems + _gpu_problems(before)


def _start(plan: ServerPlan, grace_s: float, keep_open: tuple[int, ...]) -> RunningServer:
    # Not below the results: paths of Unix sockets are limited to about 100 bytes.
    scratch = Path(tempfile.mkdtemp(prefix="fp8flow-"))
    environment = dict(os.environ if plan.env is None else plan.env)
    if plan.more_environment is not None:
        environment |= plan.more_environment(scratch)
    before = memory_used(plan.gpus)
    logger.info("starting %s on port %d; its log: %s", plan.name, plan.port, plan.log_path)
    process = GuardedProcess(
        plan.argv,
        log_path=plan.log_path,
        grace_s=grace_s,
        env={**environment, "TMPDIR": str(scratch)},
        keep_open=keep_open,
        scratch=scratch,
    )
    return RunningServer(
        host=plan.host,
        port=plan.port,
        name=plan.name,
        log_path=plan.log_path,
        process=process,
        gpus_before=before,
    )


@contextlib.contextmanager
def running_servers(
    plans: Sequence[ServerPlan],
    *,
    ready_timeout_s: float,
    stop_grace_s: float,
    keep_open: tuple[int, ...] = (),
) -> Iterator[list[RunningServer]]:
    """Run servers for the time of the block; on leaving it all their process trees are gone.

    They start, and stop, at the same time; all are ready when the block begins.

    Args:
        plans: the servers.
        ready_timeout_s: longest time until ``GET /health`` answers 200.
        stop_grace_s: time between TERM and KILL.
        keep_open: descriptors of locks that last until the servers are gone.

    Raises:
        FlowError: if a port is taken, or a server does not start, dies before or in the block, or
            leaves something behind.
    """
    for plan in plans:
        require_free_port(plan.host, plan.port)
    servers: list[RunningServer] = []
    try:
        for plan in plans:
            servers.append(_start(plan, stop_grace_s, keep_open))
        _wait_ready(servers, ready_timeout_s)
        yield servers
        for server in servers:
            server.require_alive("in the run")
    except BaseException:
        for problem in _stop(servers):
            logger.error("%s", problem)
        raise
    if problems := _stop(servers):
        raise FlowError("the server was not stopped cleanly: " + "; ".join(problems))
    logger.info("stopped; ports and processes are free")
