"""A lookup that adds nothing to another rests; where each is right in its own places both go on."""

from runtime.core.request import Draft, Request, Sequence
from runtime.drafters.acceptance_stats import LOOK_INTERVAL
from runtime.drafters.chain import BestOf

PROBE = LOOK_INTERVAL
"""A request that is looked at by those that rest too."""
ALL = {1, 2, PROBE}
ALWAYS, NEVER, EVEN, ODD = (
    {0: even, 1: odd} for even, odd in ((True, True), (False, False), (True, False), (False, True))
)
"""Drafts that are right at even and odd positions."""


class Says:
    """Drafts one token, the next of a count or another, by its position. Notes for which requests it was asked."""

    def __init__(self, is_right: dict[int, bool], match_lens: tuple[int, int] = (1, 1)) -> None:
        self.is_right, self.match_lens, self.asked = is_right, match_lens, list[int]()

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        self.asked += [sequence.request.id for sequence in sequences]
        return [self._draft(len(sequence.tokens)) for sequence in sequences]

    def _draft(self, position: int) -> Draft:
        is_right = self.is_right[position % 2]
        return Draft([position if is_right else position + 1000], match_len=self.match_lens[position % 2])

    def forget(self, request_id: int) -> None:
        pass


class Rows:
    """Three sequences whose text counts, and lookups that look at them."""

    def __init__(self, *lookups: Says) -> None:
        self.lookups = lookups
        self.chain = BestOf(lookups, [], lambda batch_size, context_len, draft_len: 1.0, 10**6)
        self.sequences = [Sequence(Request(i, (0,), 10**6), [0]) for i in sorted(ALL)]

    def step(self, num_steps: int) -> list[set[int]]:
        """Requests for which each was asked in the last two steps."""
        for step in range(num_steps):
            if step == num_steps - 2:
                for lookup in self.lookups:
                    lookup.asked.clear()
            self.chain.propose(self.sequences, 1)
            for sequence in self.sequences:
                sequence.tokens.append(len(sequence.tokens))
        return [set(lookup.asked) for lookup in self.lookups]


def test_who_is_never_righter_looks_for_few_requests() -> None:
    for worse in (NEVER, EVEN):
        assert Rows(Says(worse), Says(ALWAYS)).step(600) == [{PROBE}, ALL]
        assert Rows(Says(ALWAYS), Says(worse)).step(600) == [ALL, {PROBE}]


def test_of_two_that_draft_the_same_one_looks() -> None:
    for is_right in (ALWAYS, EVEN, NEVER):
        assert sorted(map(len, Rows(Says(is_right), Says(is_right)).step(600))) == [1, 3]


def test_who_is_righter_in_places_that_can_be_told_goes_on() -> None:
    """Each is right where its match is long."""
    assert Rows(Says(EVEN, (16, 1)), Says(ODD, (1, 16))).step(600) == [ALL, ALL]


def test_who_rests_comes_back_when_it_is_righter() -> None:
    better, worse = Says(dict(ALWAYS)), Says(EVEN)
    rows = Rows(better, worse)
    assert rows.step(600) == [ALL, {PROBE}]
    better.is_right.update(NEVER)
    assert rows.step(3000) == [{PROBE}, ALL]
