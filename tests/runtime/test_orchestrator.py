"""The V1 loop: whatever the batch, the K/V pool and the drafts, each request ends with Hugging Face's tokens."""

from pathlib import Path
from typing import Any

import pytest
from sentences import Said
from tiny import VOCAB_SIZE, hf_greedy, repetitive_prompt
from transformers import PreTrainedModel

from commands.options.hints import hint_of
from runtime.core.request import Draft, Request, Sequence
from runtime.core.stats import LoopTimes
from runtime.drafters.ngram import NgramLookup
from runtime.engine.engine import Engine, KVCacheConfig
from runtime.loop.orchestrator import generate, step_once
from runtime.util.errors import SpecDecError, UsageError

NUM_NEW_TOKENS = 24


@pytest.fixture
def open_engine(llama_engine_dir: Path) -> Any:
    """The engine of fixture `llama`: max_batch_size 4, blocks of 4."""
    return lambda **kv_cache: Engine.open(llama_engine_dir, kv_cache=KVCacheConfig(**kv_cache))


def make_requests(num_requests: int, max_new_tokens: int = NUM_NEW_TOKENS) -> list[Request]:
    return [Request(i, tuple(repetitive_prompt(i, 6 + 5 * i)), max_new_tokens) for i in range(num_requests)]


def finish(engine: Engine, requests: list[Request], drafter: Any = None, max_draft_len: int = 10) -> list[Sequence]:
    """Run to the end, checking on the way that what was streamed is what came out."""
    streamed: dict[int, list[int]] = {request.id: [] for request in requests}
    sequences: dict[int, Sequence] = {}
    for sequence, new_tokens in generate(engine, requests, drafter, max_draft_len):
        assert new_tokens and sequence.request.id not in sequences
        streamed[sequence.request.id] += new_tokens
        if sequence.finish_reason is not None:
            sequences[sequence.request.id] = sequence
    assert {i: sequence.output_tokens for i, sequence in sequences.items()} == streamed
    engine._blocks.check_integrity()
    assert engine._blocks.num_free_blocks == engine._blocks.num_blocks - 1
    return [sequences[request.id] for request in requests]


def expected(llama: PreTrainedModel, requests: list[Request]) -> list[list[int]]:
    return [hf_greedy(llama, list(r.prompt_tokens), r.max_new_tokens) for r in requests]


def test_more_requests_than_the_batch_holds_run_in_groups(open_engine: Any, llama: PreTrainedModel) -> None:
    requests, times = make_requests(6), LoopTimes()
    sequences = finish(open_engine(), requests, NgramLookup(2))
    assert [s.output_tokens for s in sequences] == expected(llama, requests)
    assert [s.finish_reason for s in sequences] == ["length"] * 6
    for _ in generate(open_engine(), requests, None, 0, times):
        pass
    assert times.num_iterations == 2 * NUM_NEW_TOKENS  # a group of 4, then one of 2
    assert 0 < times.target_time_s < times.wall_s and times.host_time_s > 0


@pytest.mark.parametrize("ngram", [False, True], ids=["plain", "ngram"])
def test_pool_too_small_for_the_whole_batch_serves_it(ngram: bool, open_engine: Any, llama: PreTrainedModel) -> None:
    """60 tokens of K/V; the longest request needs 21 + 24 - 1, all four together 150."""
    requests = make_requests(4)
    engine = open_engine(max_tokens=60)
    sequences = finish(engine, requests, NgramLookup(2) if ngram else None)
    assert [s.output_tokens for s in sequences] == expected(llama, requests)


def test_who_does_not_fit_is_first_in_the_next_step(open_engine: Any) -> None:
    """Three requests take turns where there is room for one at a time."""
    requests = [Request(i, (5, 6, 7 + i), 4) for i in range(3)]
    order = [sequence.request.id for sequence, _ in generate(open_engine(max_tokens=8), requests, None, 0)]
    assert order == [0, 1, 2] * 4


def test_pool_that_just_holds_a_request_serves_it(open_engine: Any, llama: PreTrainedModel, said: Said) -> None:
    (request,) = make_requests(1)
    num_tokens = len(request.prompt_tokens) + NUM_NEW_TOKENS - 1  # the last token's K/V are never needed
    assert -(-num_tokens // 4) * 4 == 32
    (sequence,) = finish(open_engine(max_tokens=32), [request], NgramLookup(2))
    assert [sequence.output_tokens] == expected(llama, [request])
    with pytest.raises(SpecDecError) as raised:
        finish(open_engine(max_tokens=24), [request], NgramLookup(2))
    said(raised, "24", "0")


def test_request_that_would_not_fit_is_refused_before_the_first_step(open_engine: Any, said: Said) -> None:
    """Its prompt and draft alone would fit; its last step would not."""
    engine = open_engine(max_tokens=24)
    with pytest.raises(SpecDecError) as raised:
        next(generate(engine, [Request(0, (5, 6, 7), 2), Request(1, (5, 6, 7), 23)], None, 0))
    said(raised, "24", "1", "25")
    assert engine.step_time_s == 0


class Failing:
    """A drafter that fails in its third step."""

    num_steps = 0

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        self.num_steps += 1
        if self.num_steps == 3:
            raise RuntimeError("no draft today")
        return [Draft([])] * len(sequences)

    def forget(self, request_id: int) -> None: ...


def test_failing_drafter_leaves_the_engine_usable(open_engine: Any, llama: PreTrainedModel) -> None:
    engine, requests = open_engine(), make_requests(3)
    with pytest.raises(RuntimeError, match="no draft today"):
        list(generate(engine, requests, Failing(), 5))
    assert [s.output_tokens for s in finish(engine, requests)] == expected(llama, requests)


def test_loop_left_early_holds_no_blocks(open_engine: Any) -> None:
    engine = open_engine()
    for _ in generate(engine, make_requests(3), NgramLookup(2), 10):
        break
    assert engine._blocks.num_free_blocks == engine._blocks.num_blocks - 1


@pytest.mark.parametrize("ngram", [False, True], ids=["plain", "ngram"])
def test_every_step_computes_only_what_is_new(ngram: bool, open_engine: Any) -> None:
    """After the first step the K/V of every token but the last are found, whatever part of a block they fill."""
    engine = open_engine()
    (request,) = make_requests(1)
    (sequence,) = finish(engine, [request], NgramLookup(2) if ngram else None)
    lengths, length = [], len(request.prompt_tokens)
    for num_accepted in sequence.stats.per_step_accepted[:-1]:
        length += num_accepted + 1
        lengths.append(length)
    assert sequence.stats.num_reused_tokens == sum(length - 1 for length in lengths)
    if not ngram:
        assert lengths == list(range(7, 6 + NUM_NEW_TOKENS))


def test_same_prompt_again_is_reused_and_cleared_cache_is_not(open_engine: Any, llama: PreTrainedModel) -> None:
    engine, request = open_engine(), Request(0, tuple(repetitive_prompt(0, 21)), 1)
    reused = []
    for clear in (False, False, True):
        if clear:
            engine.clear_cache()
        (sequence,) = finish(engine, [request])
        assert [sequence.output_tokens] == expected(llama, [request])
        reused.append(sequence.stats.num_reused_tokens)
    assert reused == [0, 20, 0]


@pytest.mark.parametrize("ngram", [False, True], ids=["plain", "ngram"])
def test_end_id_ends_as_in_hf(ngram: bool, open_engine: Any, llama: PreTrainedModel) -> None:
    for request in make_requests(4):
        prompt = list(request.prompt_tokens)
        end_id = hf_greedy(llama, prompt, NUM_NEW_TOKENS)[7]
        ended = Request(0, request.prompt_tokens, NUM_NEW_TOKENS, frozenset([end_id]))
        (sequence,) = finish(open_engine(), [ended], NgramLookup(2) if ngram else None)
        assert sequence.finish_reason == "end_id"
        assert sequence.output_tokens == hf_greedy(llama, prompt, NUM_NEW_TOKENS, end_id)
        assert sequence.output_tokens.index(end_id) == len(sequence.output_tokens) - 1


class Oracle:
    """Drafts what is given: right tokens with a wrong one at chosen places."""

    def __init__(self, outputs: list[list[int]], wrong_every: int) -> None:
        self.outputs, self.wrong_every = outputs, wrong_every
        self.forgotten: list[int] = []

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        drafts = []
        for sequence in sequences:
            done = sequence.num_generated
            tokens = self.outputs[sequence.request.id][done : done + min(max_draft_len, sequence.num_remaining - 1)]
            wrong = range(self.wrong_every - 1, len(tokens), self.wrong_every)
            drafts.append(Draft([token ^ 1 if i in wrong else token for i, token in enumerate(tokens)]))
        return drafts

    def forget(self, request_id: int) -> None:
        self.forgotten.append(request_id)


@pytest.mark.parametrize("wrong_every", [1, 2, 3, 4, 100])
def test_any_drafter_gives_the_same_tokens(wrong_every: int, open_engine: Any, llama: PreTrainedModel) -> None:
    """A drafter that is right wrong_every - 1 times in a row: so many tokens and one more per step."""
    requests = make_requests(3)
    outputs = expected(llama, requests)
    drafter = Oracle(outputs, wrong_every)
    sequences = finish(open_engine(), requests, drafter, max_draft_len=5)
    assert [s.output_tokens for s in sequences] == outputs
    tokens_per_step = min(wrong_every, 6)
    assert [s.stats.num_steps for s in sequences] == [-(-NUM_NEW_TOKENS // tokens_per_step)] * 3
    assert sorted(drafter.forgotten) == [0, 1, 2]


def test_drafter_keeps_no_state_of_finished_requests(open_engine: Any) -> None:
    drafter = NgramLookup(2)
    finish(open_engine(), make_requests(3), drafter)
    assert drafter._histories == {}


def test_drafter_keeps_no_state_of_a_loop_left_early(open_engine: Any) -> None:
    drafter = NgramLookup(2)
    steps = generate(open_engine(), make_requests(3), drafter, 10)
    next(steps)
    assert drafter._histories.keys() == {0, 1, 2}
    steps.close()
    assert drafter._histories == {}


def test_time_to_first_token_counts_the_wait_for_the_group_before(open_engine: Any) -> None:
    sequences = finish(open_engine(), make_requests(5))  # max_batch_size 4
    first_group_s = max(sequence.stats.latency_s for sequence in sequences[:4])
    assert sequences[4].stats.ttft_s > first_group_s


def test_draft_length_bounds_every_draft(open_engine: Any, llama: PreTrainedModel) -> None:
    requests = make_requests(2)
    for max_draft_len in (0, 1, 3):
        sequences = finish(open_engine(), requests, NgramLookup(2), max_draft_len)
        assert [s.output_tokens for s in sequences] == expected(llama, requests)
        drafted = [n for s in sequences for n in s.stats.per_step_drafted]
        assert max(drafted) == max_draft_len


def test_block_reuse_off_is_wrong_usage(open_engine: Any, said: Said) -> None:
    with pytest.raises(UsageError) as raised:
        next(generate(open_engine(block_reuse=False), make_requests(1), None, 0))
    said(raised)


def test_draft_length_above_the_engines_is_an_error(open_engine: Any, said: Said) -> None:
    with pytest.raises(SpecDecError) as error:
        next(generate(open_engine(), make_requests(1), NgramLookup(2), 11))
    said(error, "10", "11")
    said(hint_of(error.value), "--max-draft-len 11")


def test_requests_are_checked_before_the_first_step(open_engine: Any, said: Said) -> None:
    engine = open_engine()
    with pytest.raises(SpecDecError) as raised:
        next(generate(engine, [*make_requests(5), Request(5, (), 5)], None, 0))
    said(raised, "5")
    assert engine.step_time_s == 0


@pytest.mark.parametrize("num_right", [0, 2, 5])
def test_steps_of_a_request_that_nobody_keeps_make_the_same_output(
    num_right: int, open_engine: Any, llama: PreTrainedModel
) -> None:
    """Drafts of five tokens of which so many are right."""
    (request,) = make_requests(1)
    (output,) = expected(llama, [request])
    engine, tokens, num_steps = open_engine(), list(request.prompt_tokens), 0
    while True:
        rest = output[len(tokens) - len(request.prompt_tokens) :]
        draft = [*rest[:num_right], *[(token + 1) % VOCAB_SIZE for token in rest[num_right:5]]]
        sequence = step_once(engine, request, tokens, draft[: len(rest) - 1])
        tokens, num_steps = sequence.tokens, num_steps + 1
        assert engine._blocks.num_free_blocks == engine._blocks.num_blocks - 1
        if sequence.finish_reason is not None:
            break
    assert tokens[len(request.prompt_tokens) :] == output and sequence.finish_reason == "length"
    assert num_steps == -(-NUM_NEW_TOKENS // (num_right + 1))
