"""Early stopping against values of the MLPerf rules and LoadGen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8flow.early_stopping import affordable_over, passes, percentile_estimate, queries_needed

NEEDED = {
    0: 459,
    1: 662,
    2: 838,
    5: 1307,
    10: 2010,
    50: 6898,
    100: 12571,
    150: 18090,
    200: 23527,
    500: 55427,
    1000: 107569,
}
AFFORDABLE = {13368: 107, 26736: 229, 40104: 354, 100000: 927, 270336: 2583}


@pytest.mark.parametrize(("over", "queries"), NEEDED.items())
def test_queries_needed(over: int, queries: int) -> None:
    assert queries_needed(over) == queries
    assert passes(queries, over)
    assert not passes(queries - 1, over)


@pytest.mark.parametrize(("queries", "over"), AFFORDABLE.items())
def test_affordable_over(queries: int, over: int) -> None:
    assert affordable_over(queries) == over


def test_too_few_queries_support_nothing() -> None:
    assert affordable_over(458) is None
    assert affordable_over(459) == 0
    assert affordable_over(0) is None


@pytest.mark.parametrize(("percentile", "smallest"), [(0.9, 64), (0.99, 662), (0.999, 6636)])
def test_estimate_needs_enough_values(percentile: float, smallest: int) -> None:
    assert percentile_estimate(range(smallest - 1), percentile) is None
    assert percentile_estimate(range(smallest), percentile) == smallest - 1


def test_estimate_is_the_value_that_the_affordable_number_exceeds() -> None:
    values = list(range(13_368))[::-1]
    assert percentile_estimate(values) == 13_368 - 107


@given(st.integers(459, 20_000))
def test_affordable_is_the_inverse_of_needed(queries: int) -> None:
    over = affordable_over(queries)
    assert over is not None
    assert queries_needed(over) <= queries < queries_needed(over + 1)


def test_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        queries_needed(-1)
