"""A token's logits are a function of the model and the tokens before it, bit by bit: not of the drafts, the batch, the
chunks of a prompt, the threads, the loop, what was found in the cache, or who was preempted.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from shared import MakeEngineDir
from strength import examples
from tiny import VOCAB_SIZE, make_model
from torch import Tensor

from runtime.checkpoint.config import SelfDraft
from runtime.core.request import Draft, Request, Sequence
from runtime.drafters import draft_target as drafting
from runtime.engine.engine import Engine, KVCacheConfig
from runtime.loop import orchestrator, scheduler

MAX_LEN = 900
MOST_CHUNKS = 40
"""Chunks of all prompts of an example, at most: a chunk of one token is as good in a short prompt."""
WINDOWED = {"num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 100}
# By dtype, and how K/V are quantized or which states there are.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("llama", {}),
    "bfloat16": ("mistral", WINDOWED),
    "float16": ("gpt-oss", {"sliding_window": 100}),
    "float32 FP8": ("llama", {}),
    # Compiled without `--slow` too, with its copy.
    "bfloat16 INT8": ("gemma2", WINDOWED | {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}),
    "bfloat16 slopes": ("bloom", {}),
    "bfloat16 chunks": ("llama4", {"attention_chunk_size": 100}),
    "bfloat16 delta rule": ("qwen3.5", {}),
    "float32 delta rule": ("qwen3.5", {}),
    "float32 Mamba-2": ("nemotron-h", {}),
    "float32 Kimi's delta attention": ("kimi-linear", {}),
    "float32 lightning attention": ("minimax", {}),
    "bfloat16 Mamba-2 alone": ("mamba2", {}),
    "bfloat16 Mamba-1": ("jamba", {}),
    "float32 RG-LRU": ("recurrent-gemma", {}),
}
# Compiling an engine takes half a minute.
COMPILED = [pytest.param(name, marks=() if name == "bfloat16 INT8" else pytest.mark.slow) for name in MODELS]


def build_model(name: str, compiler: str, make_engine_dir: MakeEngineDir) -> Path:
    """The engine directory of one of `MODELS`."""
    family, overrides = MODELS[name]
    dtype, _, kind = name.partition(" ")
    kv_cache = kind if kind in ("INT8", "FP8") else None
    model = make_model(family, max_position_embeddings=MAX_LEN, **overrides)
    tokens_per_block = 32 if dtype == "bfloat16" else 16  # of 32 few rows are multiplied in another way than many
    limits = {"max_input_len": MAX_LEN - 1, "max_seq_len": MAX_LEN + 10, "tokens_per_block": tokens_per_block}
    copy = SelfDraft("int4") if compiler == "aot" else None
    return make_engine_dir(model, compiler=compiler, dtype=dtype, kv_cache=kv_cache, self_draft=copy, **limits)


@pytest.fixture(scope="module", params=COMPILED)
def engine_dir(request: pytest.FixtureRequest, make_engine_dir: MakeEngineDir) -> Path:
    return build_model(request.param, "aot", make_engine_dir)


@pytest.fixture(scope="module")
def engines(engine_dir: Path) -> Iterator[list[Engine]]:
    """Room for everything; room for one request, so that others wait or are preempted; and no reuse."""
    caches = [KVCacheConfig(), KVCacheConfig(max_tokens=MAX_LEN + 48), KVCacheConfig(block_reuse=False)]
    opened = [Engine.open(engine_dir, kv_cache=cache) for cache in caches]
    yield opened
    for engine in opened:
        engine.close()


class Guessing:
    """Drafts of any length, of what follows, of `tempting` tokens and of anything else."""

    def __init__(self, outputs: dict[int, list[int]], seed: int, tempting: tuple[int, ...] = ()) -> None:
        self.outputs, self.rng, self.tempting = outputs, random.Random(seed), tempting

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [Draft(self._guess(s)[: min(self.rng.randint(0, max_draft_len), s.max_draft_len)]) for s in sequences]

    def _guess(self, sequence: Sequence) -> list[int]:
        rest = self.outputs[sequence.request.id][sequence.num_generated :]
        choices = ([token, token, token, *self.tempting, self.rng.randrange(VOCAB_SIZE)] for token in rest)
        return [self.rng.choice(of_one) for of_one in choices]

    def forget(self, request_id: int) -> None: ...


def prompt(seed: int, length: int) -> tuple[int, ...]:
    """Draw a prompt; those of one seed begin alike, so that their K/V are found."""
    rng = random.Random(seed)
    return tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length))


@pytest.fixture(scope="module")
def alone(engines: list[Engine]) -> Any:
    """Output and logits of a prompt by itself: without a draft, in one chunk, by one thread, with an empty cache."""
    known: dict[tuple[int, ...], tuple[list[int], list[Tensor]]] = {}

    def generate(tokens: tuple[int, ...], max_new_tokens: int) -> tuple[list[int], list[Tensor]]:
        if tokens not in known:
            engines[0].clear_cache()
            engines[0].max_num_tokens = MAX_LEN
            torch.set_num_threads(1)
            request = Request(0, tokens, 30, keep_logits=True)
            for sequence, _ in scheduler.generate(engines[0], [request], None, 0):
                known[tokens] = sequence.output_tokens, sequence.logits
        output, logits = known[tokens]
        return output[:max_new_tokens], logits[:max_new_tokens]

    return generate


def test_logits_are_the_same_bits_in_any_company(engines: list[Engine], alone: Any) -> None:
    @settings(max_examples=examples(10_000), deadline=None)
    @given(
        lengths=st.lists(st.tuples(st.integers(0, 2), st.integers(1, MAX_LEN - 40)), min_size=1, max_size=4),
        max_new_tokens=st.integers(1, 30),
        engine=st.sampled_from(engines),
        in_leader_mode=st.booleans(),
        chunk=st.integers(1, 512),
        threads=st.sampled_from([1, 2, 3, 5]),
        seed=st.integers(0, 1000),
    )
    def bits_are_equal(
        lengths: list[tuple[int, int]],
        max_new_tokens: int,
        engine: Engine,
        in_leader_mode: bool,
        chunk: int,
        threads: int,
        seed: int,
    ) -> None:
        prompts = [prompt(*length) for length in lengths]
        expected = [alone(tokens, max_new_tokens) for tokens in prompts]
        requests = [Request(i, tokens, max_new_tokens, keep_logits=True) for i, tokens in enumerate(prompts)]
        engine.max_num_tokens = max(chunk, sum(map(len, prompts)) // MOST_CHUNKS)
        torch.set_num_threads(threads)
        drafter = Guessing({i: output for i, (output, _) in enumerate(expected)}, seed)
        generate = scheduler.generate if in_leader_mode or not engine.block_reuse else orchestrator.generate
        done = {s.request.id: s for s, _ in generate(engine, requests, drafter) if s.finish_reason}
        torch.set_num_threads(1)
        for i, (output, logits) in enumerate(expected):
            assert done[i].output_tokens == output
            assert torch.equal(torch.stack(done[i].logits), torch.stack(logits))

    assert engines[0].config.batch_invariant
    bits_are_equal()


def test_a_copy_that_drafts_changes_no_bit(engines: list[Engine], alone: Any) -> None:
    """Compiled beside the step. What is not quantized lies in memory once."""
    engine, prompts = engines[0], [prompt(seed, length) for seed, length in ((0, 60), (1, 7), (0, 200))]
    expected = [alone(tokens, 30) for tokens in prompts]
    engine.clear_cache()
    requests = [Request(i, tokens, 30, keep_logits=True) for i, tokens in enumerate(prompts)]
    drafter = drafting.SelfDraftModel(engine, use_logits=False)
    done = {s.request.id: s for s, _ in scheduler.generate(engine, requests, drafter) if s.finish_reason}
    for i, (output, logits) in enumerate(expected):
        assert done[i].output_tokens == output
        assert torch.equal(torch.stack(done[i].logits), torch.stack(logits))
    assert sum(sequence.stats.num_accepted_draft_tokens for sequence in done.values()) > 0
    target, own = (
        {tensor.data_ptr() for tensor in step.weights.values()}  # type: ignore[union-attr]
        for step in (engine._step, engine._copy_step)
    )
    assert target & own and own - target
