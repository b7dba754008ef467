"""Drafts are cut to what pays: nothing where nothing is right, everything where it costs nothing, and back again."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.core.request import Draft, Request, Sequence
from runtime.drafters.adaptive import AdaptiveDrafter, IterationSeconds
from runtime.drafters.suffix import SuffixLookup
from runtime.measure.tuning.replay import replay_batches
from runtime.text.trace_lines import Trace


def price(per_token: float) -> IterationSeconds:
    """A step takes a second, and every draft token so much of one more."""
    return lambda batch_size, context_len, draft_len: 1 + per_token * draft_len


class Sayer:
    """Drafts the recorded output, with every token wrong for which `is_right` says so. Notes what it was asked."""

    def __init__(self, output: list[int], is_right: list[bool], match_len: int = 0) -> None:
        self.output, self.is_right, self.match_len = output, is_right, match_len
        self.asked: list[int] = []

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        self.asked.append(max_draft_len)
        drafts = []
        for sequence in sequences:
            start = sequence.num_generated
            right = zip(self.output[start:], self.is_right[start:], strict=False)
            tokens = [token if is_right else token + WRONG for token, is_right in right]
            drafts.append(Draft(tokens[:max_draft_len], match_len=self.match_len))
        return drafts

    def forget(self, request_id: int) -> None:
        pass


def drafted(output: list[int], drafter: AdaptiveDrafter) -> list[int]:
    (stats,) = replay_batches([Trace((1,), tuple(output))], drafter, 10).stats
    return stats.per_step_drafted


WRONG = 1000
OUTPUT = [random.Random(0).randrange(WRONG) for _ in range(400)]


@pytest.mark.parametrize(
    ("is_right", "per_token", "when", "lengths"),
    [
        pytest.param(lambda i: i % 3 == 0, 0.0, slice(-10), {10}, id="free tokens are all sent"),
        pytest.param(lambda i: False, 0.1, slice(40, None), {0}, id="nothing while nothing is right"),
        pytest.param(lambda i: True, 0.1, slice(8, -1), {9, 10}, id="all where all is right"),
        pytest.param(lambda i: i % 4 != 3, 0.15, slice(30, -4), {3}, id="only the part that is right"),
        pytest.param(lambda i: i >= 200, 0.1, slice(60, 200), {0}, id="off while nothing was right"),
    ],
)
def test_what_pays_is_sent(is_right: Any, per_token: float, when: slice, lengths: set[int]) -> None:
    sent = drafted(OUTPUT, AdaptiveDrafter(Sayer(OUTPUT, [is_right(i) for i in range(400)]), price(per_token)))
    assert sent[0] > 0 and set(sent[when]) <= lengths


def test_steps_without_a_proposal_are_no_reason_to_look_less() -> None:
    """A lookup that rarely finds anything is still asked at every step."""

    class Rare(Sayer):
        def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
            drafts = super().propose(sequences, max_draft_len)
            return drafts if sequences[0].num_generated % 37 == 0 else [Draft([])] * len(sequences)

    sayer = Rare(OUTPUT, [True] * 400)
    lengths = drafted(OUTPUT, AdaptiveDrafter(sayer, price(0.01)))
    assert len(sayer.asked) == len(lengths) and sum(length > 0 for length in lengths) >= 3


def test_being_off_is_left_again_when_drafts_are_right() -> None:
    """Drafts that are not sent are learned from."""
    lengths = drafted(OUTPUT, AdaptiveDrafter(Sayer(OUTPUT, [i >= 200 for i in range(400)]), price(0.1)))
    assert max(lengths[200:230]) == 10


def test_long_matches_are_trusted_apart_from_short_ones() -> None:
    """Two sayers in one: after a match of 8 all is right, after one of 1 nothing."""

    class Mixed(Sayer):
        def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
            is_good = sequences[0].num_generated % 2 == 0
            self.is_right = [is_good] * 400
            return [Draft(d.tokens, match_len=8 if is_good else 1) for d in super().propose(sequences, max_draft_len)]

    mixed = AdaptiveDrafter(Mixed(OUTPUT, []), price(0.1))
    (stats,) = replay_batches([Trace((1,), tuple(OUTPUT))], mixed, 10).stats
    position, by_kind = 0, {True: [], False: []}
    for num_drafted, num_accepted in zip(stats.per_step_drafted, stats.per_step_accepted, strict=True):
        by_kind[position % 2 == 0].append(num_drafted)
        position += num_accepted + 1
    assert set(by_kind[True][3:-1]) <= {9, 10} and sum(by_kind[False][20:]) == 0


def test_draft_model_is_asked_for_no_more_than_pays_and_rarely_while_nothing_does() -> None:
    sayer = Sayer(OUTPUT, [False] * 400)
    lengths = drafted(OUTPUT, AdaptiveDrafter(sayer, price(0.05), lambda batch_size, context_len: 0.2))
    late = lengths[100:]
    assert set(late) == {0, 1} and late.count(1) == pytest.approx(len(late) / 16, abs=1)
    assert len(sayer.asked) < 60


def test_draft_model_that_is_always_right_is_soon_asked_for_all() -> None:
    """Tokens beyond what was asked for are not known, and worth finding out."""
    sayer = Sayer(OUTPUT, [True] * 400)
    lengths = drafted(OUTPUT, AdaptiveDrafter(sayer, price(0.02), lambda batch_size, context_len: 0.3))
    assert set(lengths[25:-2]) == {10}


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.floats(0, 2, allow_subnormal=False), st.integers(1, 10))
def test_drafts_are_beginnings_of_the_drafters_own(output: list[int], per_token: float, max_draft_len: int) -> None:
    plain, adaptive = SuffixLookup(), AdaptiveDrafter(SuffixLookup(), price(per_token))
    sequence = Sequence.start(Request(0, (1, 2), 100))
    for token in output:
        whole, cut = (drafter.propose([sequence], max_draft_len)[0] for drafter in (plain, adaptive))
        assert cut.tokens == whole.tokens[: len(cut.tokens)]
        sequence.tokens.append(token)


def test_each_row_of_a_batch_gets_its_own_length() -> None:
    """One row's drafts are right: all of them are sent; the other's are wrong: after a while none of them is."""

    class ByRequest(Sayer):
        def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
            drafts = super().propose(sequences, max_draft_len)
            wrong = [Draft([token + WRONG for token in draft.tokens], match_len=1) for draft in drafts]
            return [draft if s.request.id == 0 else w for s, draft, w in zip(sequences, drafts, wrong, strict=True)]

    sayer = ByRequest(OUTPUT, [True] * 400, match_len=8)
    traces = [Trace((1,), tuple(OUTPUT)), Trace((2,), tuple(OUTPUT))]
    right, wrong = replay_batches(traces, AdaptiveDrafter(sayer, price(0.1)), 10, 2).stats
    assert set(right.per_step_drafted[8:-1]) == {10} and sum(wrong.per_step_drafted[8:50]) == 0


def test_nothing_is_looked_up_where_even_right_tokens_cost_too_much() -> None:
    sayer = Sayer(OUTPUT, [True] * 400)
    assert sum(drafted(OUTPUT, AdaptiveDrafter(sayer, price(1.0)))) == 0 and not sayer.asked


def test_prices_of_another_batch_size_are_no_reason_to_stop() -> None:
    """Tokens per second fall as a batch empties: what a token must yield falls with them."""
    drafter = AdaptiveDrafter(Sayer(OUTPUT, [True] * 400, match_len=16), price(0.05))
    many = [Sequence.start(Request(i, (1,), 400)) for i in range(16)]
    for _ in range(40):
        drafter.propose(many, 10)
    (draft,) = drafter.propose(many[:1], 10)
    assert len(draft.tokens) >= 8


def test_forgotten_request_leaves_nothing_of_its_own() -> None:
    inner = SuffixLookup()
    drafter = AdaptiveDrafter(inner, price(0.1))
    replay_batches([Trace((1, 2, 1, 2), (1, 2, 1, 2, 1))] * 3, drafter, 4)
    assert not {*drafter._outcomes._own, *drafter._outcomes._pending.drafts, *inner._histories}


class Drawer(Sayer):
    """Says of what it drafts that it was drawn, with certainty."""

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        drafts = super().propose(sequences, max_draft_len)
        rows = [torch.zeros(len(draft.tokens), 2 * WRONG, dtype=torch.float64) for draft in drafts]
        for draft, row in zip(drafts, rows, strict=True):
            row[range(len(draft.tokens)), draft.tokens] = 1
        return [Draft(draft.tokens, row, draft.match_len) for draft, row in zip(drafts, rows, strict=True)]


@pytest.mark.parametrize("match_len", [0, 4])
def test_drawn_tokens_are_all_sent_and_asked_for_as_they_pay(match_len: int) -> None:
    drawer = Drawer(OUTPUT, [i % 4 != 3 for i in range(400)], match_len)
    lengths = drafted(OUTPUT, AdaptiveDrafter(drawer, price(0.15)))
    assert lengths[0] == 10 and set(lengths[30:-4]) == {3}
    assert sum(drawer.asked[30:-4]) == sum(lengths[30:-4])
    lengths = drafted(OUTPUT, AdaptiveDrafter(Drawer(OUTPUT, [False] * 400, match_len), price(0.1)))
    assert sum(lengths[40:]) < 30
