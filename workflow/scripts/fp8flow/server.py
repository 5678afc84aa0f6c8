"""The server of a job: started under a guard, ready, watched, stopped, and checked to be gone."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8flow import guard
from fp8flow.accelerator import visible_gpus
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

    def stop(self) -> None:
        """Stop the whole tree and wait until it is gone; harmless when it has been stopped."""
        if self._pipe < 0:
            return
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, guard.ORDERLY)
        os.close(self._pipe)
        self._pipe = -1
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
class RunningServer:
    """A server that was ready.

    Attributes:
        startup_s: time from the start of the process to its readiness.
        argv: its command line.
    """

    host: str
    port: int
    argv: list[str]
    log_path: Path
    process: GuardedProcess
    startup_s: float = 0.0
    gpus_before: dict[str, int] = field(default_factory=dict)

    @property
    def base_url(self) -> str:
        """Address of the server."""
        return f"http://{self.host}:{self.port}"

    def death(self) -> str | None:
        """Return how the server ended, with the end of its log; None while it runs."""
        if self.process.alive():
            return None
        how = describe_exit(self.process.exit_code)
        return f"{how}. End of its log ({self.log_path}):\n{log_tail(self.log_path)}"

    def require_alive(self, when: str) -> None:
        """Check that the server runs.

        Raises:
            FlowError: with the exit code and the end of the server's log.
        """
        if (death := self.death()) is not None:
            raise FlowError(f"the server died {when}: it {death}")

    def get_json(self, path: str, timeout_s: float = 10.0) -> Any:
        """Return the JSON that the server has at ``path``.

        Raises:
            FlowError: if it answers with anything else.
        """
        url = self.base_url + path
        try:
            status, body = get(self.host, self.port, path, timeout_s)
            if status != 200:
                raise FlowError(f"{url} answers with status {status}")
            return json.loads(body)
        except (OSError, ValueError) as error:
            self.require_alive(f"before it answered {path}")
            raise FlowError(f"{url} gives no JSON: {error}") from error

    def memory(self) -> dict[str, int]:
        """Return the memory of the server's processes: resident now and at its peak, bytes.

        The peaks of several processes need not have been at the same time.
        """
        now = peak = 0
        for pid in self.process.tree():
            with contextlib.suppress(OSError, ValueError):
                status = Path(f"/proc/{pid}/status").read_text().splitlines()
                values = {key: rest for key, _, rest in (line.partition(":") for line in status)}
                now += int(values.get("VmRSS", "0 kB").split()[0]) * 1024
                peak += int(values.get("VmHWM", "0 kB").split()[0]) * 1024
        return {"rss_bytes": now, "peak_rss_bytes": peak}


def _wait_ready(server: RunningServer, timeout_s: float) -> None:
    started = reminded = time.monotonic()
    while True:
        server.require_alive("before it was ready")
        with contextlib.suppress(OSError):
            if get(server.host, server.port, READY_PATH)[0] == 200:
                break
        now = time.monotonic()
        if now - started > timeout_s:
            raise FlowError(
                f"the server was not ready after {timeout_s:g} s ({server.base_url}{READY_PATH} "
                "never answered 200). If it only needs longer, raise the resource ready_timeout_s. "
                f"End of its log ({server.log_path}):\n{log_tail(server.log_path)}"
            )
        if now - reminded >= _REMIND_S:
            reminded = now
            last = log_tail(server.log_path, 1).strip()
            logger.info("waiting for the server, %.0f s so far: %s", now - started, last)
        time.sleep(_POLL_S)
    server.startup_s = time.monotonic() - started
    server.require_alive("as soon as it was ready")
    _require_own_listener(server)
    logger.info("the server is ready at %s after %.1f s", server.base_url, server.startup_s)


def _require_own_listener(server: RunningServer) -> None:
    """Check that it is our server that answers, and not one that took the port meanwhile."""
    import psutil

    for pid in server.process.tree():
        with contextlib.suppress(psutil.Error):
            for connection in psutil.Process(pid).net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr[1] == server.port:
                    return
    raise FlowError(
        f"{server.base_url} is answered by a process that this job did not start; "
        f"`ss -tlnp 'sport = :{server.port}'` shows which. End that, and run again"
    )


def _wait_until(condition: Any, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _gpus_released(before: Mapping[str, int]) -> bool:
    now = visible_gpus() if before else {}
    return all(now.get(uuid, 0) <= used + _GPU_SLACK_BYTES for uuid, used in before.items())


def _stop(server: RunningServer) -> list[str]:
    """Stop the server; return what it left behind."""
    server.process.stop()
    if server.process.killed:
        logger.warning(
            "%d processes of the server did not end on TERM and were killed",
            len(server.process.killed),
        )
    problems = []
    if left := server.process.survivors():
        problems.append(f"processes {left} of the server are still there")
    if not _wait_until(lambda: port_is_free(server.host, server.port), 5.0):
        problems.append(f"port {server.port} is still taken")
    if not _wait_until(lambda: _gpus_released(server.gpus_before), _RELEASE_LIMIT_S):
        problems.append("GPU memory is still in use that was free before the server started")
    return problems


@contextlib.contextmanager
def running_server(
    argv: Sequence[str],
    *,
    host: str,
    port: int,
    log_path: Path,
    ready_timeout_s: float,
    stop_grace_s: float,
    env: Mapping[str, str] | None = None,
    uses_gpu: bool = False,
    keep_open: tuple[int, ...] = (),
) -> Iterator[RunningServer]:
    """Run a server for the time of the block; on leaving it the whole process tree is gone.

    Args:
        argv: command line of the server.
        host: address that it listens on.
        port: port that it listens on.
        log_path: for its standard output and error.
        ready_timeout_s: longest time until ``GET /health`` answers 200.
        stop_grace_s: time between TERM and KILL.
        env: its environment, but for TMPDIR; this process's when left out.
        uses_gpu: check that GPU memory is free again afterwards.
        keep_open: descriptors of locks that last until the server is gone.

    Raises:
        FlowError: if the port is taken, the server does not start, dies before or in the block, or
            leaves something behind.
    """
    require_free_port(host, port)
    gpus = visible_gpus() if uses_gpu else {}
    # Not below the results: paths of Unix sockets are limited to about 100 bytes.
    scratch = Path(tempfile.mkdtemp(prefix="fp8flow-"))
    environment = {**(os.environ if env is None else env), "TMPDIR": str(scratch)}
    logger.info("starting the server on port %d; its log: %s", port, log_path)
    process = GuardedProcess(
        argv,
        log_path=log_path,
        grace_s=stop_grace_s,
        env=environment,
        keep_open=keep_open,
        scratch=scratch,
    )
    server = RunningServer(host, port, list(argv), log_path, process, gpus_before=gpus)
    try:
        _wait_ready(server, ready_timeout_s)
        yield server
        server.require_alive("in the run")
    except BaseException:
        for problem in _stop(server):
            logger.error("%s", problem)
        raise
    if problems := _stop(server):
        raise FlowError("the server was not stopped cleanly: " + "; ".join(problems))
    logger.info("the server is stopped; port and processes are free")
