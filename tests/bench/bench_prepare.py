"""Time to prepare an evaluation set of the official size: prompts, token ids, parquet, digests.

The articles are made of the demo's sentences, with the lengths of CNN/DailyMail.
Prints seconds as a ratio to what is asked for. Run: python tests/bench/bench_prepare.py
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path

from bench_texts import ROWS, article, save_tokenizer, sentences, text

from fp8flow.articles import Source
from fp8flow.dataset import build_dataset
from fp8flow.prompts import load_tokenizer

ASKED_S = 60.0


def write_articles(path: Path, rows: int) -> None:
    """Write ``rows`` articles with summaries as JSONL."""
    rng, pool = random.Random(1), sentences()
    with path.open("w", encoding="utf-8") as stream:
        for number in range(rows):
            row = {"id": f"{number:040x}", "article": article(rng, pool)}
            stream.write(json.dumps(row | {"highlights": text(rng, pool, 40)}) + "\n")


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--repeats", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_articles(folder / "articles.jsonl", arguments.rows)
        model = save_tokenizer(folder / "model")
        seconds = []
        for _ in range(arguments.repeats):
            started = time.perf_counter()
            source = Source("file", "dataset", "validation", path=folder / "articles.jsonl")
            tokenizer = load_tokenizer(model)
            result = build_dataset(folder, source, tokenizer, template="reference")
            seconds.append(time.perf_counter() - started)
    asked_s = ASKED_S * arguments.rows / ROWS
    print("| rows | mean tokens | longest | cores | s | ratio to what is asked |")
    print("|---|---|---|---|---|---|")
    tokens = result["input_tokens"]
    cores = len(os.sched_getaffinity(0))
    print(f"| {arguments.rows:,} | {tokens['mean']:.0f} | {tokens['max']} | {cores} |", end="")
    print(f" {min(seconds):.1f} | {min(seconds) / asked_s:.2f} |")


if __name__ == "__main__":
    main()
