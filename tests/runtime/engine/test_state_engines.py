"""Engines of models whose layers have states: one text and the same bits, however it is computed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sentences import Said
from tiny import eager_logits, hf_greedy, make_model, repetitive_prompt
from transformers import PreTrainedModel

from runtime.checkpoint.bundle import read_engine_config
from runtime.checkpoint.config import SelfDraft as SelfDraftConfig
from runtime.core.request import Request, Sequence
from runtime.drafters.draft_target import DraftModel, SelfDraft
from runtime.drafters.ngram import NgramLookup
from runtime.engine.engine import Engine, KVCacheConfig
from runtime.loop import orchestrator, scheduler
from runtime.util.errors import RequestError, SpecDecError, UsageError

PROMPTS = [repetitive_prompt(seed, length) for seed, length in ((0, 90), (1, 34), (2, 5), (3, 60), (0, 80), (0, 70))]
NUM_NEW_TOKENS = 24
SLOW = (
    *("nemotron-h", "kimi-linear", "minimax", "mamba2", "mamba", "falcon-mamba", "jamba", "recurrent-gemma"),
    *("zamba2", "zamba"),
)
DRAFTERS: dict[str, Callable[[Engine], Any]] = {
    "plain": lambda engine: None,
    "ngram": lambda engine: NgramLookup(2),
    "self-draft": lambda engine: SelfDraft(engine, use_logits=False),
}


@pytest.fixture(
    scope="module",
    params=[
        *("lfm2", "qwen3.5"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
    ],
)
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
    ["lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3.5", *SLOW))],
    indirect=True,
)
def test_bits_are_the_same_whatever_drafts_are_beside_and_fits(of_each_kind: PreTrainedModel, make_engine: Any) -> None:
    """Both loops are run, cold and found again, with room for all and with blocks for one and a half sequences."""
    expected = [hf_greedy(of_each_kind, prompt, NUM_NEW_TOKENS) for prompt in PROMPTS]
    logits: dict[int, torch.Tensor] = {}
    num_reused = num_accepted = 0
    for max_tokens in (None, 200):
        engine = make_engine(
            of_each_kind, KVCacheConfig(max_tokens=max_tokens), compiler="aot", self_draft=SelfDraftConfig("int8")
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


def test_a_draft_model_with_states_goes_back_by_its_targets_drafts(model: PreTrainedModel, make_engine: Any) -> None:
    """Its own engine was built for no drafts, and its slots would hold fewer positions than are taken back."""
    target, own = make_engine(make_model("llama")), make_engine(model, max_draft_len=0)
    prompts = PROMPTS[:3]
    expected = [hf_greedy(make_model("llama"), prompt, NUM_NEW_TOKENS) for prompt in prompts]
    requests = [Request(i, tuple(prompt), NUM_NEW_TOKENS) for i, prompt in enumerate(prompts)]
    drafter = DraftModel(own, target.config.vocab_size, use_logits=False)
    done = {s.request.id: s for s, _ in scheduler.generate(target, requests, drafter, 10) if s.is_over}
    assert [done[i].output_tokens for i in range(len(prompts))] == expected


def test_a_step_that_fails_leaves_no_state_of_other_tokens(model: PreTrainedModel, make_engine_dir: Any) -> None:
    """The second piece of a prompt has been written when Ctrl-C interrupts it; the first one is published."""
    prompt = repetitive_prompt(7, 90)
    engine = Engine.open(make_engine_dir(model), max_num_tokens=45)
    assert engine._step is not None
    step, num_steps = engine._step, 0

    def interrupted(*inputs: Any) -> torch.Tensor:
        nonlocal num_steps
        logits, num_steps = step(*inputs), num_steps + 1
        if num_steps == 2:
            raise KeyboardInterrupt
        return logits

    engine._step = interrupted
    with pytest.raises(KeyboardInterrupt):
        list(scheduler.generate(engine, [Request(0, tuple(prompt), 5)]))
    request = Request(1, tuple(prompt), 1, keep_logits=True)
    (answer,) = [s for s, _ in scheduler.generate(engine, [request]) if s.is_over]
    torch.testing.assert_close(answer.logits[0], eager_logits(model, prompt)[-1], rtol=1e-4, atol=1e-4)


def test_a_state_that_is_asked_for_again_and_again_stays(model: PreTrainedModel, make_engine: Any) -> None:
    """Beside others that nobody asks for again: the state that was used longest ago goes first. The prompts differ in
    their last 35 tokens, more than a kept state can go back by.
    """
    engine, shared = make_engine(model, max_batch_size=1), repetitive_prompt(6, 61)
    reused = []
    for own in range(3, 12):
        for prompt in ([*shared, *repetitive_prompt(own, 35)], repetitive_prompt(100 + own, 40)):
            request = Request(own, tuple(prompt), 2)
            (answer,) = [s for s, _ in scheduler.generate(engine, [request]) if s.is_over]
            if prompt[:61] == shared:
                reused.append(answer.stats.num_reused_tokens)
    assert min(reused[3:]) == len(shared)


def test_a_common_beginning_is_computed_twice_and_then_found(model: PreTrainedModel, make_engine_dir: Any) -> None:
    """A state is kept for others once a second request begins so; the first's slot has gone too far by then."""
    shared = repetitive_prompt(6, 61)
    engine = Engine.open(make_engine_dir(model), max_num_tokens=7)
    reused = []
    for own in ([4, 5, 6], [7, 8], [9, 10, 11], [12]):
        prompt = [*shared, *own]
        (answer,) = [s for s, _ in scheduler.generate(engine, [Request(own[0], tuple(prompt), 40)]) if s.is_over]
        assert answer.output_tokens == hf_greedy(model, prompt, 40)
        reused.append(answer.stats.num_reused_tokens)
    assert reused == [0, 0, len(shared), len(shared)]


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


def test_states_are_kept_along_prompts_that_begin_alike(model: PreTrainedModel, make_engine_dir: Any) -> None:
    """The end of the first is too far on; a checkpoint serves from 32 tokens before it on."""
    first, common = repetitive_prompt(5, 90), 45
    second = [*first[:common], *repetitive_prompt(9, 20)]
    expected = hf_greedy(model, second, 8)
    for interval, num_reused in ((1000, 0), (24, 45), (40, 40), (80, 0)):
        engine = Engine.open(make_engine_dir(model), kv_cache=KVCacheConfig(state_checkpoint_interval=interval))
        for number, prompt in enumerate((first, second)):
            request = Request(number, tuple(prompt), 8)
            (answer,) = [s for s, _ in scheduler.generate(engine, [request]) if s.is_over]
        assert (answer.stats.num_reused_tokens, answer.output_tokens) == (num_reused, expected)
        engine.close()


@pytest.mark.parametrize("case", ["without reuse", "without states"])
def test_an_interval_that_nothing_reads_is_refused(
    case: str, model: PreTrainedModel, make_engine_dir: Any, said: Said
) -> None:
    of = model if case == "without reuse" else make_model("llama")
    with pytest.raises(UsageError) as raised:
        cache = KVCacheConfig(block_reuse=case != "without reuse", state_checkpoint_interval=64)
        Engine.open(make_engine_dir(of), kv_cache=cache)
    said(raised, "64")


class InterruptedPool:
    """A layer's pool that is not written any more once Ctrl-C has come."""

    def __init__(self, pool: torch.Tensor) -> None:
        self.pool = pool

    def __getitem__(self, slot: int) -> torch.Tensor:
        return self.pool[slot]

    def __setitem__(self, slot: int, state: torch.Tensor) -> None:
        raise KeyboardInterrupt


def test_a_state_that_is_copied_in_part_is_not_found(model: PreTrainedModel, make_engine: Any) -> None:
    """The next turn copies the last one's state, and Ctrl-C comes between two layers."""
    engine = make_engine(model)
    assert engine._states is not None
    turn = repetitive_prompt(4, 70)
    (first,) = [s for s, _ in scheduler.generate(engine, [Request(0, tuple(turn), 5)]) if s.is_over]
    turn = [*first.tokens, 7, 8, 9]
    pool, engine._states.pools[1] = engine._states.pools[1], InterruptedPool(engine._states.pools[1])  # type: ignore[call-overload]
    with pytest.raises(KeyboardInterrupt):
        list(scheduler.generate(engine, [Request(1, tuple(turn), 5)]))
    engine._states.pools[1] = pool
    engine._states.manager.check_integrity()
    for number in (2, 3):
        (second,) = [s for s, _ in scheduler.generate(engine, [Request(number, tuple(turn), 5)]) if s.is_over]
        assert second.output_tokens == hf_greedy(model, turn, 5)


@pytest.mark.parametrize("compiler", ["none", pytest.param("aot", marks=pytest.mark.slow)])
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
