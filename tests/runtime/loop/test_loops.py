"""Both loops: whatever arrives, waits, is put back and continued, each request ends with Hugging Face's tokens."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentences import Said
from strength import draws
from tiny import VOCAB_SIZE, hf_greedy, repetitive_prompt
from transformers import PreTrainedModel

from commands.options.hints import hint_of
from runtime.core.request import Request, Sequence
from runtime.drafters.ngram import NgramLookup
from runtime.engine.engine import Engine, KVCacheConfig
from runtime.loop import orchestrator, scheduler
from runtime.util.errors import SpecDecError, UsageError

NUM_NEW_TOKENS = 24
BOTH = pytest.mark.parametrize("loop", [scheduler, orchestrator], ids=["leader", "orchestrator"])


@pytest.fixture
def open_engine(llama_engine_dir: Path) -> Any:
    """The engine of fixture `llama`: max_batch_size 4, blocks of 4."""
    return lambda **kv_cache: Engine.open(llama_engine_dir, kv_cache=KVCacheConfig(**kv_cache))


def make_requests(num_requests: int) -> list[Request]:
    return [Request(i, tuple(repetitive_prompt(i, 6 + 5 * i)), NUM_NEW_TOKENS) for i in range(num_requests)]


def finish(engine: Engine, requests: list[Request], drafter: Any = None, loop: Any = scheduler) -> dict[int, Sequence]:
    """Run to the end; blocks are all given back, and what was streamed is what came out."""
    streamed: dict[int, list[int]] = {request.id: [] for request in requests}
    finished: dict[int, Sequence] = {}
    for sequence, new_tokens in loop.generate(engine, requests, drafter, 5 if drafter else 0):
        assert new_tokens and sequence.request.id not in finished
        engine._blocks.check_integrity()
        streamed[sequence.request.id] += new_tokens
        if sequence.finish_reason is not None:
            finished[sequence.request.id] = sequence
    assert {i: sequence.output_tokens for i, sequence in finished.items()} == streamed
    assert engine._blocks.num_free_blocks == engine._blocks.num_blocks - 1
    return finished


def expected(llama: PreTrainedModel, requests: list[Request]) -> dict[int, list[int]]:
    return {r.id: hf_greedy(llama, list(r.prompt_tokens), r.max_new_tokens) for r in requests}


def outputs(finished: dict[int, Sequence]) -> dict[int, list[int]]:
    return {i: finished[i].output_tokens for i in sorted(finished)}


@settings(max_examples=draws(25, 6), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=9),
    max_tokens=st.integers(92, 300),
    max_num_tokens=st.integers(1, 64),
    drafter=st.sampled_from([lambda: None, lambda: NgramLookup(2)]),
    how=st.sampled_from([(scheduler, True), (scheduler, False), (orchestrator, True)]),
)
def test_any_requests_end_with_the_right_tokens(
    lengths: list[tuple[int, int]], max_tokens: int, max_num_tokens: int, drafter: Any, how: Any, open_engine: Any,
    llama: PreTrainedModel,
) -> None:  # fmt: skip
    requests = [Request(i, tuple(repetitive_prompt(n, n)), new) for i, (n, new) in enumerate(lengths)]
    loop, reuse = how
    engine = open_engine(max_tokens=max_tokens, block_reuse=reuse)
    engine.max_num_tokens = max_num_tokens
    assert outputs(finish(engine, requests, drafter(), loop)) == expected(llama, requests)


def test_turns_without_block_reuse_are_wrong_usage(open_engine: Any, said: Said) -> None:
    with pytest.raises(UsageError) as raised:
        next(orchestrator.generate(open_engine(block_reuse=False), make_requests(1), None, 0))
    said(raised)


@BOTH
def test_requests_are_checked_before_the_first_step(loop: Any, open_engine: Any, said: Said) -> None:
    engine = open_engine()
    with pytest.raises(SpecDecError) as raised:
        next(loop.generate(engine, [*make_requests(5), Request(5, (), 5)], None, 0))
    said(raised, "5")
    with pytest.raises(SpecDecError) as raised:
        next(loop.generate(engine, make_requests(1), NgramLookup(2), 11))
    said(raised, "10", "11")
    said(hint_of(raised.value), "--max-draft-len 11")
    assert engine.step_time_s == 0


@pytest.mark.parametrize("num_right", [0, 2, 5])
def test_steps_of_a_request_that_nobody_keeps_make_the_same_output(
    num_right: int, open_engine: Any, llama: PreTrainedModel
) -> None:
    """Drafts of five tokens of which so many are right."""
    (request,) = make_requests(1)
    output = expected(llama, [request])[0]
    engine, tokens, num_steps = open_engine(), list(request.prompt_tokens), 0
    while True:
        rest = output[len(tokens) - len(request.prompt_tokens) :]
        draft = [*rest[:num_right], *[(token + 1) % VOCAB_SIZE for token in rest[num_right:5]]]
        sequence = orchestrator.step_once(engine, request, tokens, draft[: len(rest) - 1])
        tokens, num_steps = sequence.tokens, num_steps + 1
        assert engine._blocks.num_free_blocks == engine._blocks.num_blocks - 1
        if sequence.finish_reason is not None:
            break
    assert tokens[len(request.prompt_tokens) :] == output and sequence.finish_reason == "length"
    assert num_steps == -(-NUM_NEW_TOKENS // (num_right + 1))
