"""Serve a checkpoint with the embedded engine: transformers' continuous batching on the CPU.

Loads a ModelOpt FP8 checkpoint (or an unquantized one) and answers POST /v1/completions with
greedy decoding. GET /health is 200 once the model is loaded and the generation thread lives;
GET /fp8flow/settings shows the settings in effect. Prefix reuse is always off.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from fp8flow.errors import FlowError
from fp8flow.log import configure_logging, get_logger

LOG = get_logger("serve_transformers")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument
    add("--model", type=Path, required=True, help="checkpoint directory, with its tokenizer")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, required=True, help="port to listen on")
    add("--served-model-name", help="name in requests (default: the directory's name)")
    add("--max-batch-size", type=int, default=16, help="requests in one step (%(default)s)")
    add("--max-batch-tokens", type=int, default=1024, help="tokens in one step (%(default)s)")
    add("--kv-cache-tokens", type=int, default=16384, help="tokens in the cache (%(default)s)")
    add("--threads", type=int, default=0, help="threads of torch; 0 for all cores (%(default)s)")
    add(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="compute type; auto is bfloat16 on CPUs that have it, else float32 (%(default)s)",
    )
    add(
        "--stop-grace-s",
        type=int,
        default=2,
        help="time for open requests at the end (%(default)s)",
    )
    return result


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot work, before the model is loaded.

    Raises:
        FlowError: naming the option.
    """
    for file in ("config.json", "tokenizer.json"):
        if not (args.model / file).is_file():
            raise FlowError(f"--model {args.model} has no {file}: give a checkpoint directory")
    for name in ("max_batch_size", "max_batch_tokens", "kv_cache_tokens"):
        if getattr(args, name) < 1:
            raise FlowError(f"--{name.replace('_', '-')} must be at least 1")
    if args.max_batch_tokens < args.max_batch_size:
        raise FlowError(
            f"--max-batch-tokens {args.max_batch_tokens} is below --max-batch-size "
            f"{args.max_batch_size}: every request in a step needs one token"
        )


def run(args: argparse.Namespace) -> None:
    """Load the model and serve it."""
    check(args)
    # Threads that wait by spinning lose whole time slices when a client shares their cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from fp8flow.embedded.engine import Engine, EngineOptions, settings_text
    from fp8flow.embedded.server import serve

    engine = Engine(
        EngineOptions(
            model=args.model,
            served_model_name=args.served_model_name or args.model.resolve().name,
            max_batch_size=args.max_batch_size,
            max_batch_tokens=args.max_batch_tokens,
            kv_cache_tokens=args.kv_cache_tokens,
            threads=args.threads,
            dtype=args.dtype,
        )
    )
    LOG.info("loaded: %s", settings_text(engine))
    serve(engine, args.host, args.port, args.stop_grace_s)


def main() -> int:
    """Run the command line; 1 for a failure that the user can act on."""
    configure_logging(None)
    try:
        run(parser().parse_args())
    except FlowError as error:
        LOG.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
