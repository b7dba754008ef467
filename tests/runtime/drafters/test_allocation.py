"""Drafts that are sent in a step are the best of all that could be sent."""

from itertools import accumulate, product
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.drafters.adaptive import allocate

SHARES = st.floats(0, 1, allow_subnormal=False)
ROWS = st.lists(st.lists(SHARES, max_size=4).map(lambda shares: list(accumulate(shares, mul))), min_size=1, max_size=4)
PRICES = st.lists(st.floats(0, 2, allow_subnormal=False), min_size=16, max_size=16)


@given(ROWS, PRICES)
def test_no_allocation_is_better(survivals: list[list[float]], prices: list[float]) -> None:
    """All of them are tried, with prices that jump up as they like."""
    costs = list(accumulate(prices, initial=0.5))

    def value(lengths: tuple[int, ...]) -> float:
        return sum(sum(row[:n]) for row, n in zip(survivals, lengths, strict=True)) - costs[sum(lengths)]

    best = max(value(lengths) for lengths in product(*(range(len(row) + 1) for row in survivals)))
    chosen = allocate(survivals, costs)
    assert value(tuple(chosen)) == pytest.approx(best, abs=1e-9)


def test_of_equally_good_ones_the_shortest_is_chosen() -> None:
    assert allocate([[0.5, 0.25], [0.5]], [1.0, 1.5, 2.0, 2.5]) == [0, 0]


def test_a_dear_token_is_sent_where_those_after_it_are_free() -> None:
    assert allocate([[0.9, 0.8], [0.7]], [1.0, 3.0, 3.0, 3.0]) == [2, 1]
