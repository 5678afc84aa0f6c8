"""Prepare the calibration set: the first N rows of an id list as token ids, with a manifest.

Rows keep the order of the list and its duplicates; longer sequences are cut and counted.
"""

import argparse
import sys
from pathlib import Path

from fp8flow.articles import Source
from fp8flow.calibration import build_calibration, read_id_list
from fp8flow.cli import script_main
from fp8flow.prompts import add_data_arguments, open_tokenizer, tokenizer_sha256
from fp8flow.records import build_product, verify_record
from fp8flow.spec import Spec
from fp8flow.synthetic_data import read_lengths


def run(args: argparse.Namespace, spec: Spec) -> None:
    """Write the calibration set."""
    settings, dataset = spec.settings["calibration"], spec.settings["dataset"]
    source = Source(
        kind=settings["source"],
        section="calibration",
        split="train",
        path=Path(settings["path"]) if settings["path"] else None,
        hub_id=dataset["id"],
        revision=dataset["revision"],
        lengths=read_lengths(settings),
    )
    origin = settings["id_list"]
    id_list = read_id_list(origin, settings["id_list_sha256"]) if origin else None
    model = verify_record(args.model)
    tokenizer = open_tokenizer(model)
    with build_product(args.output, spec, inputs={"model": model}) as product:
        product.result = build_calibration(
            product.folder,
            source,
            tokenizer,
            template=dataset["template"],
            id_list=id_list,
            samples=settings["samples"],
            max_length=settings["max_length"],
        )
        product.result["tokenizer_sha256"] = tokenizer_sha256(model.root)


if __name__ == "__main__":
    sys.exit(script_main(__doc__, add_data_arguments, run))
