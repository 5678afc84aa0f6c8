"""Prepare the evaluation set: prompts and token ids as parquet, with a manifest.

The tokenizer is read from the model folder. Prompts are never cut.
"""

import argparse
import sys
from pathlib import Path

from fp8flow.articles import Source
from fp8flow.cli import script_main
from fp8flow.dataset import build_dataset
from fp8flow.prompts import add_data_arguments, open_tokenizer, tokenizer_sha256
from fp8flow.records import build_product, verify_record
from fp8flow.spec import Spec
from fp8flow.synthetic_data import read_lengths


def run(args: argparse.Namespace, spec: Spec) -> None:
    """Write the evaluation set."""
    settings = spec.settings["dataset"]
    source = Source(
        kind=settings["source"],
        section="dataset",
        split=settings["split"],
        path=Path(settings["path"]) if settings["path"] else None,
        hub_id=settings["id"],
        revision=settings["revision"],
        lengths=read_lengths(settings),
    )
    model = verify_record(args.model)
    tokenizer = open_tokenizer(model)
    with build_product(args.output, spec, inputs={"model": model}) as product:
        product.result = build_dataset(
            product.folder,
            source,
            tokenizer,
            template=settings["template"],
            samples=settings["samples"],
            max_input_tokens=settings["max_input_tokens"],
        )
        product.result["tokenizer_sha256"] = tokenizer_sha256(model.root)


if __name__ == "__main__":
    sys.exit(script_main(__doc__, add_data_arguments, run))
