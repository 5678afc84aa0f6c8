"""Start a server once: real tokens, settings read back, token counts, proof of no prefix reuse.

Fails if the server's token counts differ from the client's, or if it reuses prefixes of earlier
prompts. Its log stays in attempts/<n> beside the output.
"""

import argparse
import sys

from fp8flow.backends import get_backend
from fp8flow.cli import script_main
from fp8flow.load_job import add_load_arguments, resources_of
from fp8flow.probe import run_probe
from fp8flow.spec import Spec


def run(args: argparse.Namespace, spec: Spec) -> None:
    """Probe once."""
    run_probe(
        spec,
        checkpoint=args.checkpoint,
        dataset=args.dataset,
        output=args.output,
        resources=resources_of(args),
        backend=get_backend(spec.settings["engine"]["backend"]),
    )


if __name__ == "__main__":
    sys.exit(script_main(__doc__, add_load_arguments, run))
