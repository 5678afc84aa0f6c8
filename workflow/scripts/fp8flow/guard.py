"""Guard of one child process: whatever becomes of the job, nothing of the child's tree survives.

Run by path (``python guard.py --pipe FD --status FD ... -- COMMAND``), standard library only, so
that it starts fast and needs no environment. The job holds the write end of ``--pipe``. Its end of
file, which also a SIGKILL of the job brings about, stops the tree: TERM, a grace period, KILL. As
the subreaper of its descendants the guard also finds processes that left the child's group.

It reports on ``--status``, one JSON object a line: ``{"started": pid}``, ``{"failed": reason}``,
``{"exited": code}`` (negative: signal number), ``{"stopped": true, "killed": [pids]}``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05
_KILL_ATTEMPTS = 100
ORDERLY = b"s"


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def parent_pids() -> dict[int, tuple[int, str]]:
    """Return ``{pid: (parent pid, state)}`` of every process that can be seen."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The command name is in parentheses and may itself hold any character.
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            found[int(entry.name)] = (int(fields[1]), fields[0])
    return found


def descendants(root: int) -> list[int]:
    """Return the living descendants of ``root``, zombies left out."""
    processes = parent_pids()
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in processes.items():
        children.setdefault(parent, []).append(pid)
    pending, found = [root], []
    while pending:
        for pid in children.get(pending.pop(), ()):
            pending.append(pid)
            if processes[pid][1] not in "ZX":
                found.append(pid)
    return found


def signal_all(pids: Iterable[int], signum: int) -> None:
    """Signal processes; those that are gone, or are not ours to signal, are passed over."""
    for pid in pids:
        try:
            os.kill(pid, signum)
        except (ProcessLookupError, PermissionError):
            continue


class Guard:
    """The child and what is known of it."""

    def __init__(self, command: list[str], status_fd: int) -> None:
        self._command = command
        self._status_fd = status_fd
        self.child = 0
        self.exit_code: int | None = None

    def report(self, **what: object) -> None:
        """Write one status line; the reader may be gone."""
        try:
            os.write(self._status_fd, (json.dumps(what) + "\n").encode())
        except OSError:
            return

    def start(self) -> bool:
        """Start the child in a session of its own; it is killed if the guard is."""
        libc, guard = _libc(), os.getpid()

        def before_exec() -> None:
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(signum, signal.SIG_DFL)
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guard:
                os._exit(1)

        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=before_exec,
            )
        except OSError as error:
            self.report(failed=f"cannot start {self._command[0]}: {error.strerror}")
            return False
        self.child = process.pid
        # Reaped by this class alone, also when it ends before the interpreter does.
        process.returncode = 0
        self.report(started=self.child)
        return True

    def reap(self) -> None:
        """Collect children that ended, adopted ones too."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child:
                self.exit_code = os.waitstatus_to_exitcode(status)
                self.report(exited=self.exit_code)

    def wait(self, pipe: int, child_ended: int) -> bool:
        """Wait until the child ends or the job closes the pipe; tell whether that was orderly.

        Args:
            pipe: read end of the job's pipe.
            child_ended: becomes readable with every SIGCHLD.
        """
        while self.exit_code is None:
            ready, _, _ = select.select([pipe, child_ended], [], [])
            if child_ended in ready:
                os.read(child_ended, 4096)
            self.reap()
            if pipe in ready:
                return os.read(pipe, 1) == ORDERLY
        return True

    def stop(self, grace_s: float) -> list[int]:
        """Stop the whole tree; return the processes that had to be killed."""
        deadline = time.monotonic() + grace_s
        told: set[int] = set()
        while (alive := self._alive()) and time.monotonic() < deadline:
            signal_all(set(alive) - told, signal.SIGTERM)
            told |= set(alive)
            time.sleep(_POLL_S)
        killed: set[int] = set()
        for _ in range(_KILL_ATTEMPTS):
            if not (alive := self._alive()):
                break
            killed |= set(alive)
            signal_all(alive, signal.SIGKILL)
            time.sleep(_POLL_S)
        return sorted(killed)

    def _alive(self) -> list[int]:
        self.reap()
        return descendants(os.getpid())


def _child_ended() -> int:
    """Return a descriptor that becomes readable with every SIGCHLD (pidfd is not everywhere)."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)
    return reader


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pipe", type=int, required=True, help="read end of the job's pipe")
    parser.add_argument("--status", type=int, required=True, help="where the status lines go")
    parser.add_argument("--grace-s", type=float, required=True, help="between TERM and KILL")
    parser.add_argument("--abandoned-grace-s", type=float, required=True, help="if the job died")
    parser.add_argument("--scratch", help="folder to remove at the end")
    parser.add_argument("command", nargs="+", help="the child, after --")
    return parser.parse_args()


def main() -> int:
    """Guard one child."""
    arguments = _arguments()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(signum, signal.SIG_IGN)
    os.set_inheritable(arguments.pipe, False)
    os.set_inheritable(arguments.status, False)
    _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child_ended = _child_ended()
    guard = Guard(arguments.command, arguments.status)
    if guard.start():
        orderly = guard.wait(arguments.pipe, child_ended)
        killed = guard.stop(arguments.grace_s if orderly else arguments.abandoned_grace_s)
        guard.report(stopped=True, killed=killed)
    if arguments.scratch:
        import shutil

        shutil.rmtree(arguments.scratch, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
