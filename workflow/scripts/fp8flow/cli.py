"""What every command under workflow/scripts/ shares: arguments, logging, signals, exit codes."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from fp8flow.errors import FlowError
from fp8flow.log import configure_logging, get_logger
from fp8flow.spec import Spec
from fp8flow.tools import check_tools

_PR_SET_PDEATHSIG = 1
# Full or read-only disks and missing permissions are the user's to mend, not defects.
_USERS_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}
_SHELLS = {"sh", "bash", "dash"}
_PARENT_POLL_S = 1.0


class Stopped(BaseException):
    """The job was asked to stop by a signal; ``finally`` blocks still run."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def _raise_stopped(signum: int, frame: FrameType | None) -> None:
    # Teardown must not be cut short by a second Ctrl-C.
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    raise Stopped(signum)


def stop_cleanly_on_signals() -> None:
    """Turn INT, TERM and HUP into :class:`Stopped`, and get TERM when the scheduler dies."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _raise_stopped)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _stop_with_shell_parent()


def _parent_of(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1])


def _stop_with_shell_parent() -> None:
    """Get TERM when the process dies that started our ``sh -c``.

    Older shells stay between Snakemake and the job and live on when Snakemake is killed, so the
    death of our own parent is not enough.
    """
    shell = os.getppid()
    try:
        words = Path(f"/proc/{shell}/cmdline").read_bytes().split(b"\0")
        scheduler = _parent_of(shell)
    except (OSError, ValueError):
        return
    if Path(os.fsdecode(words[0])).name not in _SHELLS or b"-c" not in words[1:]:
        return

    def watch() -> None:
        with contextlib.suppress(OSError, ValueError):
            while _parent_of(shell) == scheduler:
                time.sleep(_PARENT_POLL_S)
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="watch-scheduler", daemon=True).start()


def script_main(
    description: str | None,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    work: Callable[[argparse.Namespace, Spec], None],
    argv: Sequence[str] | None = None,
) -> int:
    """Run one command: parse ``argv``, set up the log, check tools, call ``work``.

    Args:
        description: help text, usually the script's docstring.
        add_arguments: adds the command's own arguments.
        work: does the job; gets the arguments and the parsed spec.
        argv: command line without the program name; ``sys.argv[1:]`` when left out.

    Returns:
        0 on success, 1 on failure, 128 + signal number when stopped by a signal.
    """
    # Spinning OpenMP threads take most of a small or shared machine; read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--spec",
        required=True,
        help="what determines the product: JSON text, or @FILE (print one with show_spec.py)",
    )
    parser.add_argument("--log", type=Path, help="also write the log to this file")
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    configure_logging(arguments.log)
    logger = get_logger(f"fp8flow.{Path(parser.prog).stem}")
    where = f" Log: {arguments.log}" if arguments.log else ""
    stop_cleanly_on_signals()
    try:
        spec = Spec.parse(arguments.spec)
        program = Path(sys.argv[0])
        if spec.rule != program.stem and program.with_name(f"{spec.rule}.py").is_file():
            raise FlowError(f"this spec is for {spec.rule}; print one with show_spec.py")
        check_tools(spec.tools)
        work(arguments, spec)
    except FlowError as error:
        logger.error("%s%s", error, where)
        return 1
    except Stopped as stopped:
        logger.error("stopped by %s; nothing half done was kept as a result.%s", stopped, where)
        return 128 + stopped.signum
    except OSError as error:
        if error.errno not in _USERS_ERRORS:
            logger.error("unexpected error.%s\n%s", where, traceback.format_exc())
        else:
            logger.error("%s: %s.%s", error.filename or "the results folder", error.strerror, where)
        return 1
    except Exception:
        logger.error(
            "unexpected error, please report it with this log.%s\n%s", where, traceback.format_exc()
        )
        return 1
    finally:
        sys.stdout.flush()
    return 0
