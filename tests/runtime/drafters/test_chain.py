"""A chain asks on only for whom nothing was found, and passes on everything else."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from sentences import Said

from runtime.core.request import Draft, Request, Sequence
from runtime.core.stats import LoopTimes
from runtime.drafters.adaptive import AdaptiveDrafter
from runtime.drafters.answer_lookup import AnswersFirst
from runtime.drafters.chain import BestOf, FirstOf, LongestMatch
from runtime.drafters.ngram import NgramLookup
from runtime.drafters.opened import BoundedDrafter
from runtime.drafters.owner_pools import OwnerPools, PooledLookup
from runtime.drafters.protocol import CompositeDrafter, Drafter
from runtime.drafters.under_grammar import UnderGrammar
from runtime.loop.session import Session, _TimedDrafter
from runtime.measure.diagnosis import explain
from runtime.measure.diagnosis.observe import _Watched
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


class Ahead(Picky):
    def look_ahead(self, sequence: Sequence, drafted: list[int], max_draft_len: int) -> Draft:
        return Draft([*drafted, 9], match_len=len(drafted)).cut(max_draft_len)


COMPOSITES: dict[type[CompositeDrafter], Callable[[Drafter], CompositeDrafter]] = {
    FirstOf: lambda member: FirstOf([Recorder({}), member]),
    LongestMatch: lambda member: LongestMatch([member, Recorder({})]),
    AnswersFirst: lambda member: AnswersFirst(Recorder({}), member),
    PooledLookup: lambda member: PooledLookup(member, OwnerPools()),
    BestOf: lambda member: BestOf([member], [], lambda *place: 1.0, 32),
    BoundedDrafter: lambda member: BoundedDrafter(member, 4),
    UnderGrammar: UnderGrammar,
    AdaptiveDrafter: lambda member: AdaptiveDrafter(member, lambda *place: 1.0),
    _TimedDrafter: lambda member: _TimedDrafter(member, LoopTimes(), Session(cast(Any, None), "leader")),
    _Watched: lambda member: _Watched([member]),
    explain._Watched: lambda member: explain._Watched(member, "member", explain._Seen()),
    explain._Outermost: lambda member: explain._Outermost(member, explain._Seen()),
}


def test_members_check_requests_look_ahead_and_forget(said: Said) -> None:
    """A drafter decides about its members' drafts alone; all else is the members' own."""
    assert set(COMPOSITES) == set(CompositeDrafter.__subclasses__())
    for make in COMPOSITES.values():
        member, sequence = Ahead({}), start(7)
        drafter = make(member)
        drafter.check_request(Request(0, (1, 2, 3), 5))
        with pytest.raises(SpecDecError) as error:
            drafter.check_request(Request(0, (1, 2, 3, 4), 5))
        said(error, "4")
        assert drafter.look_ahead(sequence, [3, 4], 5) == Draft([3, 4, 9])
        drafter.forget(7)
        assert member.forgotten == [7]


def test_member_that_returns_too_few_drafts_is_an_error(said: Said) -> None:
    class Short(Recorder):
        def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
            return []

    with pytest.raises(SpecDecError) as error:
        FirstOf([NgramLookup(2), Short({})]).propose([start(0)], 4)
    said(error, "0", "1")
