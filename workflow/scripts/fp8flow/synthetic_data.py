"""Prompts of random tokens with log-normal lengths: they size a system without its data set."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any, Final

from fp8flow.errors import FlowError

SYNTHETIC: Final = "synthetic"
NOTE = "random tokens: for sizing only, answers mean nothing, not submittable"
# Words of the reference summaries; CNN/DailyMail's have about as many tokens.
_REFERENCE_TOKENS = 60
# Each section and each part has a stream of its own, so equal seeds never give equal rows.
_STREAMS = {"dataset": 0, "calibration": 1}
_BISECTIONS = 100
_BATCH_ROWS = 256
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Lengths:
    """Lengths of prompts: log-normal, clipped, with a given mean after clipping.

    Attributes:
        mean_tokens: mean, tokens.
        min_tokens: shortest, tokens.
        max_tokens: longest, tokens.
        sigma: standard deviation of the logarithm before clipping.
        seed: seed of order and tokens.
    """

    mean_tokens: int
    min_tokens: int
    max_tokens: int
    sigma: float
    seed: int

    def check(self, section: str) -> None:
        """Check that such lengths exist.

        Raises:
            FlowError: naming the values.
        """
        constant = 0 < self.min_tokens == self.mean_tokens == self.max_tokens
        spread = 0 < self.min_tokens < self.mean_tokens < self.max_tokens and self.sigma > 0
        if not constant and not spread:
            raise FlowError(
                f"{section}.synthetic: min_tokens {self.min_tokens} < mean_tokens "
                f"{self.mean_tokens} < max_tokens {self.max_tokens} and sigma {self.sigma} > 0 "
                "must hold, or all three lengths be equal"
            )

    def _clipped_mean(self, mu: float) -> float:
        """Return the mean of the clipped distribution whose logarithm has the mean ``mu``."""
        low, high = (
            (math.log(limit) - mu) / self.sigma for limit in (self.min_tokens, self.max_tokens)
        )
        share = _NORMAL.cdf(high - self.sigma) - _NORMAL.cdf(low - self.sigma)
        inner = math.exp(mu + self.sigma**2 / 2) * share if share else 0.0
        below, above = _NORMAL.cdf(low), _NORMAL.cdf(-high)
        return self.min_tokens * below + inner + self.max_tokens * above

    def mu(self) -> float:
        """Return the mean of the logarithm that makes the clipped mean ``mean_tokens``."""
        reach = 10 * self.sigma
        low = math.log(self.min_tokens) - reach
        high = math.log(self.max_tokens) + reach
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if self._clipped_mean(middle) < self.mean_tokens:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def quantiles(self, rows: int) -> list[int]:
        """Return ``rows`` lengths in ascending order, evenly spread over the distribution.

        Quantiles instead of draws: mean and tail are those asked for, also of a small set.
        """
        if self.min_tokens == self.max_tokens:
            return [self.mean_tokens] * rows
        mu, lengths = self.mu(), []
        for row in range(rows):
            length = math.exp(mu + self.sigma * _NORMAL.inv_cdf((row + 0.5) / rows))
            lengths.append(min(max(round(length), self.min_tokens), self.max_tokens))
        return lengths


def read_lengths(settings: Mapping[str, Any]) -> Lengths | None:
    """Return the lengths in a config section ``dataset`` or ``calibration``; None without any."""
    lengths = settings.get("synthetic")
    return Lengths(**lengths) if lengths and settings["source"] == SYNTHETIC else None


@dataclass(frozen=True)
class SyntheticRow:
    """One prompt of random tokens.

    Attributes:
        label: what stands in place of the prompt's text.
        token_ids: the prompt.
        reference: as many random words as a reference summary has.
    """

    label: str
    token_ids: list[int]
    reference: str


def ordinary_ids(tokenizer: Any) -> Any:
    """Return the ids of all entries that are not special, ascending (int32 array)."""
    import numpy as np

    special = set(tokenizer.all_special_ids)
    special |= {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return np.array(sorted(set(tokenizer.get_vocab().values()) - special), dtype=np.int32)


def first_ids(tokenizer: Any) -> list[int]:
    """Return the ids that the tokenizer puts in front of every text, such as BOS."""
    return list(tokenizer("")["input_ids"][:1]) if tokenizer.bos_token_id is not None else []


def random_rows(
    lengths: Lengths, rows: int, tokenizer: Any, section: str
) -> Iterator[list[SyntheticRow]]:
    """Yield rows of random tokens in batches; equal arguments give equal rows on every machine.

    Ids are uniform over the ordinary ones; the first is BOS where the tokenizer adds it to texts.

    Args:
        lengths: distribution of the prompt lengths, BOS included.
        rows: number of rows.
        tokenizer: tokenizer of the model.
        section: ``dataset`` or ``calibration``; their rows differ.

    Raises:
        FlowError: if the lengths are impossible, or two rows are equal.
    """
    import numpy as np

    lengths.check(section)
    stream = np.random.SeedSequence([lengths.seed, _STREAMS[section]])
    generator = np.random.Generator(np.random.PCG64(stream))
    order = generator.permutation(np.array(lengths.quantiles(rows), dtype=np.int64)).tolist()
    vocabulary, start = ordinary_ids(tokenizer), first_ids(tokenizer)
    seen: set[bytes] = set()
    for first in range(0, rows, _BATCH_ROWS):
        sizes = order[first : first + _BATCH_ROWS]
        prompts = _draw(generator, vocabulary, sizes)
        seen.update(ids[len(start) :].tobytes() for ids in prompts)
        if len(seen) != first + len(sizes):
            raise FlowError(
                f"{section}.synthetic: random rows repeat among the first {first + len(sizes)}; "
                "raise min_tokens"
            )
        drawn = _draw(generator, vocabulary, [_REFERENCE_TOKENS] * len(sizes))
        texts = tokenizer.batch_decode([ids.tolist() for ids in drawn], skip_special_tokens=True)
        yield [
            SyntheticRow(
                f"{len(ids)} random tokens, row {first + place} of seed {lengths.seed}",
                start + ids[len(start) :].tolist(),
                text.strip(),
            )
            for place, (ids, text) in enumerate(zip(prompts, texts, strict=True))
        ]


def _draw(generator: Any, vocabulary: Any, sizes: Sequence[int]) -> list[Any]:
    """Return one array of random ids per size."""
    import numpy as np

    flat = vocabulary[generator.integers(0, len(vocabulary), size=sum(sizes))]
    return np.split(flat, np.cumsum(sizes)[:-1])


def describe(lengths: Lengths, tokenizer: Any) -> dict[str, Any]:
    """Return what a record says of random prompts: lengths as asked, and the ids drawn from."""
    return {
        **asdict(lengths),
        "vocabulary": len(ordinary_ids(tokenizer)),
        "first_token": "BOS" if first_ids(tokenizer) else "random",
        "prompt_text": "a label; the prompts are the token ids",
    }
