"""Render the report: one HTML page that opens without network, and its manifest.

Reads records and per-query times only: no measurement is repeated.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from fp8flow.cli import script_main
from fp8flow.log import get_logger
from fp8flow.records import Record, build_product, read_record, verify_record
from fp8flow.report import PAGE, render
from fp8flow.report_data import ReportInputs
from fp8flow.spec import Spec

LOGGER = get_logger("fp8flow.render_report")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    record: dict[str, Any] = {"type": Path, "required": True, "metavar": "RECORD"}
    many: dict[str, Any] = {"type": Path, "nargs": "+", "default": [], "metavar": "RECORD"}
    parser.add_argument("--model", help="manifest of the model", **record)
    parser.add_argument("--dataset", help="manifest of the evaluation set", **record)
    # Snakemake passes an empty text where a variant needs no calibration set.
    parser.add_argument(
        "--calibration",
        help="manifest of the calibration set, if there is one",
        nargs="?",
        default="",
        metavar="RECORD",
    )
    parser.add_argument("--checkpoint", help="manifest of the checkpoint", **record)
    parser.add_argument("--runs", help="run.json of performance and accuracy runs", **many)
    parser.add_argument("--accuracies", help="accuracy.json of every accuracy run", **many)
    parser.add_argument("--verdict", help="verdict.json", **record)
    parser.add_argument(
        "--output", help="manifest to write; the page goes beside it", type=Path, required=True
    )


def run(args: argparse.Namespace, spec: Spec) -> None:
    """Read the records, render the page, write the product."""
    # Of these only the record is shown; hashing gigabytes of weights again would prove nothing new.
    shared = {name: read_record(getattr(args, name)) for name in ("model", "dataset", "checkpoint")}
    runs = [verify_record(path) for path in args.runs]
    accuracies = [verify_record(path) for path in args.accuracies]
    page = ReportInputs(
        results=args.output.parent.parent,
        folder=args.output.parent,
        verdict=verify_record(args.verdict),
        runs=runs,
        accuracies=accuracies,
        calibration=read_record(Path(args.calibration)) if args.calibration else None,
        **shared,
    )
    records: dict[str, Record] = {page.name(record): record for record in page.records}
    with build_product(args.output, spec, inputs=records) as product:
        text = render(page, spec.settings["report"]["title"])
        (product.folder / PAGE).write_text(text, encoding="utf-8")
        product.result.update({"page": PAGE, "bytes": len(text.encode("utf-8"))})
    LOGGER.info("report: %s", args.output.parent / PAGE)


if __name__ == "__main__":
    sys.exit(script_main(__doc__, add_arguments, run))
