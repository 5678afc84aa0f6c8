"""Build the TensorRT engine of one variant with trtllm-build, and check what came out."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path

from fp8flow.accelerator import accelerator_keys, accelerator_lock
from fp8flow.cli import script_main
from fp8flow.errors import FlowError
from fp8flow.launch import cache_environment
from fp8flow.log import get_logger
from fp8flow.records import build_product, verify_record
from fp8flow.server import describe_exit, guarded, log_tail
from fp8flow.spec import Spec
from fp8flow.trtllm_engine import build_command, inspect_engine

_GRACE_S = 10.0
_POLL_S = 0.5
_REMIND_S = 30.0
logger = get_logger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="record of the TensorRT-LLM checkpoint"
    )
    parser.add_argument(
        "--launcher", nargs="?", default="", help="what comes before trtllm-build, as in a shell"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="record to write: <engine>/manifest.json"
    )


def _build(command: list[str], log_path: Path, scratch: Path, locks: tuple[int, ...]) -> float:
    """Run the build and return how long it took, seconds; it ends with this process.

    Args:
        command: launcher and argv.
        log_path: for what it prints; replaced.
        scratch: folder for its caches, removed when it is gone.
        locks: descriptors of locks that last until it is gone.

    Raises:
        FlowError: if it fails, with the end of its log.
    """
    environment = os.environ | cache_environment(scratch)
    log_path.unlink(missing_ok=True)
    started = reminded = time.monotonic()
    with guarded(
        command,
        log_path=log_path,
        grace_s=_GRACE_S,
        env=environment,
        keep_open=locks,
        scratch=scratch,
    ) as process:
        while process.alive():
            time.sleep(_POLL_S)
            if time.monotonic() - reminded >= _REMIND_S:
                reminded = time.monotonic()
                last = log_tail(log_path, 1).strip()
                logger.info("building, %.0f s so far: %s", reminded - started, last)
        if process.exit_code != 0:
            raise FlowError(
                f"trtllm-build {describe_exit(process.exit_code)}. End of its log ({log_path}):\n"
                f"{log_tail(log_path)}"
            )
    took_s = time.monotonic() - started
    logger.info("built in %.0f s", took_s)
    return took_s


def _log_path(args: argparse.Namespace) -> Path:
    """Return the file for what trtllm-build prints: beside the job's log, or the product."""
    if args.log is not None:
        return Path(args.log).with_suffix(".trtllm-build.log")
    folder: Path = args.output.absolute().parent
    return folder.with_name(f"{folder.name}.trtllm-build.log")


def run(args: argparse.Namespace, spec: Spec) -> None:
    """Make the engine product."""
    engine = spec.settings["engine"]
    checkpoint = verify_record(args.checkpoint)
    launcher = shlex.split(args.launcher or "")
    with (
        accelerator_lock(accelerator_keys(uses_gpu=True)) as locks,
        build_product(args.output, spec, inputs={"checkpoint": checkpoint}) as product,
    ):
        scratch = Path(tempfile.mkdtemp(prefix="fp8flow-"))
        command = build_command(
            engine,
            checkpoint.root.resolve(),
            product.folder.resolve(),
            scratch / "timing.cache",
            checkpoint.result["claims"]["quant_algo"],
        )
        log_path = _log_path(args)
        took_s = _build([*launcher, *command], log_path, scratch, locks)
        product.result |= inspect_engine(product.folder, engine, checkpoint.result)
        product.result |= {
            "argv": command,
            "launcher": launcher,
            "log": log_path.name,
            "build_s": round(took_s, 3),
        }


if __name__ == "__main__":
    sys.exit(script_main(__doc__, add_arguments, run))
