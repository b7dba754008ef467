"""Greedy verification: accepted while the draft is the target's choice, then the target's own token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.request import Verdict
from runtime.verify import verify_greedy


@pytest.mark.parametrize(
    ("draft", "target", "verdict"),
    [
        pytest.param([5, 6, 7], [5, 6, 9, 4], Verdict(2, 9), id="last rejected: recovered token"),
        pytest.param([5, 6, 7], [5, 8, 7, 4], Verdict(1, 8), id="a match after a rejection does not count"),
        pytest.param([5, 6, 7], [9, 6, 7, 4], Verdict(0, 9), id="first rejected"),
        pytest.param([5, 6, 7], [5, 6, 7, 4], Verdict(3, 4), id="all accepted: bonus token"),
        pytest.param([5, 6, 7], [5, 6, 7, 7], Verdict(3, 7), id="bonus token equal to the last draft token"),
        pytest.param([], [4], Verdict(0, 4), id="empty draft"),
        pytest.param([5], [5, 5], Verdict(1, 5), id="one token, accepted"),
        pytest.param([5], [6, 5], Verdict(0, 6), id="one token, rejected"),
    ],
)
def test_verify_greedy(draft: list[int], target: list[int], verdict: Verdict) -> None:
    assert verify_greedy(draft, target) == verdict


@given(
    law=st.lists(st.integers(0, 2), min_size=8, max_size=8),
    draft=st.lists(st.integers(0, 2), max_size=7),
)
def test_output_is_what_the_target_alone_would_say(law: list[int], draft: list[int]) -> None:
    """A target that says law[i] at position i, whatever came before: it is followed, at least one token far."""
    verdict = verify_greedy(draft, law[: len(draft) + 1])
    output = [*draft[: verdict.num_accepted], verdict.next_token]
    assert output == law[: len(output)]
    assert len(output) == len(draft) + 1 or draft[len(output) - 1] != law[len(output) - 1]
