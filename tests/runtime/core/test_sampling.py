"""A request's distribution is Hugging Face's; its draws depend on its seed and the position, not on how it is run."""

import copy
import functools
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentences import Said
from strength import draws, examples
from tiny import VOCAB_SIZE, eager_logits, make_model, repetitive_prompt
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from runtime.core.params import SamplingConfig
from runtime.core.request import Request, Sequence
from runtime.core.sampling import Positions, Sampler, choose_all, draw
from runtime.drafters.draft_target import DraftModel
from runtime.drafters.ngram import NgramLookup
from runtime.drafters.protocol import Drafter
from runtime.engine.engine import Engine, KVCacheConfig
from runtime.loop.lossless.chi_squared import p_value_of
from runtime.loop.orchestrator import generate
from runtime.util.errors import SpecDecError, UsageError

NUM_NEW_TOKENS = 24
PROMPTS = [tuple(repetitive_prompt(i, 6 + 5 * i)) for i in range(3)]


@functools.cache
def processed_by_hf(
    model: PreTrainedModel, prompt: tuple[int, ...], params: SamplingConfig, num_tokens: int
) -> tuple[list[int], Tensor, Tensor]:
    """Tokens of `generate` and, per step, its logits and what it made of them, (num_tokens, vocab) each.

    It has no occurrence penalty; one that counts by brute force is given to it.
    """
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=not params.is_greedy,
        temperature=params.temperature or 1.0,
        top_k=params.top_k,
        top_p=params.top_p or 1.0,
        min_p=params.min_p or None,
        repetition_penalty=params.repetition_penalty,
        no_repeat_ngram_size=params.no_repeat_ngram_size,
        bad_words_ids=[list(word) for word in params.bad_words] or None,
        logits_processor=LogitsProcessorList([CountedPenalty(params.presence_penalty, params.frequency_penalty)]),
        eos_token_id=-1,
        pad_token_id=0,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = output.sequences[0, len(prompt) :].tolist()
    return tokens, torch.cat(output.logits), torch.cat(output.scores)


class CountedPenalty(LogitsProcessor):
    """The occurrence penalty as its definition reads, token by token."""

    def __init__(self, presence: float, frequency: float) -> None:
        self.presence, self.frequency = presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = []
        for tokens, row in zip(input_ids.tolist(), scores.tolist(), strict=True):
            counts = Counter(tokens)
            rows.append(
                [
                    score - self.presence * (counts[token] > 0) - self.frequency * counts[token]
                    for token, score in enumerate(row)
                ]
            )
        return torch.tensor(rows, dtype=scores.dtype)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_model("llama", num_hidden_layers=1)


# -- The distribution --

# Each by itself is compared with transformers' in `test_sampling_kernels.py` and `test_sampling_promises.py`.
LAWS = [
    {"top_k": 0, "repetition_penalty": 0.6, "presence_penalty": 1.5, "frequency_penalty": -0.4},
    {"top_k": 9, "temperature": 1.6, "top_p": 0.9, "min_p": 0.02},
    {
        "top_k": 12,
        "temperature": 0.8,
        "top_p": 0.8,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "bad_words": ((6,), (3, 9)),
    },
]


@pytest.mark.parametrize("sampling", LAWS, ids=str)
def test_distribution_is_hugging_faces(sampling: dict[str, Any], target: PreTrainedModel) -> None:
    """Probabilities for the same prefix and logits, step by step; nothing of the sampler is used to make them."""
    params = SamplingConfig(**sampling)
    for seed, prompt in enumerate(PROMPTS):
        torch.manual_seed(seed)
        tokens, logits, scores = processed_by_hf(target, prompt, params, 12)
        sampler = Sampler(params, prompt)
        for i in range(12):
            probs = sampler.probs([*prompt, *tokens[:i]], logits[i])
            assert probs.dtype == torch.float64
            torch.testing.assert_close(probs, torch.softmax(scores[i].double(), dim=-1), rtol=1e-6, atol=1e-9)
            assert probs[tokens[i]] > 0


@pytest.mark.parametrize("greedy", [{"top_k": 1}, {"temperature": 0.0, "top_k": 0}])
@pytest.mark.parametrize("penalty", [{}, {"repetition_penalty": 1.5}, {"frequency_penalty": 0.5}], ids=str)
def test_distribution_of_a_greedy_request_is_its_argmax(
    greedy: dict[str, Any], penalty: dict[str, Any], target: PreTrainedModel
) -> None:
    params = SamplingConfig(top_p=0.9, random_seed=4, **greedy, **penalty)
    tokens, logits, scores = processed_by_hf(target, PROMPTS[1], params, 12)
    assert tokens == scores.argmax(dim=-1).tolist()
    sampler = Sampler(params, PROMPTS[1])
    for i in range(12):
        prefix = [*PROMPTS[1], *tokens[:i]]
        assert sampler.choose(prefix, logits[i]) == tokens[i]
        assert torch.equal(sampler.probs(prefix, logits[i]), torch.eye(VOCAB_SIZE, dtype=torch.float64)[tokens[i]])
    (chosen,) = choose_all([Positions(sampler, list(PROMPTS[1]), tokens[:-1], logits)])
    assert list(chosen) == tokens


# -- The draws --


@given(
    weights=st.lists(st.integers(0, 64), min_size=1, max_size=12).filter(any),
    numerator=st.integers(0, 1023),
)
@settings(max_examples=examples(500), deadline=None, derandomize=True)
def test_draw_is_the_inverse_of_the_cumulated_weights(weights: list[int], numerator: int) -> None:
    """Integers, so that brute force and floats agree to the last bit: on a border the next token is drawn."""
    repeated = [token for token, weight in enumerate(weights) for _ in range(weight)]
    expected = repeated[numerator * len(repeated) // 1024]
    assert draw(torch.tensor(weights, dtype=torch.float64), numerator / 1024) == expected
    assert draw(torch.tensor(weights, dtype=torch.float64) / 64, numerator / 1024) == expected


@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-200, 1e100)), min_size=1, max_size=12).filter(any),
    uniform=st.sampled_from([0.0, 2.0**-52, 0.5, 1 - 2.0**-52]),
)
@settings(max_examples=examples(500), deadline=None, derandomize=True)
def test_token_without_weight_is_never_drawn(weights: list[float], uniform: float) -> None:
    """Nor one beyond the last, with the largest number that `uniform` gives."""
    token = draw(torch.tensor(weights, dtype=torch.float64), uniform)
    assert weights[token] > 0


@pytest.mark.parametrize("weights", [[0.0, 0.0], [math.nan, 1.0], [1.0, math.inf]])
def test_nothing_to_draw_from_is_an_error(weights: list[float], said: Said) -> None:
    with pytest.raises(SpecDecError) as raised:
        draw(torch.tensor(weights, dtype=torch.float64), 0.5)
    said(raised)


def uniform_pairs(what: str) -> Iterator[tuple[float, float]]:
    """Numbers that one request, or requests that differ by one thing, take side by side."""
    for seed in range(draws(100, 25)):
        sampler = Sampler(SamplingConfig(random_seed=seed), (5, 6))
        other = {
            "seed": Sampler(SamplingConfig(random_seed=seed + 1000), (5, 6)),
            "return_index": Sampler(SamplingConfig(random_seed=seed), (5, 6), 1),
            "prompt": Sampler(SamplingConfig(random_seed=seed), (5, 7)),
        }.get(what, sampler)
        for position in range(2, 202):
            if what == "position":
                yield sampler.uniform(2 * position, "target"), sampler.uniform(2 * position + 1, "target")
            elif what == "purpose":
                yield sampler.uniform(position, "draft"), sampler.uniform(position, "accept")
            else:
                yield sampler.uniform(position, "target"), other.uniform(position, "target")


@pytest.mark.parametrize("what", ["position", "purpose", "seed", "return_index", "prompt"])
def test_numbers_are_uniform_and_independent(what: str) -> None:
    """20,000 pairs in 8 x 8 cells, or 5,000."""
    counts = torch.zeros(8, 8)
    for a, b in uniform_pairs(what):
        assert 0 <= a < 1 and 0 <= b < 1
        counts[int(8 * a), int(8 * b)] += 1
    expected = counts.sum() / 64
    assert p_value_of(float(((counts - expected) ** 2 / expected).sum()), 63) > 1e-3


# -- The same text however it is run --

SAMPLED = [
    {"top_k": 0},
    {"temperature": 0.7, "top_k": 8, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 0, "min_p": 0.05, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
]
DRAFTERS = ["none", "ngram", "draft model"]


@pytest.fixture(scope="module")
def engine_dirs(target: PreTrainedModel, make_engine_dir: Any) -> dict[str, Path]:
    """The target, and a draft model that resembles it: some of its drafts are accepted, and some are not."""
    similar = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in similar.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    compiled: dict[str, Any] = {"compiler": "aot"}  # hundreds of steps
    return {
        "target": make_engine_dir(target, **compiled),
        "similar": make_engine_dir(similar, max_draft_len=0, **compiled),
    }


def make_drafter(name: str, dirs: dict[str, Path]) -> Drafter | None:
    if name == "draft model":
        return DraftModel(Engine.open(dirs["similar"]), VOCAB_SIZE, use_logits=False)
    return NgramLookup(2) if name == "ngram" else None


def make_requests(sampling: dict[str, Any], random_seed: int = 3) -> list[Request]:
    params = SamplingConfig(**sampling, random_seed=random_seed)
    return [Request(i, prompt, NUM_NEW_TOKENS, sampling=params) for i, prompt in enumerate(PROMPTS)]


def finish(engine: Engine, requests: list[Request], drafter: Drafter | None, max_draft_len: int) -> list[Sequence]:
    """Generate; sequences come in the order of their ids."""
    finished = [s for s, _ in generate(engine, requests, drafter, max_draft_len) if s.finish_reason is not None]
    return sorted(finished, key=lambda sequence: sequence.request.id)


def texts(sequences: list[Sequence]) -> list[list[int]]:
    return [sequence.output_tokens for sequence in sequences]


@functools.cache
def reference_text(model: PreTrainedModel, prompt: tuple[int, ...], params: SamplingConfig) -> list[int]:
    """Token by token from Hugging Face's logits of the whole prefix: no engine, no cache, no batch, no draft."""
    tokens = list(prompt)
    sampler = Sampler(params, prompt)
    for _ in range(NUM_NEW_TOKENS):
        tokens.append(sampler.choose(tokens, eager_logits(model, tokens)[-1]))
    return tokens[len(prompt) :]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("sampling", SAMPLED, ids=str)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_same_seed_gives_the_same_text(
    drafter: str, sampling: dict[str, Any], engine_dirs: dict[str, Path], target: PreTrainedModel
) -> None:
    """Alone, together, in another order, in a small K/V pool, with drafts of any length."""
    requests = make_requests(sampling)
    expected = [reference_text(target, r.prompt_tokens, r.sampling) for r in requests]
    stats = []
    for max_draft_len in (1, 6):
        engine = Engine.open(engine_dirs["target"])
        sequences = finish(engine, requests, make_drafter(drafter, engine_dirs), max_draft_len)
        assert texts(sequences) == expected
        stats += [sequence.stats for sequence in sequences]
    reversed_ = finish(engine, requests[::-1], make_drafter(drafter, engine_dirs), 5)  # with K/V from the run before
    assert texts(reversed_) == expected
    alone = [finish(engine, [request], make_drafter(drafter, engine_dirs), 5)[0] for request in requests]
    assert texts(alone) == expected
    small = Engine.open(engine_dirs["target"], kv_cache=KVCacheConfig(max_tokens=48))  # the longest needs 39
    assert texts(finish(small, requests, make_drafter(drafter, engine_dirs), 5)) == expected
    num_accepted, num_drafted = (
        sum(getattr(s, name) for s in stats) for name in ("num_accepted_draft_tokens", "num_draft_tokens")
    )
    assert num_drafted == 0 if drafter == "none" else 0 < num_accepted < num_drafted


# -- Penalties in drafts --

PENALTIES = [
    {"repetition_penalty": 1.4},
    {"no_repeat_ngram_size": 3},
    {"frequency_penalty": 0.2},
    {"repetition_penalty": 1.1, "no_repeat_ngram_size": 4, "bad_words": ((6,), (11, 11))},
]


@pytest.mark.parametrize(
    ("drafter", "penalty"), [("ngram", PENALTIES[-1]), *(("draft model", one) for one in PENALTIES)], ids=str
)
def test_penalties_see_the_exact_prefix_of_every_draft_token(
    drafter: str, penalty: dict[str, Any], engine_dirs: dict[str, Path], target: PreTrainedModel
) -> None:
    requests = make_requests(penalty)
    expected = [processed_by_hf(target, r.prompt_tokens, r.sampling, NUM_NEW_TOKENS)[0] for r in requests]
    without = [processed_by_hf(target, r.prompt_tokens, SamplingConfig(), NUM_NEW_TOKENS)[0] for r in requests]
    assert expected != without
    sequences = finish(Engine.open(engine_dirs["target"]), requests, make_drafter(drafter, engine_dirs), 6)
    assert texts(sequences) == expected
    num_accepted = {n for sequence in sequences for n in sequence.stats.per_step_accepted}
    # Positions inside a draft did matter, those of rejected tokens too.
    assert num_accepted >= {"ngram": {0, 1}, "draft model": {0, 1, 2}}[drafter]


# -- What is refused --


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", -0.1), ("temperature", math.inf), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1)),
        *(("min_p", -0.1), ("min_p", 1.1), ("repetition_penalty", 0.0), ("repetition_penalty", math.inf)),
        *(("presence_penalty", -math.inf), ("frequency_penalty", math.inf), ("no_repeat_ngram_size", -1)),
        *((name, math.nan) for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")),
    ],
)
def test_value_out_of_range_is_wrong_usage(name: str, value: float) -> None:
    with pytest.raises(UsageError) as error:
        SamplingConfig(**{name: value})
    assert error.value.message.startswith(f"{name} must be ")
    assert error.value.message.endswith(f": {value}")
    assert error.value.hint


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"top_k": VOCAB_SIZE + 1}, "32; 33"),
        ({"bad_words": ((-1,),)}, "7; 32; -1"),
    ],
)
def test_what_the_vocabulary_does_not_have_is_an_error(
    sampling: dict[str, Any], message: str, engine_dirs: dict[str, Path], said: Said
) -> None:
    engine = Engine.open(engine_dirs["target"])
    engine.check_request(Request(7, (5, 6), 5, sampling=SamplingConfig(top_k=VOCAB_SIZE, bad_words=((31,), (0, 31)))))
    request = Request(7, (5, 6), 5, sampling=SamplingConfig(**sampling))
    with pytest.raises(SpecDecError) as raised:
        engine.check_request(request)
    said(raised, *message.split("; "))
    with pytest.raises(SpecDecError) as raised:
        next(generate(engine, [request], None, 0))
    said(raised, *message.split("; "))
    assert engine.step_time_s == 0
