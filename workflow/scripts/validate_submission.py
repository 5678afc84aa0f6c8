"""Judge a submission by every rule of the round, also those that the official checker leaves out.

The verdict is data: the exit status is 0 whenever a verdict could be made. Rules that are not met
are printed with what to do.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from fp8flow.cli import script_main
from fp8flow.evidence import gather
from fp8flow.records import write_record
from fp8flow.rules import load_rules, rules_file
from fp8flow.spec import Spec
from fp8flow.verdict import judge, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    many: dict[str, Any] = {"type": Path, "nargs": "+", "required": True, "metavar": "RECORD"}
    parser.add_argument(
        "--submission", type=Path, required=True, metavar="RECORD", help="manifest of the tree"
    )
    parser.add_argument("--runs", help="run.json of performance and accuracy runs", **many)
    parser.add_argument("--accuracies", help="accuracy.json of every scenario", **many)
    parser.add_argument(
        "--limits", type=Path, help="rules of the round (default: those that fp8flow ships)"
    )
    parser.add_argument("--output", type=Path, required=True, help="verdict.json to write")


def run(args: argparse.Namespace, spec: Spec) -> None:
    """Write the verdict and print what is not met."""
    started = time.time()
    book = load_rules(args.limits or rules_file(spec.settings["submission"]["round"]))
    evidence = gather(args.submission, args.runs, args.accuracies, book.data)
    result = judge(book, evidence)
    inputs = {"submission": evidence.submission}
    for name, scenario in evidence.scenarios.items():
        inputs |= {f"{name}-{kind}": record for kind, record in scenario.records().items()}
    write_record(args.output, spec, result, inputs=inputs, started=started)
    print(table(result))


if __name__ == "__main__":
    sys.exit(script_main(__doc__, add_arguments, run))
