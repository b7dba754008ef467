"""A share of scripts/campaigns/ten_thousand.py: its memory needs the whole campaign, which has time to settle."""

import pytest

from scripts.campaigns.ten_thousand import make_drafter, make_engine, run


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("pool", "drafter", "reuse"), [(1, "chain", True), (1.5, "none", False), (8, "ngram, pool", True)]
)
def test_many_requests_are_as_one_by_one_and_books_balance(pool: float, drafter: str, reuse: bool) -> None:
    counts, wrong = run(make_engine(pool, reuse=reuse), make_drafter(drafter), 15)
    assert not [one for one in wrong if not one.startswith("resident memory")]
    assert counts["finished"] == 15
