"""A chain asks on only for whom nothing was found, and passes on everything else."""

import pytest
import torch
from sentences import Said

from runtime.core.request import Draft, Request, Sequence
from runtime.drafters.chain import FirstOf, LongestMatch
from runtime.drafters.ngram import NgramLookup
from runtime.util.errors import SpecDecError


class Recorder:
    """Proposes what it is told for each request, nothing for others, and keeps what it was asked."""

    def __init__(self, drafts: dict[int, Draft]) -> None:
        self.drafts = drafts
        self.asked: list[list[int]] = []
        self.forgotten: list[int] = []

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        self.asked.append([s.request.id for s in sequences])
        return [self.drafts.get(s.request.id, Draft([])).cut(max_draft_len) for s in sequences]

    def forget(self, request_id: int) -> None:
        self.forgotten.append(request_id)


class Picky(Recorder):
    def check_request(self, request: Request) -> None:
        if len(request.prompt_tokens) > 3:
            raise SpecDecError(f"prompt too long for me: {len(request.prompt_tokens)}")


def start(request_id: int, tokens: tuple[int, ...] = (5, 6)) -> Sequence:
    return Sequence(Request(request_id, tokens, 50), list(tokens))


def test_next_drafter_is_asked_for_whom_nothing_was_found() -> None:
    first = Recorder({1: Draft([11])})
    second = Recorder({0: Draft([20]), 1: Draft([21]), 3: Draft([23, 24])})
    third = Recorder({2: Draft([32])})
    chain = FirstOf([first, second, third])
    drafts = chain.propose([start(i) for i in range(5)], 4)
    assert [draft.tokens for draft in drafts] == [[20], [11], [32], [23, 24], []]
    assert (first.asked, second.asked, third.asked) == ([[0, 1, 2, 3, 4]], [[0, 2, 3, 4]], [[2, 4]])


def test_the_draft_of_the_longest_match_is_taken() -> None:
    drawn = Draft([40], torch.full((1, 50), 0.02, dtype=torch.float64))
    first = Recorder({0: Draft([10], match_len=3), 1: Draft([11], match_len=3), 3: Draft([13]), 4: drawn})
    second = Recorder(
        {0: Draft([20], match_len=3), 1: Draft([21], match_len=4), 2: Draft([22]), 4: Draft([24], match_len=9)}
    )
    chain = LongestMatch([first, second])
    drafts = chain.propose([start(i) for i in range(6)], 4)
    assert [draft.tokens for draft in drafts] == [[10], [21], [22], [13], [40], []]
    assert drafts[4].probs is not None
    chain.forget(3)
    assert first.forgotten == second.forgotten == [3]
    with pytest.raises(SpecDecError, match="too long for me: 4"):
        LongestMatch([first, Picky({})]).check_request(Request(0, (1, 2, 3, 4), 5))


def test_member_asked_now_and_then_keeps_up() -> None:
    """The second reads what it was not asked about when it is."""
    first, lookup = Recorder({0: Draft([9])}), NgramLookup(2)
    chain, sequence = FirstOf([first, lookup]), start(0, (1, 2))
    for token in (3, 4, 1):
        assert chain.propose([sequence], 4)[0].tokens == [9]
        sequence.tokens.append(token)
    first.drafts = {}
    assert chain.propose([sequence], 3)[0].tokens == [2, 3, 4]


def test_member_that_returns_too_few_drafts_is_an_error(said: Said) -> None:
    class Short(Recorder):
        def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
            return []

    with pytest.raises(SpecDecError) as error:
        FirstOf([NgramLookup(2), Short({})]).propose([start(0)], 4)
    said(error, "0", "1")
