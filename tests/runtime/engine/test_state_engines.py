"""Engines of models whose layers have states: one text and the same bits, however it is computed."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from sentences import Said
from tiny import eager_logits, hf_greedy, make_model, repetitive_prompt
from transformers import PreTrainedModel

from runtime.checkpoint.bundle import read_engine_config
from runtime.checkpoint.config import BuildConfig, SelfDraft
from runtime.core.request import Request, Sequence
from runtime.core.states import num_rolled_back
from runtime.drafters.draft_target import DraftModel, SelfDraftModel
from runtime.drafters.ngram import NgramLookup
from runtime.engine.engine import Engine, KVCacheConfig
from runtime.loop import orchestrator, scheduler
from runtime.util.errors import RequestError, SpecDecError, UsageError
from scripts.campaigns.oracle import CheckedEngine, ExactModel, Failure, Interrupted, one_by_one

PROMPTS = [repetitive_prompt(seed, length) for seed, length in ((0, 90), (1, 34), (2, 5), (3, 60), (0, 80), (0, 70))]
NUM_NEW_TOKENS = 24
SLOW = (
    *("nemotron-h", "kimi-linear", "minimax", "mamba2", "mamba", "falcon-mamba", "jamba", "recurrent-gemma"),
    *("zamba2", "zamba"),
)
DRAFTERS: dict[str, Callable[[Engine], Any]] = {
    "plain": lambda engine: None,
    "ngram": lambda engine: NgramLookup(2),
    "self-draft": lambda engine: SelfDraftModel(engine, use_logits=False),
}


def slow(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="module", params=["lfm2", "qwen3.5", *slow(*SLOW)])
def of_each_kind(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_model(request.param)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("qwen3.5")


def answers(engine: Engine, loop: str, drafter: Any) -> list[Sequence]:
    generate = orchestrator.generate if loop == "orchestrator" else scheduler.generate
    requests = [Request(i, tuple(prompt), NUM_NEW_TOKENS, keep_logits=True) for i, prompt in enumerate(PROMPTS)]
    done = {s.request.id: s for s, _ in generate(engine, requests, drafter, 10 if drafter else None) if s.is_over}
    assert engine._states is not None
    engine._states.manager.check_integrity()
    return [done[i] for i in range(len(PROMPTS))]


@pytest.mark.parametrize(
    "of_each_kind",
    # `test_mtp.py` compiles a Qwen3.5, and compares its drafts and tokens.
    ["lfm2", *slow("qwen3.5", *SLOW)],
    indirect=True,
)
def test_bits_are_the_same_whatever_drafts_are_beside_and_fits(of_each_kind: PreTrainedModel, make_engine: Any) -> None:
    """Both loops are run, cold and found again, with room for all and with blocks for one and a half sequences."""
    expected = [hf_greedy(of_each_kind, prompt, NUM_NEW_TOKENS) for prompt in PROMPTS]
    logits: dict[int, torch.Tensor] = {}
    num_reused = num_accepted = 0
    for max_tokens in (None, 200):
        engine = make_engine(
            of_each_kind, KVCacheConfig(max_tokens=max_tokens), compiler="aot", self_draft=SelfDraft("int8")
        )
        assert engine.config.batch_invariant and engine.config.why_whole is None
        for loop in ("orchestrator", "leader"):
            for drafter in DRAFTERS.values():
                for sequence in answers(engine, loop, drafter(engine)):
                    number = sequence.request.id
                    assert sequence.output_tokens == expected[number]
                    made = torch.stack(sequence.logits)
                    assert torch.equal(made, logits.setdefault(number, made))
                    num_reused += sequence.stats.num_reused_tokens
                    num_accepted += sequence.stats.num_accepted_draft_tokens
    assert num_reused > 1000 and num_accepted > 300


def test_prompts_are_scored_as_by_transformers(of_each_kind: PreTrainedModel, make_engine: Any) -> None:
    """Scoring computes prompts that are found in the cache again; two answers to one prompt are beside each other."""
    engine = make_engine(of_each_kind)
    for _ in range(2):
        requests = [
            Request(2 * i + index, tuple(prompt), 2, num_prompt_logprobs=0, return_index=index)
            for i, prompt in enumerate(PROMPTS)
            for index in range(2)
        ]
        done = {s.request.id: s for s, _ in scheduler.generate(engine, requests, NgramLookup(2), 10) if s.is_over}
        for number, sequence in done.items():
            prompt = PROMPTS[number // 2]
            logprobs = eager_logits(of_each_kind, prompt)[:-1].log_softmax(-1)
            expected = [row[token].item() for row, token in zip(logprobs, prompt[1:], strict=True)]
            assert [one.logprob for one in sequence.prompt_logprobs] == pytest.approx(expected, abs=1e-3)
        assert len(done) == 2 * len(PROMPTS)


MODEL = ExactModel(1, 32, num_before=2, is_recurrent=True)
"""Its engine opens within a millisecond, and its slots are what the tokens say, or its logits are others."""


def exact_engine(interval: int = 8192, max_batch_size: int = 4, max_num_tokens: int = 512) -> CheckedEngine:
    build = BuildConfig("none", max_batch_size, 110, 160, 10, 4, "draft_tokens_external")
    return CheckedEngine(MODEL, build, KVCacheConfig(state_checkpoint_interval=interval), max_num_tokens)


def num_reused(engine: CheckedEngine, prompt: list[int], num_new_tokens: int = 2) -> int:
    """Number of tokens of the prompt that were found, of an answer that is the model's own."""
    request = Request(0, tuple(prompt), num_new_tokens)
    *_, (answer, _) = scheduler.generate(engine, [request])
    assert answer.output_tokens == one_by_one(MODEL, request)
    return answer.stats.num_reused_tokens


def test_a_state_that_is_asked_for_again_and_again_stays() -> None:
    """Beside others that nobody asks for again: the state that was used longest ago goes first. The prompts differ in
    their last 35 tokens, more than a kept state can go back by.
    """
    engine, shared, reused = exact_engine(max_batch_size=1), repetitive_prompt(6, 61), []
    for own in range(3, 12):
        reused.append(num_reused(engine, [*shared, *repetitive_prompt(own, 35)]))
        num_reused(engine, repetitive_prompt(100 + own, 40))
    assert min(reused[3:]) == len(shared)


def test_a_common_beginning_is_computed_twice_and_then_found() -> None:
    """A state is kept for others once a second request begins so; the first's slot has gone too far by then."""
    engine, shared = exact_engine(max_num_tokens=7), repetitive_prompt(6, 61)
    reused = [num_reused(engine, [*shared, *own], 40) for own in ([4, 5, 6], [7, 8], [9, 10, 11], [12])]
    assert reused == [0, 0, len(shared), len(shared)]


def test_a_draft_model_with_states_goes_back_by_its_targets_drafts() -> None:
    """Its own engine was built for no drafts, so that its slots hold fewer positions than are taken back. It looks in
    every step whether they are of the sequence's tokens.
    """
    build = BuildConfig("none", 4, 110, 200, 40, 4, "draft_tokens_external")
    own_build = replace(build, max_draft_len=0, speculative_decoding_mode="none")
    target, own = (
        CheckedEngine(model, one, KVCacheConfig(), 512)
        for model, one in ((ExactModel(2, 32), build), (MODEL, own_build))
    )
    request = Request(0, tuple(PROMPTS[1]), 60)
    steps = scheduler.generate(target, [request], DraftModel(own, 32, use_logits=False), 40)
    *_, (sequence, _) = islice(steps, 6)
    assert sequence.output_tokens == one_by_one(target.model, request)[: sequence.num_generated]
    drafts = zip(sequence.stats.per_step_drafted, sequence.stats.per_step_accepted, strict=True)
    assert max(num_drafted - num_accepted for num_drafted, num_accepted in drafts) > num_rolled_back(0)


@pytest.mark.parametrize("call", ["model", "state copy"])
def test_a_call_that_is_interrupted_leaves_no_state_of_other_tokens(call: str) -> None:
    """Ctrl-C comes when a prompt's second chunk is written and its first chunk can be found by others; or when half of
    the layers are copied of the state with which the next turn begins.
    """
    engine, prompt = exact_engine(max_num_tokens=45), repetitive_prompt(7, 90)
    if call == "state copy":
        num_reused(engine, prompt, 5)
    number, when = (1, "after") if call == "model" else (engine.calls.numbers[call], "halfway")
    engine.calls.failure = Failure(call, number, when, is_interrupt=True)  # type: ignore[arg-type]
    with pytest.raises(Interrupted):
        num_reused(engine, [*prompt, 7, 8, 9])
    engine.calls.failure = None
    for _ in range(2):
        num_reused(engine, [*prompt, 7, 8, 9])
    engine.check_books()


@pytest.mark.parametrize(("interval", "expected"), [(1000, 0), (24, 45), (40, 40), (80, 0)])
def test_states_are_kept_along_prompts_that_begin_alike(interval: int, expected: int) -> None:
    """The end of the first is too far on; a checkpoint serves from 32 tokens before it on."""
    engine, first = exact_engine(interval), repetitive_prompt(5, 90)
    num_reused(engine, first, 8)
    assert num_reused(engine, [*first[:45], *repetitive_prompt(9, 20)], 8) == expected


def test_the_next_turn_computes_what_is_new(model: PreTrainedModel, make_engine: Any) -> None:
    engine = make_engine(model)
    prompt = repetitive_prompt(5, 60)
    (first,) = [s for s, _ in scheduler.generate(engine, [Request(0, tuple(prompt), 10)]) if s.is_over]
    turn = [*first.tokens, 7, 8, 9]
    for _ in range(2):  # asked again it goes on from there again
        (second,) = [s for s, _ in scheduler.generate(engine, [Request(1, tuple(turn), 5)]) if s.is_over]
        assert second.stats.num_reused_tokens >= len(first.tokens) - 1
        assert second.output_tokens == hf_greedy(model, turn, 5)


@pytest.mark.parametrize(
    ("compiler", "of_each_kind"),
    [
        ("none", "lfm2"),
        ("none", "qwen3.5"),
        *(
            pytest.param(compiler, name, marks=pytest.mark.slow)
            for compiler, name in [
                *(("aot", "lfm2"), ("aot", "qwen3.5"), ("none", "nemotron-h"), ("aot", "nemotron-h")),
                *(("none", "kimi-linear"), ("aot", "kimi-linear")),
            ]
        ),
    ],
    indirect=["of_each_kind"],
)
def test_quantized_keys_and_values_beside_states(
    compiler: str, of_each_kind: PreTrainedModel, make_engine_dir: Any
) -> None:
    """The build's check finds each layer's by the layer's number, which is not its place among those that have any."""
    config = read_engine_config(make_engine_dir(of_each_kind, compiler=compiler, kv_cache="INT8"))
    assert config.logits_check.relative_difference < 0.01


@pytest.mark.parametrize("case", ["without reuse", "without states"])
def test_an_interval_that_nothing_reads_is_refused(
    case: str, model: PreTrainedModel, make_engine_dir: Any, said: Said
) -> None:
    of = model if case == "without reuse" else make_model("llama")
    with pytest.raises(UsageError) as raised:
        cache = KVCacheConfig(block_reuse=case != "without reuse", state_checkpoint_interval=64)
        Engine.open(make_engine_dir(of), kv_cache=cache)
    said(raised, "64")


@pytest.mark.parametrize("compiler", ["none", pytest.param("aot", marks=pytest.mark.slow)])
@pytest.mark.parametrize("of_each_kind", ["qwen3.5", *slow("lfm2", *SLOW)], indirect=True)
def test_nan_in_a_state_stays_with_its_request_and_is_told(
    compiler: str, of_each_kind: PreTrainedModel, make_engine_dir: Any
) -> None:
    """Others are beside it, and get its slot and blocks after it."""
    engine_dir = make_engine_dir(of_each_kind, compiler=compiler, max_batch_size=2)
    with Engine.open(engine_dir, kv_cache=KVCacheConfig(max_tokens=260)) as engine:
        assert engine._states is not None
        done: dict[int, list[int]] = {}
        requests = [Request(i, tuple(prompt), NUM_NEW_TOKENS) for i, prompt in enumerate(PROMPTS)]
        with pytest.raises(RequestError, match="request 1"):
            for sequence, _ in scheduler.generate(engine, requests, NgramLookup(2), 10):
                done[sequence.request.id] = sequence.output_tokens
                if sequence.request.id == 1:
                    assert not sequence.is_over
                    for pool in engine._states.pools:
                        pool[sequence.state_slot] = torch.nan
        del done[1]
        others = [i for i in range(len(PROMPTS)) if i != 1]
        assert done == {i: hf_greedy(of_each_kind, PROMPTS[i], NUM_NEW_TOKENS) for i in others}


def test_states_that_do_not_fit_are_refused(
    model: PreTrainedModel, make_engine_dir: Any, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_dir = make_engine_dir(model)
    monkeypatch.setattr("runtime.engine.engine.free_memory", lambda: 100_000)
    with pytest.raises(SpecDecError) as raised:
        Engine.open(engine_dir)
    said(raised, "states", "0.1 MB")
