"""Lookups and a model that drafts for itself: what is worth more is sent, and lookups save the model steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import LOOPS, Recorded, run
from tiny import VOCAB_SIZE, hf_greedy, make_model, repetitive_prompt
from transformers import PreTrainedModel

from runtime.checkpoint.config import SelfDraft
from runtime.core.params import SamplingConfig
from runtime.core.request import Draft, Request, Sequence
from runtime.drafters.adaptive import AdaptiveDrafter
from runtime.drafters.chain import BestOf, DraftingModel, FirstOf
from runtime.drafters.confidence_stop import ConfidenceStop
from runtime.drafters.draft_target import SelfDraftModel
from runtime.drafters.opened import BoundedDrafter
from runtime.drafters.protocol import Drafter
from runtime.engine.engine import Engine

NUM_NEW_TOKENS, DRAFT_LEN = 24, 6
PROMPTS = [tuple(repetitive_prompt(i, 6 + 5 * i)) for i in range(5)]
SAMPLED = SamplingConfig(temperature=0.7, top_k=0, top_p=0.95, random_seed=5)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("llama")


@pytest.fixture(scope="module")
def engine_dir(model: PreTrainedModel, make_engine_dir: Any) -> Path:
    directory: Path = make_engine_dir(model, self_draft=SelfDraft("int8"), compiler="aot")
    return directory


@pytest.fixture
def engine(engine_dir: Path) -> Iterator[Engine]:
    with Engine.open(engine_dir) as opened:
        yield opened


class Guesser:
    """Proposes what a text says comes next, and after `num_right` tokens something else."""

    def __init__(self, texts: dict[int, list[int]], num_right: int, match_len: int) -> None:
        self.texts, self.num_right, self.match_len = texts, num_right, match_len

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        drafts = []
        for sequence in sequences:
            tokens = self.texts[sequence.request.id][sequence.num_generated :][
                : min(max_draft_len, sequence.max_draft_len)
            ]
            wrong = [(token + 1) % 32 for token in tokens[self.num_right :]]
            drafts.append(Draft([*tokens[: self.num_right], *wrong], match_len=self.match_len))
        return drafts

    def forget(self, request_id: int) -> None:
        """Nothing is kept."""


def choosing(lookup: Drafter, drafter: SelfDraftModel, own_s: float, counted: Drafter | None = None) -> BestOf:
    """Choose between a lookup and the copy: a step of the target takes a second, and one of the copy's `own_s`."""
    model = DraftingModel(counted or drafter, DRAFT_LEN, lambda batch, context: own_s, drafter)
    return BestOf([lookup], [model], lambda batch, context, draft_len: 1 + 0.05 * draft_len, VOCAB_SIZE)


def make_requests(sampling: SamplingConfig = SamplingConfig()) -> list[Request]:  # noqa: B008  # frozen
    return [Request(i, prompt, NUM_NEW_TOKENS, sampling=sampling) for i, prompt in enumerate(PROMPTS)]


def answer(engine: Engine, loop: str, requests: list[Request], drafter: Drafter | None) -> list[Sequence]:
    return run(engine, loop, requests, drafter, DRAFT_LEN)


def texts_of(model: PreTrainedModel) -> dict[int, list[int]]:
    return {i: hf_greedy(model, list(prompt), NUM_NEW_TOKENS) for i, prompt in enumerate(PROMPTS)}


@pytest.fixture
def count_copy(engine: Engine) -> list[int]:
    """Tokens in each call of the copy's step."""
    sizes: list[int] = []
    copy_step: Any = engine._copy_step

    def counted(input_ids: torch.Tensor, *others: Any) -> torch.Tensor:
        sizes.append(input_ids.shape[1])
        logits: torch.Tensor = copy_step(input_ids, *others)
        return logits

    engine._copy_step = counted
    return sizes


@pytest.mark.parametrize(("num_right", "use_logits"), [(0, False), (2, True), (6, False)])
def test_suggestions_change_no_draft_and_save_steps(
    num_right: int, use_logits: bool, engine: Engine, model: PreTrainedModel, count_copy: list[int]
) -> None:
    """A suggestion's right tokens are computed by the copy in one step; its draft is what it is without."""
    drafter = SelfDraftModel(engine, use_logits=use_logits)
    (sequence,) = [Sequence.start(make_requests(SAMPLED if use_logits else SamplingConfig())[2])]
    sequence.tokens.append(7)  # its output has begun
    assert engine.admit(sequence)
    engine.compute_context(sequence, len(sequence.tokens) - 1)
    (plain,) = drafter.propose([sequence], DRAFT_LEN)
    assert count_copy == [1] * len(plain.tokens) and len(plain.tokens) == DRAFT_LEN
    count_copy.clear()
    wrong = [(token + 1) % 32 for token in plain.tokens[num_right:]]
    drafter.ask(lambda sequence, drafted: [] if drafted else [*plain.tokens[:num_right], *wrong])
    (helped,) = drafter.propose([sequence], DRAFT_LEN)
    assert helped.tokens == plain.tokens
    if use_logits:
        torch.testing.assert_close(helped.probs, plain.probs, rtol=1e-4, atol=1e-6)
    assert count_copy == [DRAFT_LEN, *[1] * (DRAFT_LEN - min(num_right + 1, DRAFT_LEN))]
    engine.release(sequence)


def test_the_copy_asks_again_before_each_of_its_steps(engine: Engine, count_copy: list[int]) -> None:
    """Suggestions go wrong after two tokens, and are right again from where the copy then is."""
    drafter = SelfDraftModel(engine, use_logits=False)
    (sequence,) = [Sequence.start(make_requests()[2])]
    assert engine.admit(sequence)
    engine.compute_context(sequence, len(sequence.tokens) - 1)
    (plain,) = drafter.propose([sequence], DRAFT_LEN)
    assert drafter.steps_per_token == 1
    count_copy.clear()
    asked: list[int] = []

    def suggest(of: Sequence, drafted: list[int]) -> list[int]:
        assert of is sequence and drafted == plain.tokens[: len(drafted)]
        asked.append(len(drafted))
        return [*plain.tokens[len(drafted) :][:2], -1 % VOCAB_SIZE] if len(drafted) < 4 else []

    drafter.ask(suggest)
    (helped,) = drafter.propose([sequence], DRAFT_LEN)
    assert helped.tokens == plain.tokens
    assert asked == [0, 3] and count_copy == [4, 3]
    assert drafter.steps_per_token == pytest.approx((DRAFT_LEN * 0.98 + 2) / (DRAFT_LEN * 0.98 + DRAFT_LEN))
    engine.release(sequence)


class OnlyAhead(Guesser):
    """Knows what comes after the first token of a draft."""

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [Draft([]) for _ in sequences]

    def look_ahead(self, sequence: Sequence, drafted: list[int], max_draft_len: int) -> Draft:
        tokens = self.texts[sequence.request.id][sequence.num_generated :]
        is_right = tokens[: len(drafted)] == drafted
        return Draft(tokens[len(drafted) :][:max_draft_len] if is_right else [], match_len=self.match_len)


@pytest.mark.parametrize("loop", LOOPS)
def test_lookups_in_the_midst_of_a_draft_save_the_copy_steps(
    loop: str, engine: Engine, model: PreTrainedModel, count_copy: list[int]
) -> None:
    """Through whatever a lookup is wrapped in. The copy is free, so that it is always asked."""
    texts, counts = texts_of(model), []
    for known in (texts, {i: [] for i in texts}):
        short = BoundedDrafter(OnlyAhead(known, 9, match_len=16), DRAFT_LEN)
        lookup = AdaptiveDrafter(FirstOf([short]), lambda batch, context, draft_len: 1.0)
        engine.clear_cache()
        count_copy.clear()
        sequences = answer(
            engine, loop, make_requests(), choosing(lookup, SelfDraftModel(engine, use_logits=False), 0.0)
        )
        assert {s.request.id: s.output_tokens for s in sequences} == texts
        counts.append(len(count_copy))
    assert counts[0] < 0.7 * counts[1]


def test_a_lookup_that_is_always_right_is_sent_as_it_is(engine: Engine, model: PreTrainedModel) -> None:
    """However short its match: after a few times it is known what such matches are worth."""
    drafter = SelfDraftModel(engine, use_logits=False)
    counted = Recorded(drafter)
    chain = choosing(Guesser(texts_of(model), 9, match_len=1), drafter, 0.2, counted)
    sequences = answer(engine, "orchestrator", make_requests(), chain)
    assert sum(s.stats.num_accepted_draft_tokens for s in sequences) > 80
    assert len(counted.proposals) <= 6


@pytest.mark.parametrize(("match_len", "most"), [(1, 1), (20, 6)])
def test_a_lookup_that_is_always_wrong_is_soon_left_to_the_copy(
    match_len: int, most: int, engine: Engine, model: PreTrainedModel
) -> None:
    """A long match is trusted at first, and a short one is not."""
    drafter = SelfDraftModel(engine, use_logits=False)
    chain = choosing(Guesser(texts_of(model), 0, match_len), drafter, 0.05)
    sequences = answer(engine, "orchestrator", make_requests()[4:], chain)
    assert {s.request.id: s.output_tokens for s in sequences} == {4: texts_of(model)[4]}
    # Steps in which nothing was right: the first, for which the copy is not asked, and those of the lookup.
    histogram = sequences[0].stats.num_spec_steps, sequences[0].stats.num_accepted_draft_tokens
    assert histogram[0] <= 24 // 5 + most + 2 and histogram[1] >= 12


@pytest.mark.parametrize(("token_s", "num_right", "sent"), [(0.0, 9, 6), (0.0, 3, 6), (9.0, 9, 2), (0.3, 3, 3)])
def test_lookups_go_on_behind_a_models_draft_as_far_as_that_pays(token_s: float, num_right: int, sent: int) -> None:
    """Two of six tokens are the model's; of what was looked up three are right, or all."""
    text = [7 + i % 20 for i in range(99)]
    model = DraftingModel(Guesser({0: text}, 9, match_len=0), 2, lambda batch, context: 0.0)
    looked_up = text if num_right == 9 else [token if i % 4 < num_right else 1 for i, token in enumerate(text)]
    lookup = OnlyAhead({0: looked_up}, 9, match_len=2)
    chain = BestOf([lookup], [model], lambda batch, context, draft_len: 1 + token_s * draft_len, VOCAB_SIZE)
    sequence = Sequence.start(Request(0, (5, 6), 99))
    for start in range(0, 80, 4):
        sequence.tokens[2:] = text[:start]
        (draft,) = chain.propose([sequence], 6)
    assert len(draft.tokens) == sent
    assert draft.tokens == [*text[76:78], *looked_up[78 : 76 + sent]]


def test_what_was_drawn_is_sent_whatever_it_is_worth() -> None:
    """Lengths may depend on a draft's tokens, and to weigh that would change what is generated."""

    class Drawing(Guesser):
        def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
            return [Draft([7], torch.eye(VOCAB_SIZE)[[7]]) for _ in sequences]

    sequence = Sequence.start(Request(0, (5, 6), 9))
    sure = Guesser({0: [1, 1, 1, 1]}, 9, match_len=16)
    free = DraftingModel(Guesser({0: [2, 2, 2, 2]}, 9, match_len=0), DRAFT_LEN, lambda batch, context: 0.0)
    chain = BestOf([sure, Drawing({}, 0, 0)], [free], lambda batch, context, draft_len: 1.0, VOCAB_SIZE)
    assert [draft.tokens for draft in chain.propose([sequence], 4)] == [[7]]


def test_the_better_of_two_models_is_asked(engine: Engine, model: PreTrainedModel) -> None:
    """The first drafts what is wrong, the second as the target: a few drafts tell. Nobody asks the other then."""
    texts = texts_of(model)
    counted = [Recorded(Guesser(texts, num_right, match_len=0)) for num_right in (0, 9)]
    models = [DraftingModel(one, DRAFT_LEN, lambda batch, context: 0.05) for one in counted]
    chain = BestOf([], models, lambda batch, context, draft_len: 1.0, VOCAB_SIZE)
    sequences = answer(engine, "orchestrator", make_requests(), chain)
    assert {s.request.id: s.output_tokens for s in sequences} == texts
    assert len(counted[0].proposals) <= 5 < len(counted[1].proposals)


def test_a_dear_model_is_asked_only_where_nothing_was_found() -> None:
    asked = Recorded(Guesser({0: [2], 1: [2]}, 9, match_len=0))
    dear = DraftingModel(asked, DRAFT_LEN, lambda batch, context: 9.0)
    found = Guesser({0: [1, 1], 1: []}, 9, match_len=2)
    chain = BestOf([found], [dear], lambda batch, context, draft_len: 1.0, VOCAB_SIZE)
    sequences = [Sequence.start(Request(i, (5, 6), 9)) for i in range(2)]
    assert [draft.tokens for draft in chain.propose(sequences, 4)] == [[1, 1], [2]]
    assert len(asked.proposals) == 1


@pytest.mark.parametrize(("token_s", "draft_s"), [(0.0, 0.0), (0.05, 0.3), (1.0, 1.0)])
def test_drafts_end_where_the_copy_is_not_sure_enough(
    token_s: float, draft_s: float, engine: Engine, model: PreTrainedModel
) -> None:
    """The dearer a token, the sooner; where tokens cost nothing, drafts have their full length."""
    confidence_stop = ConfidenceStop(lambda b, c, n: 1 + token_s * n * b, lambda b, c: draft_s)
    drafter = SelfDraftModel(engine, use_logits=False, confidence_stop=confidence_stop)
    sequences = answer(engine, "orchestrator", make_requests(), drafter)
    assert {s.request.id: s.output_tokens for s in sequences} == texts_of(model)
    drafted = sum(s.stats.num_draft_tokens for s in sequences)
    spec_steps = sum(s.stats.num_spec_steps for s in sequences)
    if draft_s == 0:
        engine.clear_cache()
        plain = answer(engine, "orchestrator", make_requests(), SelfDraftModel(engine, use_logits=False))
        assert drafted == sum(s.stats.num_draft_tokens for s in plain)
    elif draft_s == 0.3:
        assert 1 < drafted / spec_steps < DRAFT_LEN - 1
    else:
        assert drafted < 0.3 * NUM_NEW_TOKENS * len(PROMPTS)
