"""Make the checkpoint that is served: calibrated and exported with ModelOpt, or taken as given."""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fp8flow.accelerator import accelerator_keys, accelerator_lock
from fp8flow.cli import script_main
from fp8flow.errors import FlowError
from fp8flow.export import UNIFIED
from fp8flow.quantize import Recipe, Target, make_checkpoint
from fp8flow.records import Record, build_product, verify_record
from fp8flow.spec import Spec


def _path_or_none(text: str) -> Path | None:
    # Snakemake passes an empty text where a variant needs no calibration set.
    return Path(text) if text else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument(
        "--model", type=Path, required=True, help="record of the model: <folder>/manifest.json"
    )
    parser.add_argument(
        "--calibration",
        type=_path_or_none,
        nargs="?",
        help="record of the calibration set; not needed with method none and given",
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="record to write: <checkpoint>/manifest.json"
    )


def _accelerator() -> AbstractContextManager[object]:
    """Wait until nobody measures on what the calibration occupies, and keep it."""
    import torch

    return accelerator_lock(accelerator_keys(uses_gpu=torch.cuda.is_available()))


def _make(model: Record, samples: Path | None, folder: Path, spec: Spec) -> dict[str, Any]:
    """Make the checkpoint in ``folder`` and return what it is."""
    settings = spec.settings["quantization"]
    target = Target(spec.settings.get("format", UNIFIED), spec.settings.get("tensor_parallel", 1))
    trust = bool(model.spec["settings"]["model"].get("trust_remote_code"))
    if settings["method"] == "given":
        from fp8flow.given_checkpoint import take_given

        return take_given(settings, model.root, folder, target.format, trust_remote_code=trust)
    recipe = Recipe(
        method=settings["method"],
        kv_cache=settings["kv_cache"],
        kv_scales=settings["kv_scales"],
        exclude=tuple(settings["exclude"]),
    )
    return make_checkpoint(
        model.root,
        folder,
        recipe,
        target=target,
        samples=samples,
        batch_size=spec.settings.get("calibration", {}).get("batch_size", 1),
        trust_remote_code=trust,
    )


def run(args: argparse.Namespace, spec: Spec) -> None:
    """Make the checkpoint product."""
    method = spec.settings["quantization"]["method"]
    is_calibrated = method not in ("none", "given")
    if is_calibrated and args.calibration is None:
        raise FlowError(f"method {method} needs --calibration <calibration>/manifest.json")
    inputs = {"model": verify_record(args.model)}
    samples = None
    if is_calibrated:
        inputs["calibration"] = verify_record(args.calibration)
        samples = inputs["calibration"].root / "samples.parquet"
    model = inputs["model"]
    with _accelerator(), build_product(args.output, spec, inputs=inputs) as product:
        product.result |= _make(model, samples, product.folder, spec)
        product.result["model"] = {
            key: model.result[key]
            for key in ("source", "id", "revision", "architecture", "parameters", "submittable")
        }


if __name__ == "__main__":
    sys.exit(script_main(__doc__, add_arguments, run))
