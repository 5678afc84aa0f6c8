"""Print the spec of one product, to run its command by hand.

Example: show_spec.py run_performance --variant fp8 --scenario Server > spec.json
         run_performance.py --spec @spec.json ...
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from fp8flow.config_file import load_config
from fp8flow.errors import FlowError
from fp8flow.pipeline import Pipeline

CHECKOUT = Path(__file__).resolve().parents[2]


def main(argv: list[str] | None = None) -> int:
    """Print the spec as indented JSON; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rule", help="rule name, for example quantize")
    parser.add_argument("--variant")
    parser.add_argument("--scenario")
    parser.add_argument(
        "--configfile",
        type=Path,
        nargs="+",
        default=[CHECKOUT / "config" / "config.yaml"],
        help="configuration files, merged in order (default: config/config.yaml)",
    )
    arguments = parser.parse_args(argv)
    try:
        pipeline = Pipeline(load_config(arguments.configfile), CHECKOUT)
        spec = pipeline.find(arguments.rule, arguments.variant, arguments.scenario).spec
    except FlowError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(spec.as_dict(), indent=1, sort_keys=True, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
