"""Describe the system under test: config values where given, else what can be detected.

Fields that are neither given nor detected are listed in the record; the verdict names those that
a submission needs.
"""

import argparse
import sys
import time
from pathlib import Path

from fp8flow.cli import script_main
from fp8flow.records import write_record
from fp8flow.spec import Spec
from fp8flow.system import describe_system


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("--output", type=Path, required=True, help="system.json to write")


def run(args: argparse.Namespace, spec: Spec) -> None:
    """Write the description."""
    started = time.time()
    result = describe_system(spec.settings["system"])
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write_record(args.output, spec, result, started=started)


if __name__ == "__main__":
    sys.exit(script_main(__doc__, add_arguments, run))
