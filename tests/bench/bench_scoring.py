"""Time to score an accuracy run of the official size, and whether the values are the reference's.

The answers are 128 tokens of made-up text. ``--compare`` of them are scored a second time as the
MLPerf reference does it (language/llama3.1-8b/evaluation.py, v6.1), one after the other: sentences
by NLTK, joined by newlines, rouge-score with stemmer.
Prints seconds as a ratio to what is asked for, and the number of different values.
Run: python tests/bench/bench_scoring.py
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_texts import ROWS, save_tokenizer, sentences, text

from fp8flow.prompts import load_tokenizer
from fp8flow.scoring import METRICS, SampleScore, score_all
from fp8flow.sentences import load_splitter

ASKED_S = 40.0
TOKENS = 128


def make_run(tokenizer: Any, rows: int) -> tuple[dict[int, list[int]], list[str]]:
    """Return answers (token ids by index) and reference summaries that share some sentences."""
    rng, pool = random.Random(2), sentences()
    references = [text(rng, pool, 40) for _ in range(rows)]
    texts = [reference[rng.randrange(60) :] + text(rng, pool, 110) for reference in references]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return {n: row[:TOKENS] for n, row in enumerate(ids)}, references


def differing(
    scores: dict[int, SampleScore], answers: dict[int, list[int]], references: list[str], tok: Any
) -> int:
    """Return how many of the F-measures differ from the reference's; bit by bit."""
    from rouge_score.rouge_scorer import RougeScorer

    splitter, scorer = load_splitter(), RougeScorer(list(METRICS), use_stemmer=True)
    found = 0
    for index, score in scores.items():
        text_ = tok.decode(answers[index], skip_special_tokens=True)
        prediction = "\n".join(splitter.tokenize(text_.strip()))
        target = "\n".join(splitter.tokenize(references[index].strip()))
        expected = scorer.score(target, prediction)
        found += sum(
            value != expected[name].fmeasure
            for name, value in zip(METRICS, score.fmeasures, strict=True)
        )
    return found


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--compare", type=int, default=1000, help="answers scored twice")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = save_tokenizer(Path(name) / "model")
        tokenizer = load_tokenizer(model)
        answers, references = make_run(tokenizer, arguments.rows)
        seconds = []
        for _ in range(arguments.repeats):
            started = time.perf_counter()
            scores = score_all(answers, references, model)
            seconds.append(time.perf_counter() - started)
    compared = {n: scores[n] for n in list(scores)[: arguments.compare]}
    wrong = differing(compared, answers, references, tokenizer)
    asked_s = ASKED_S * arguments.rows / ROWS
    cores = len(os.sched_getaffinity(0))
    print("| answers | cores | s | ratio to what is asked | values compared | different |")
    print("|---|---|---|---|---|---|")
    print(f"| {arguments.rows:,} | {cores} | {min(seconds):.1f} |", end="")
    print(f" {min(seconds) / asked_s:.2f} | {len(compared) * len(METRICS):,} | {wrong} |")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
