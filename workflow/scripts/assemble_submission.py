"""Assemble the submission tree with its documents from runs, scores and descriptions.

Every product is checked against its record first, and that all of them belong together. Failed
runs are put in as they are; validate_submission.py judges.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from fp8flow.cli import script_main
from fp8flow.errors import FlowError
from fp8flow.log import get_logger
from fp8flow.records import Record, build_product, verify_record
from fp8flow.rules import load_rules, rules_file, unknown_ids
from fp8flow.spec import Spec
from fp8flow.submission import Inputs, assemble, group_scenarios

SHARED = ("model", "dataset", "checkpoint", "probe", "system")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    one: dict[str, Any] = {"type": Path, "required": True, "metavar": "RECORD"}
    many: dict[str, Any] = {"type": Path, "nargs": "+", "required": True, "metavar": "RECORD"}
    for name in SHARED:
        parser.add_argument(f"--{name}", help=f"record of the {name}", **one)
    parser.add_argument(
        "--calibration", type=Path, nargs="*", default=[], metavar="RECORD",
        help="record of the calibration set, if the checkpoint has one",
    )  # fmt: skip
    parser.add_argument("--runs", help="run.json of performance and accuracy runs", **many)
    parser.add_argument("--accuracies", help="accuracy.json of every scenario", **many)
    parser.add_argument(
        "--limits", type=Path, help="rules of the round (default: those that fp8flow ships)"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="manifest to write; the tree is beside it"
    )


def run(args: argparse.Namespace, spec: Spec) -> None:
    """Write the tree."""
    shared: dict[str, Record] = {name: verify_record(getattr(args, name)) for name in SHARED}
    calibration = [verify_record(path) for path in args.calibration]
    runs = [verify_record(path) for path in args.runs]
    accuracies = [verify_record(path) for path in args.accuracies]
    inputs = Inputs(
        **shared,
        calibration=calibration[0] if calibration else None,
        scenarios=group_scenarios(runs, accuracies),
    )
    submission = spec.settings["submission"]
    rules = load_rules(args.limits or rules_file(submission["round"]))
    if unknown := unknown_ids(rules, submission.get("attested") or ()):
        raise FlowError(f"submission.attested: no such rule: {', '.join(unknown)}")
    with build_product(args.output, spec, inputs=inputs.products()) as product:
        product.result = assemble(
            product.folder,
            inputs,
            submission=submission,
            config=spec.settings["config"],
            limits=rules.data,
        )
    root = args.output.parent / product.result["root"]
    get_logger("fp8flow.assemble_submission").info("submission tree: %s", root)


if __name__ == "__main__":
    sys.exit(script_main(__doc__, add_arguments, run))
