"""Promises of drafters, whatever was generated and whatever becomes of their drafts.

- what is learned of drafts is what became of them: each position that was reached, by those that were right there;
  chances are between 0 and 1, and fall
- models: a draft is what the draft model says after the sequence's own tokens; it is never longer than was asked for
- chains and suggestions: whoever is asked is told to forget; a copy verifies no more than has room in its draft
"""

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.checkpoint.config import BuildConfig
from runtime.core.params import SamplingConfig
from runtime.core.request import Draft, Request, Sequence, VerifyResult
from runtime.drafters.acceptance_stats import AcceptanceStats, _PositionStats
from runtime.drafters.adaptive import _Prices, allocate
from runtime.drafters.chain import BestOf, FirstOf, LongestMatch
from runtime.drafters.confidence_stop import ConfidenceStop
from runtime.drafters.draft_state import DraftState
from runtime.drafters.draft_target import DraftModel, SelfDraftModel
from runtime.drafters.meter import Meter
from runtime.drafters.prediction import CopiedTexts, PredictionLookup
from runtime.engine.engine import KVCacheConfig
from scripts.campaigns.cases import Recorder
from scripts.campaigns.oracle import CheckedEngine, ExactModel, one_by_one

VOCAB_SIZE = 12
TARGET, DRAFT = ExactModel(1, VOCAB_SIZE), ExactModel(2, VOCAB_SIZE)


def engine_of(model: ExactModel, max_draft_len: int, max_tokens: int = 400) -> CheckedEngine:
    build = BuildConfig("none", 4, 100, 140, max_draft_len, 4, "draft_tokens_external")
    return CheckedEngine(model, build, KVCacheConfig(max_tokens=max_tokens), 512, copy=model)


# --- what is learned ---


@given(drafts=st.lists(st.integers(1, 6).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), max_size=15))
def test_positions_count_the_drafts_that_reached_them(drafts: list[tuple[int, int]]) -> None:
    stats = _PositionStats(memory=1.0)
    for num_right, num_known in drafts:
        stats.add(num_right, num_known)
    for i in range(len(stats.reached)):
        assert stats.reached[i] == sum(num_right >= i and num_known > i for num_right, num_known in drafts)
        assert stats.right[i] == sum(num_right > i for num_right, _ in drafts)


@given(rights=st.lists(st.integers(0, 5), max_size=30), match_len=st.integers(0, 20), are_cut=st.booleans())
def test_chances_are_between_0_and_1_and_fall(rights: list[int], match_len: int, are_cut: bool) -> None:
    outcomes = AcceptanceStats(are_cut=are_cut)
    sequence = Sequence.start(Request(0, (1,), 999))
    for num_right in rights:
        start = len(sequence.tokens)
        outcomes.remember(sequence, [7] * 5, match_len)
        sequence.tokens += [7] * num_right + [8] * (6 - num_right)
        outcomes.learn(sequence)
        assert len(sequence.tokens) == start + 6
    found = outcomes.survivals(sequence, match_len, 8)
    assert len(found) == 8 and all(0 <= after <= before for before, after in zip([1.0, *found], found, strict=False))


SHARES = (st.sampled_from([0, 16, 32, 64]) | st.integers(0, 64)).map(lambda number: number / 64)
"""Sums of them are exact, and some are those of prices, so that several lengths are equally good."""


@given(
    survivals=st.lists(st.lists(SHARES, max_size=4).map(lambda row: sorted(row, reverse=True)), max_size=3),
    prices=st.lists(st.sampled_from([0.0, 0.25, 0.5]), min_size=13, max_size=13),
)
def test_allocation_is_the_best_of_all_and_of_equals_the_shortest(
    survivals: list[list[float]], prices: list[float]
) -> None:
    import itertools

    costs = list(itertools.accumulate(prices))
    lengths = allocate(survivals, costs)

    def value(chosen: Any) -> float:
        return sum(sum(row[:n]) for row, n in zip(survivals, chosen, strict=True)) - costs[sum(chosen)]

    every = list(itertools.product(*(range(len(row) + 1) for row in survivals)))
    best = max(map(value, every))
    assert value(lengths) == best
    assert sum(lengths) == min(sum(one) for one in every if value(one) == best)


@given(num_tokens=st.integers(0, 9), at_once=st.booleans())
def test_model_that_drafts_all_at_once_is_paid_once(num_tokens: int, at_once: bool) -> None:
    prices = _Prices(
        2, 64, 8, lambda batch, context, draft_len: 1 + draft_len, lambda batch, context: 0.3, at_once=at_once
    )
    assert prices.drafting_s(num_tokens) == pytest.approx(0.3 * (bool(num_tokens) if at_once else num_tokens))


@given(num_right=st.integers(0, 6), num_drafted=st.integers(1, 6), num_known=st.integers(0, 8))
def test_confidence_is_learned_of_tokens_that_were_reached(num_right: int, num_drafted: int, num_known: int) -> None:
    """Each token of a class of its own, and all known tokens but the first `num_right` are others.

    The model was asked for one more, which ended the draft: nothing is known of that class.
    """
    num_right = min(num_right, num_drafted)
    stop = ConfidenceStop(lambda batch, context, draft_len: 1.0, lambda batch, context: 0.1)
    sequence = Sequence.start(Request(0, (1,), 99))
    drafted = list(range(100, 100 + num_drafted))
    state = DraftState(sequence, 9, use_logits=False, tokens=drafted, confidence_classes=[*range(num_drafted), 15])
    stop.end([sequence], [state], num_drafted)
    sequence.tokens += [*drafted[:num_right], *[0] * 9][:num_known]
    stop._learn(sequence)
    reached = min(num_right + 1, num_drafted, num_known)
    assert not stop._seen[15]
    assert [bool(seen) for seen in stop._seen[:num_drafted]] == [i < reached for i in range(num_drafted)]
    assert [bool(right) for right in stop._right[:num_drafted]] == [
        i < min(num_right, num_known) for i in range(num_drafted)
    ]


@given(joins=st.lists(st.booleans(), min_size=1, max_size=12))
def test_step_with_a_new_prompt_is_no_measurement(joins: list[bool]) -> None:
    """Steps take what they should, and those with a new request three times as long: the factor does not notice."""
    now = 0.0
    meter, alone = Meter(lambda: now), Meter(lambda: now)
    sequences = [Sequence.start(Request(0, (1,), 99))]
    for number, is_new in enumerate(joins):
        price_s = 1.2 + 0.3 * (number % 3)
        for one in (meter, alone):
            one.sent(sequences, 1.0, price_s)
        now += 3 * price_s if is_new else price_s
        if is_new:
            sequences = [*sequences, Sequence.start(Request(len(sequences), (1,), 99))]
        meter.see(sequences)
        if not is_new:
            alone.see(sequences)
    assert meter.factor == alone.factor


@given(prediction=st.lists(st.integers(0, 3), min_size=1, max_size=20), output=st.lists(st.integers(0, 3), max_size=12))
def test_only_a_prediction_of_the_whole_output_counts_as_predicted(prediction: list[int], output: list[int]) -> None:
    predicted, copied = PredictionLookup(prediction), CopiedTexts()
    copied.add(0, prediction)
    sequence = Sequence.start(Request(0, (9,), 99))
    for token in [None, *output]:
        sequence.tokens += [] if token is None else [token]
        (draft,) = predicted.propose([sequence], 4)
        assert draft.num_predicted == len(draft.tokens)
        (draft,) = copied.propose([sequence], 4)
        assert draft.num_predicted == 0


# --- models ---


@pytest.mark.parametrize("seed", range(4))
def test_draft_is_what_the_draft_model_says_of_the_sequences_own_tokens(seed: int) -> None:
    """Its engine looks after every step whether its keys are of these tokens, however many of a draft were rejected."""
    draw = random.Random(seed)
    drafter = DraftModel(engine_of(DRAFT, 0, draw.choice([60, 400])), VOCAB_SIZE, use_logits=False)
    sequences = [Sequence.start(Request(i, tuple(draw.choices(range(12), k=5 + i)), 40)) for i in range(2)]
    for sequence in sequences:
        sequence.num_computed = len(sequence.tokens) - 1
    for _ in range(8):
        asked = draw.randrange(1, 6)
        for sequence, draft in zip(sequences, drafter.propose(sequences, asked), strict=True):
            text = Request(9, tuple(sequence.tokens), max(len(draft.tokens), 1))
            assert draft.tokens == one_by_one(DRAFT, text)[: len(draft.tokens)] and len(draft.tokens) <= asked
            num_accepted = draw.randrange(len(draft.tokens) + 1)
            sequence.num_computed = len(sequence.tokens) + num_accepted
            sequence.commit(draft, VerifyResult(num_accepted, draw.randrange(12)))
    for sequence in sequences:
        drafter.forget(sequence.request.id)
    drafter.engine.check_books()  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_suggestions_change_no_draft_and_leave_room_for_it(seed: int, temperature: float) -> None:
    """A copy drafts in a cache that has no slot more than the draft needs."""
    draw = random.Random(seed)
    max_draft_len = draw.randrange(1, 5)
    prompt = tuple(draw.choices(range(12), k=draw.randrange(2, 9)))
    asked_for: list[int] = []
    drafts = []
    for suggests in (False, True):
        engine = engine_of(TARGET, max_draft_len, max_tokens=len(prompt) + max_draft_len + 8)
        drafter = SelfDraftModel(engine, use_logits=False)
        request = Request(0, prompt, max_draft_len + 1, sampling=SamplingConfig(temperature=temperature, top_k=0))
        sequence = Sequence.start(request)
        assert engine.admit(sequence)
        sequence.num_computed = 0
        engine.compute_context(sequence, len(prompt) - 1)
        if suggests:
            right = one_by_one(TARGET, request)

            def suggest(of: Sequence, drafted: list[int], right: list[int] = right) -> list[int]:
                return [*right[len(drafted) : len(drafted) + 3], *draw.choices(range(12), k=5)]

            drafter.ask(suggest)
        step = engine.step

        def watched(rows: Any, call: Any = step, length: int = len(prompt), **by: bool) -> Any:
            asked_for.extend(row.start + len(row.tokens) - length for row in rows)
            return call(rows, **by)

        engine.step = watched  # type: ignore[method-assign]
        (draft,) = drafter.propose([sequence], max_draft_len)
        assert len(draft.tokens) <= max_draft_len
        drafts.append(draft.tokens)
        engine.release(sequence)
    assert drafts[0] == drafts[1]
    assert max(asked_for) < max_draft_len, "tokens were computed that no draft has room for"


# --- chains ---


class Knows:
    """A drafter that knows requests until it is told to forget, and drafts as is said."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [Draft(self.tokens[:max_draft_len], match_len=len(self.tokens)) for _ in sequences]

    def forget(self, request_id: int) -> None: ...


@given(all_tokens=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=4))
@pytest.mark.parametrize("kind", [FirstOf, LongestMatch, "best"])
def test_everybody_who_was_asked_is_told_to_forget(kind: Any, all_tokens: list[list[int]]) -> None:
    members = [Recorder(Knows(tokens)) for tokens in all_tokens]
    if kind == "best":
        chain: Any = BestOf(members, [], lambda batch, context, draft_len: 1 + 0.1 * draft_len, VOCAB_SIZE)
    else:
        chain = kind(members)
    sequences = [Sequence.start(Request(i, (1, 2), 9)) for i in range(3)]
    chain.propose(sequences, 4)
    for sequence in sequences:
        chain.forget(sequence.request.id)
    assert not any(member.remembered for member in members)


def test_draft_that_begins_elsewhere_is_drawn_by_other_numbers() -> None:
    """A flat distribution: a token that was rejected at a position would else be drafted there again."""
    num_same = 0
    for seed in range(100):
        drawn = []
        for start in (4, 5):
            params = SamplingConfig(top_k=0, random_seed=seed)
            sequence = Sequence.start(Request(0, (1, 2), 9, sampling=params))
            sequence.tokens += [3] * (start - 2)
            state = DraftState(sequence, 9, use_logits=True)
            while len(sequence.tokens) < 7:
                state.draft_token(torch.zeros(VOCAB_SIZE))
            drawn.append(sequence.tokens[6])
        num_same += drawn[0] == drawn[1]
    assert num_same < 30  # one in twelve by chance
