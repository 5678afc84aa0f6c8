"""Measure throughput and latency of one scenario with LoadGen and a server of its own.

The server lives as long as this command and never longer. Logs of every attempt stay in
attempts/<n> beside the output. Exit status 1: server or load generator did not last until the end.
A run that ended but whose queries failed is recorded with state failed.
"""

import argparse
import sys

from fp8flow.backends import get_backend
from fp8flow.cli import script_main
from fp8flow.load_job import add_load_arguments, resources_of, run_load_job
from fp8flow.spec import Spec


def run(args: argparse.Namespace, spec: Spec) -> None:
    """Measure once."""
    run_load_job(
        spec,
        "performance",
        checkpoint=args.checkpoint,
        dataset=args.dataset,
        output=args.output,
        resources=resources_of(args),
        backend=get_backend(spec.settings["engine"]["backend"]),
    )


if __name__ == "__main__":
    sys.exit(script_main(__doc__, add_load_arguments, run))
