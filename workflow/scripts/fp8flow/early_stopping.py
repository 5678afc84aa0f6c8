"""Early stopping of MLPerf LoadGen: how many queries support a statement about a percentile.

Of n queries, t exceed the limit and h = n - t do not. The statement "at least 99 % are within the
limit" holds with confidence 0.99 when the regularized incomplete beta function
I(0.99; h, t + 1) is below 0.01 (MLPerf Inference rules, early stopping; tolerance 0).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from functools import lru_cache

PERCENTILE = 0.99
CONFIDENCE = 0.99


def _supports(within: int, over: int, percentile: float, confidence: float) -> bool:
    from scipy.special import betainc

    return bool(betainc(within, over + 1, percentile) < 1.0 - confidence)


@lru_cache(maxsize=4096)
def queries_needed(
    over: int, percentile: float = PERCENTILE, confidence: float = CONFIDENCE
) -> int:
    """Return how many queries a run needs in all when ``over`` of them exceed the limit."""
    if over < 0:
        raise ValueError(f"the number of queries over the limit is {over}")
    high = 1
    while not _supports(high, over, percentile, confidence):
        high *= 2
    within = bisect.bisect_left(
        range(high + 1), True, lo=1, key=lambda h: _supports(h, over, percentile, confidence)
    )
    return within + over


def affordable_over(
    queries: int, percentile: float = PERCENTILE, confidence: float = CONFIDENCE
) -> int | None:
    """Return the largest number of queries over the limit that ``queries`` in all can carry.

    None if there are too few queries for any statement, even with none over the limit.
    """
    found = bisect.bisect_right(
        range(queries + 1), queries, key=lambda t: queries_needed(t, percentile, confidence)
    )
    return found - 1 if found else None


def passes(
    queries: int, over: int, percentile: float = PERCENTILE, confidence: float = CONFIDENCE
) -> bool:
    """Tell whether a run of ``queries`` with ``over`` of them above the limit is long enough."""
    return queries >= queries_needed(over, percentile, confidence)


def percentile_estimate(
    values: Sequence[int], percentile: float = PERCENTILE, confidence: float = CONFIDENCE
) -> int | None:
    """Return the upper bound of a percentile that early stopping supports.

    That is the value at sorted index n - t for the largest affordable t (MLCommons endpoints
    harness, SingleStream form of LoadGen). None with too few values: below 662 for the 99th
    percentile, 64 for the 90th.
    """
    over = affordable_over(len(values), percentile, confidence)
    if not over:
        return None
    return int(sorted(values)[len(values) - over])
