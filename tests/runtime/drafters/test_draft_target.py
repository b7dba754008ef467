"""Drafts by a second engine change no token, and the draft model computes each of its tokens once.

Whatever the target makes of a draft: where the two part, the draft engine's cache falls back to the same place.
"""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import Recorded, check_idle, outputs, run
from sentences import Said
from tiny import VOCAB_SIZE, eager_logits, forward, hf_greedy, make_model, repetitive_prompt
from torch import Tensor
from transformers import PreTrainedModel

from runtime.core.batch import Row
from runtime.core.params import SamplingConfig
from runtime.core.request import Draft, Request, Sequence
from runtime.drafters.draft_target import DraftModel
from runtime.drafters.protocol import Drafter
from runtime.engine.engine import Engine, KVCacheConfig
from runtime.loop.orchestrator import generate
from runtime.util.errors import SpecDecError

# float32 against float32: the logits are of the order of 10, and sums are taken in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
NUM_NEW_TOKENS = 18
DRAFT_LEN = 5
PROMPTS = [
    tuple(repetitive_prompt(i, 6 + 5 * i, vocab_size=20)) for i in range(4)
]  # even the smallest model reads them
SMALLER, LARGER = 20, 40
GREEDY = SamplingConfig()
SAMPLED = SamplingConfig(temperature=0.9, top_k=0, top_p=0.95, random_seed=5)
PENALISED = SamplingConfig(top_k=10, repetition_penalty=1.3, no_repeat_ngram_size=3, frequency_penalty=0.1)
BY = pytest.mark.parametrize("use_logits", [False, True], ids=["by tokens", "by probabilities"])

OpenEngine = Callable[..., Engine]


def resembling(model: PreTrainedModel, noise: float) -> PreTrainedModel:
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return other


def with_vocabulary(model: PreTrainedModel, vocab_size: int) -> PreTrainedModel:
    """The same weights for the ids that both have, random ones for others."""
    other = copy.deepcopy(model)
    torch.manual_seed(0)
    other.resize_token_embeddings(vocab_size, mean_resizing=False)
    return other


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    target = make_model("llama", num_hidden_layers=1)
    other = resembling(target, 0.01)
    return {
        "target": target,
        "same": target,
        "other": other,
        "random": make_model("gemma3"),
        "smaller": with_vocabulary(other, SMALLER),
        "larger": with_vocabulary(other, LARGER),
    }


@pytest.fixture(scope="module")
def engine_dirs(models: dict[str, PreTrainedModel], make_engine_dir: Any) -> dict[str, Path]:
    """Blocks of 4. A draft engine is built for no drafts of its own, and for batches of 2 where "narrow"."""
    plain = {"max_draft_len": 0, "max_seq_len": 160, "speculative_decoding_mode": "none"}
    drafts = {name: make_engine_dir(model, **plain) for name, model in models.items() if name != "target"}
    return drafts | {
        "target": make_engine_dir(models["target"]),
        "narrow": make_engine_dir(models["other"], **plain, max_batch_size=2),
        "short": make_engine_dir(models["other"], **(plain | {"max_input_len": 12, "max_seq_len": 40})),
    }


@pytest.fixture
def open_engine(engine_dirs: dict[str, Path]) -> OpenEngine:
    return lambda name, **kv_cache: Engine.open(engine_dirs[name], kv_cache=KVCacheConfig(**kv_cache))


def make_requests(num_requests: int, sampling: SamplingConfig = GREEDY, **settings: Any) -> list[Request]:
    return [
        Request(i, prompt, **({"max_new_tokens": NUM_NEW_TOKENS} | settings), sampling=sampling)
        for i, prompt in enumerate(PROMPTS[:num_requests])
    ]


def finish(target: Engine, requests: list[Request], drafter: Drafter | None) -> list[Sequence]:
    """Generate; both engines end with nothing held."""
    finished = run(target, "orchestrator", requests, drafter, DRAFT_LEN)
    inner = drafter.drafter if isinstance(drafter, Recorded) else drafter
    if isinstance(inner, DraftModel):
        assert inner._draft_sequences == {}
        check_idle(inner.engine)
    return finished


def acceptance(sequences: list[Sequence]) -> tuple[int, int]:
    """(accepted, drafted)"""
    stats = [sequence.stats for sequence in sequences]
    return sum(s.num_accepted_draft_tokens for s in stats), sum(s.num_draft_tokens for s in stats)


# -- The tokens --


@pytest.mark.parametrize(("sampling", "use_logits"), [(SAMPLED, True), (PENALISED, False)])
def test_same_weights_accept_everything(sampling: SamplingConfig, use_logits: bool, open_engine: OpenEngine) -> None:
    """Both sides apply the request's settings to the same prefix, and where tokens count draw the same number."""
    drafter = DraftModel(open_engine("same"), VOCAB_SIZE, use_logits=use_logits)
    sequences = finish(open_engine("target"), make_requests(3, sampling), drafter)
    assert acceptance(sequences) == (45, 45)
    if not use_logits:
        assert outputs(sequences) == outputs(finish(open_engine("target"), make_requests(3, sampling), None))


# -- The draft engine's cache --


@dataclass
class Forward:
    """Question to an engine about one sequence: its tokens, how many were computed already, and the next logits."""

    request_id: int
    tokens: list[int]
    num_computed: int
    logits: Tensor


def record_forwards(engine: Engine) -> list[list[Forward]]:
    """Grows by one list, of the batch's sequences, with every forward of the engine."""
    forwards: list[list[Forward]] = []
    catch_up, step = engine.catch_up, engine.step
    asked: list[tuple[int, list[int], int]] = []

    def recorded_catch_up(sequence: Sequence) -> None:
        asked.append((sequence.request.id, list(sequence.tokens), sequence.num_computed))
        catch_up(sequence)

    def recorded_step(rows: list[Row]) -> Any:
        answers = step(rows)
        forwards.append([Forward(*one, logits[0]) for one, logits in zip(asked, answers, strict=True)])
        asked.clear()
        return answers

    engine.catch_up, engine.step = recorded_catch_up, recorded_step  # type: ignore[method-assign,assignment]
    return forwards


def check_forwards(engine: Engine, model: PreTrainedModel, forwards: list[Forward]) -> None:
    """The next logits equal Hugging Face's, and those of an engine that has seen nothing before."""
    for seen in forwards:
        fresh = Sequence.start(Request(0, tuple(seen.tokens), 1))
        assert engine.admit(fresh) and fresh.num_computed == 0
        (logits,) = forward(engine, [fresh], [[]])
        engine.release(fresh)
        torch.testing.assert_close(seen.logits, logits[0], **TOLERANCE)
        torch.testing.assert_close(seen.logits, eager_logits(model, seen.tokens)[-1], **TOLERANCE)


def check_computed_once(forwards: list[Forward]) -> None:
    """No K/V is computed that was known: K/V depend on the token and all before it."""
    computed = [
        (forward.request_id, *forward.tokens[: i + 1])
        for forward in forwards
        for i in range(forward.num_computed, len(forward.tokens))
    ]
    assert len(computed) == len(set(computed))


@pytest.mark.parametrize(("draft", "seed"), [("other", 0), ("random", 1)])
def test_rejected_draft_leaves_no_trace_in_the_draft_engine(
    draft: str, seed: int, open_engine: OpenEngine, models: dict[str, PreTrainedModel]
) -> None:
    """A target that accepts any number of tokens, up to the budget's end.

    In some steps little is drafted, or nothing, or the drafter is not asked: then the two part more than a token back.
    "random" has a sliding window of 8.
    """
    chance = random.Random(seed)
    drafter = DraftModel(open_engine(draft), VOCAB_SIZE, use_logits=False)
    rows, sequence = record_forwards(drafter.engine), Sequence.start(Request(0, PROMPTS[1], 30))
    num_undrafted, accepted = 0, set()
    while sequence.num_remaining > 0:
        num_forwards, max_draft_len = len(rows), chance.choice([4, 4, 4, 4, 1, 0, None])
        (proposal,) = [Draft([])] if max_draft_len is None else drafter.propose([sequence], max_draft_len)
        assert len(proposal.tokens) == len(rows) - num_forwards == min(max_draft_len or 0, sequence.num_remaining - 1)
        if not proposal.tokens:
            num_undrafted += 1
        else:
            ((first,), *others) = rows[num_forwards:]
            num_uncomputed = len(first.tokens) - first.num_computed
            assert first.tokens == sequence.tokens
            assert num_uncomputed <= (2 + num_undrafted if num_forwards else len(sequence.tokens))
            assert all(len(row.tokens) - row.num_computed == 1 for (row,) in others)
            num_undrafted = 0
        num_accepted = chance.randint(0, len(proposal.tokens))
        accepted.add((len(proposal.tokens), num_accepted))
        rejected = proposal.tokens[num_accepted : num_accepted + 1]
        next_token = chance.choice([token for token in range(3, VOCAB_SIZE) if token not in rejected])
        sequence.tokens += [*proposal.tokens[:num_accepted], next_token]
    forwards = [row for (row,) in rows]
    check_computed_once(forwards)
    check_forwards(open_engine(draft, block_reuse=False), models[draft], forwards)
    drafter.forget(0)
    check_idle(drafter.engine)
    assert len(accepted) > 5


@pytest.mark.parametrize(("sampling", "use_logits"), [(GREEDY, False), (SAMPLED, True)])
def test_draft_engine_computes_each_token_once(
    sampling: SamplingConfig, use_logits: bool, open_engine: OpenEngine, models: dict[str, PreTrainedModel]
) -> None:
    """The real loop asks, of three requests at once."""
    drafter = DraftModel(open_engine("other"), VOCAB_SIZE, use_logits=use_logits)
    rows = record_forwards(drafter.engine)
    sequences = finish(open_engine("target"), make_requests(3, sampling), drafter)
    assert 0 < acceptance(sequences)[0] < acceptance(sequences)[1]
    check_computed_once([row for batch in rows for row in batch])
    assert [row.tokens for row in rows[0]] == [list(prompt) for prompt in PROMPTS[:3]]
    assert max(len(row.tokens) - row.num_computed for batch in rows[1:] for row in batch) == 2
    check_forwards(
        open_engine("other", block_reuse=False), models["other"], [row for batch in rows[::5] for row in batch]
    )


# -- K/V pools that are too small --


def test_requests_that_wait_give_their_blocks(open_engine: OpenEngine, models: dict[str, PreTrainedModel]) -> None:
    """Two requests in turn, in a pool that holds one: both are drafted for, and nothing wrong is found again."""
    drafter = DraftModel(open_engine("same", max_tokens=36), VOCAB_SIZE, use_logits=False)
    sequences = [Sequence.start(request) for request in make_requests(4, max_new_tokens=16)[2:]]
    for _ in range(3):
        for sequence in sequences:
            (draft,) = drafter.propose([sequence], 4)
            assert draft.tokens == hf_greedy(models["same"], sequence.tokens, 4)
            sequence.tokens += [*draft.tokens[:2], draft.tokens[2] ^ 1]
            drafter.engine._blocks.check_integrity()
    for sequence in sequences:
        drafter.forget(sequence.request.id)
    check_idle(drafter.engine)


def test_batch_larger_than_the_draft_engines_is_drafted_in_parts(
    open_engine: OpenEngine, models: dict[str, PreTrainedModel]
) -> None:
    requests = make_requests(4)
    drafter = DraftModel(open_engine("narrow"), VOCAB_SIZE, use_logits=True)
    rows = record_forwards(drafter.engine)
    sequences = finish(open_engine("target"), requests, drafter)
    assert outputs(sequences) == [hf_greedy(models["target"], list(r.prompt_tokens), NUM_NEW_TOKENS) for r in requests]
    assert {len(batch) for batch in rows} >= {2} and max(len(batch) for batch in rows) == 2
    assert [sequence.stats.per_step_drafted[0] for sequence in sequences] == [DRAFT_LEN] * 4


# -- Vocabularies --


@pytest.mark.one_in(3)
@BY
@pytest.mark.parametrize("draft", ["smaller", "larger"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_draft_model_of_another_vocabulary_drafts_what_both_know(
    sampling: SamplingConfig, draft: str, use_logits: bool, open_engine: OpenEngine, models: dict[str, PreTrainedModel]
) -> None:
    """Once the target said a token that the draft model cannot read, it drafts nothing any more."""
    requests, vocab_size = make_requests(4, sampling), {"smaller": SMALLER, "larger": LARGER}[draft]
    drafter = Recorded(DraftModel(open_engine(draft), VOCAB_SIZE, use_logits=use_logits))
    rows = record_forwards(drafter.drafter.engine)
    sequences = finish(open_engine("target"), requests, drafter)
    if sampling.is_greedy or not use_logits:
        assert outputs(sequences) == outputs(finish(open_engine("target"), requests, None))
    if sampling == GREEDY:
        assert outputs(sequences) == [
            hf_greedy(models["target"], list(r.prompt_tokens), NUM_NEW_TOKENS) for r in requests
        ]
    assert 0 < acceptance(sequences)[0] < acceptance(sequences)[1]

    num_silent = 0
    for tokens, num_remaining, proposal in drafter.proposals:
        assert all(token < min(vocab_size, VOCAB_SIZE) for token in proposal.tokens)
        is_silent = num_remaining == 1 or max(tokens) >= vocab_size
        assert (proposal.tokens == []) == is_silent
        num_silent += is_silent and num_remaining > 1
        if use_logits and not sampling.is_greedy and not is_silent:
            assert proposal.probs is not None and proposal.probs.shape == (len(proposal.tokens), VOCAB_SIZE)
            assert not proposal.probs[:, vocab_size:].any()
            torch.testing.assert_close(proposal.probs.sum(dim=1), torch.ones(len(proposal.tokens)).double())
        else:
            assert proposal.probs is None
    if draft == "smaller":
        assert num_silent > 0
    else:  # the draft model did want to say what the target does not know
        assert any(int(row.logits.argmax()) >= VOCAB_SIZE for batch in rows for row in batch)


@pytest.mark.parametrize(("sampling", "use_logits"), [({"top_k": 1}, False), ({"top_k": 0}, True)])
def test_draft_model_with_no_token_left_drafts_no_further(
    sampling: dict[str, Any], use_logits: bool, open_engine: OpenEngine
) -> None:
    """All that a draft model of 20 tokens knows is banned; the target has 12 more to choose from."""
    banned = SamplingConfig(**sampling, bad_words=tuple((token,) for token in range(SMALLER)))
    requests = make_requests(2, banned)
    drafter = DraftModel(open_engine("smaller"), VOCAB_SIZE, use_logits=use_logits)
    sequences = finish(open_engine("target"), requests, drafter)
    assert outputs(sequences) == outputs(finish(open_engine("target"), requests, None))


# -- Where drafts end --


@BY
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_draft_ends_at_an_end_id(
    sampling: SamplingConfig, use_logits: bool, open_engine: OpenEngine, models: dict[str, PreTrainedModel]
) -> None:
    """Drawn from its distribution the end id belongs to the draft; chosen as the target will, it comes at no cost."""
    end_ids = frozenset(range(3, 8))
    is_drawn = use_logits and not sampling.is_greedy
    drafter = DraftModel(open_engine("other"), VOCAB_SIZE, use_logits=use_logits)
    num_ended = 0
    for i in range(12):
        prompt = tuple(repetitive_prompt(i, 6))
        (draft,) = drafter.propose([Sequence.start(Request(i, prompt, 20, end_ids, sampling=sampling))], 6)
        drafter.forget(i)
        positions = [position for position, token in enumerate(draft.tokens) if token in end_ids]
        is_ended = len(draft.tokens) < 6
        num_ended += is_ended
        if is_drawn:
            assert draft.probs is not None and len(draft.probs) == len(draft.tokens) > 0
            assert positions == ([len(draft.tokens) - 1] if is_ended else positions[:1])
        else:
            assert positions == []
        if is_ended and sampling.is_greedy:
            assert hf_greedy(models["other"], list(prompt), len(draft.tokens) + 1)[-1] in end_ids
    assert 2 < num_ended < 12


# -- What is refused --


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "message"),
    [
        ((5,) * 13, 5, "3; 12; 13"),
        ((5,) * 12, 29, "3; 40; 12 + 29"),
    ],
)
def test_request_the_draft_engine_cannot_follow_is_an_error_before_any_step(
    prompt: tuple[int, ...], max_new_tokens: int, message: str, open_engine: OpenEngine, said: Said
) -> None:
    target = open_engine("target")
    drafter = DraftModel(open_engine("short"), VOCAB_SIZE, use_logits=True)
    drafter.check_request(Request(3, (5,) * 12, 28))  # just fits
    request = Request(3, prompt, max_new_tokens)
    target.check_request(request)
    for check in (
        lambda: drafter.check_request(request),
        lambda: drafter.propose([Sequence.start(request)], 4),
        lambda: list(generate(target, [request], drafter, 4)),
    ):
        with pytest.raises(SpecDecError) as error:
            check()
        said(error, *message.split("; "))
        assert error.value.hint
    assert target.step_time_s == drafter.engine.step_time_s == 0
    check_idle(target)
    check_idle(drafter.engine)
