"""Speed of the embedded server on this machine, from a finished demo (`make demo`).

Prints output tokens/s at several numbers of concurrent requests, as ratios to one request.
Run: python tests/bench/bench_embedded.py [--results results] [--tokens 48]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "workflow" / "scripts"))

from fp8flow.backends import get_backend  # noqa: E402
from fp8flow.config_engines import TransformersEngine  # noqa: E402
from fp8flow.log import configure_logging  # noqa: E402
from fp8flow.serve import Resources, serve  # noqa: E402
from fp8flow.serving import Serving  # noqa: E402
from fp8flow.workload import read_workload  # noqa: E402


def rate(serving: Serving, concurrent: int, requests: int, tokens: int) -> float:
    """Return output tokens/s of ``requests`` prompts of the set, ``concurrent`` at a time."""
    prompts = serving.workload.prompts[:requests]
    started = time.perf_counter()
    answers = serving.ask(prompts, max_tokens=tokens, connections=concurrent, timeout_s=600.0)
    elapsed_s = time.perf_counter() - started
    serving.require_answers(answers, f"the benchmark at {concurrent} requests")
    return sum(answer.completion_tokens or 0 for answer in answers) / elapsed_s


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--variant", default="fp8")
    parser.add_argument("--tokens", type=int, default=48)
    arguments = parser.parse_args()
    configure_logging(None)
    checkpoint = arguments.results / arguments.variant / "checkpoint" / "manifest.json"
    dataset = arguments.results / "data" / "validation" / "manifest.json"
    workload = read_workload(checkpoint, dataset, "bench")
    resources = Resources(threads=os.cpu_count() or 1)
    backend, engine = get_backend("transformers"), TransformersEngine().model_dump()
    with (
        tempfile.TemporaryDirectory() as folder,
        serve(backend, workload, engine, resources, Path(folder), 600.0) as serving,
    ):
        rate(serving, 4, 4, 8)
        rates = {n: rate(serving, n, max(4, n), arguments.tokens) for n in (1, 4, 16)}
        rates[32] = rate(serving, 16, 32, arguments.tokens)
    print("| requests | at once | tokens/s | ratio to one at a time |\n|---|---|---|---|")
    for requests, value in rates.items():
        at_once, count = min(requests, 16), max(4, requests)
        print(f"| {count} | {at_once} | {value:.1f} | {value / rates[1]:.2f} |")


if __name__ == "__main__":
    main()
