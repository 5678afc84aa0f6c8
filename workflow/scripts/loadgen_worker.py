"""Run MLPerf LoadGen once against a server and write its logs and every query's times.

One process per run: LoadGen takes its settings correctly only the first time. The job is a JSON
file with the keys of fp8flow.loadgen.LoadJob. Exit status: 0 complete, 1 failed (the reason is in
outcome.json, or on stderr if the run could not start), 128 + signal number if stopped before.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from fp8flow.cli import Stopped, stop_cleanly_on_signals
from fp8flow.errors import FlowError
from fp8flow.loadgen import LoadJob, run_job
from fp8flow.log import configure_logging, get_logger


def main(argv: list[str] | None = None) -> int:
    """Run the job and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--job", type=Path, required=True, help="job.json")
    parser.add_argument("--log", type=Path, help="also write the log to this file")
    arguments = parser.parse_args(argv)
    configure_logging(arguments.log)
    logger = get_logger("fp8flow.loadgen_worker")
    stop_cleanly_on_signals()
    try:
        outcome = run_job(LoadJob.read(arguments.job))
    except FlowError as error:
        logger.error("%s", error)
        return 1
    except Stopped as stopped:
        logger.error("stopped by %s before the run began", stopped)
        return 128 + stopped.signum
    if outcome["state"] != "complete":
        logger.error("the run failed: %s", outcome["reason"])
    if not outcome["loadgen_finished"]:
        # LoadGen's thread still follows its schedule and cannot be stopped in another way.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    return 0 if outcome["state"] == "complete" else 1


if __name__ == "__main__":
    sys.exit(main())
