"""Clients take turns by tokens: counted in steps and tokens, and every output is still the model's."""

from collections import Counter
from collections.abc import Callable, Hashable
from itertools import count
from pathlib import Path
from typing import Any

import clocks
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strength import draws
from tiny import hf_greedy, make_model, repetitive_prompt
from transformers import PreTrainedModel

from runtime.checkpoint.config import SelfDraft
from runtime.core.batch import Row
from runtime.core.request import Request, Sequence
from runtime.drafters.draft_target import SelfDraftModel
from runtime.drafters.protocol import Drafter
from runtime.engine.engine import Engine, KVCacheConfig
from runtime.loop.prefill_chunks import ChunkSizes
from runtime.loop.scheduler import Scheduler

MAX_BATCH_SIZE = 4


@pytest.fixture
def open_engine(llama_engine_dir: Path) -> Callable[..., Engine]:
    """The engine of fixture `llama`: max_batch_size 4, blocks of 4."""
    return lambda **kv_cache: Engine.open(llama_engine_dir, kv_cache=KVCacheConfig(**kv_cache))


class Loop:
    """A scheduler whose steps and tokens are counted, by client."""

    def __init__(self, engine: Engine, chunks: ChunkSizes | None = None, drafter: Drafter | None = None) -> None:
        self.engine = engine
        self.scheduler = Scheduler(engine, drafter, 5 if drafter else 0, chunks=chunks)
        self.num_steps = 0
        self.tokens: Counter[Hashable] = Counter()
        self.first_step: dict[int, int] = {}
        self.finished: list[Sequence] = []
        self._client_of: dict[int, Hashable] = {}
        self._ids = count()

    def add(
        self, client: Hashable, num_prompt: int = 5, num_new: int = 30, priority: int = 0, prompt: int | None = None
    ) -> Sequence:
        request_id = next(self._ids)
        tokens = repetitive_prompt(request_id if prompt is None else prompt, num_prompt)
        sequence = Sequence.start(Request(request_id, tuple(tokens), num_new))
        self._client_of[request_id] = client
        self.scheduler.add(sequence, client, priority)
        return sequence

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self._check_turns_that_are_not_due()
            self.num_steps += 1
            for sequence, new_tokens in self.scheduler.step():
                request_id = sequence.request.id
                self.tokens[self._client_of[request_id]] += len(new_tokens)
                self.first_step.setdefault(request_id, self.num_steps)
                if sequence.finish_reason is not None:
                    self.finished.append(sequence)
            self.engine._blocks.check_integrity()
            assert len(self.scheduler.running) <= MAX_BATCH_SIZE

    def _check_turns_that_are_not_due(self) -> None:
        """Check that no sequence is passed over in a step in which no turn was looked at."""
        queue, running = self.scheduler._queue, self.scheduler.running
        if len(running) == MAX_BATCH_SIZE and not queue.are_due:
            assert not any(queue.leaving(one, running) for one in queue.candidates(running))

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()
            assert self.num_steps < 20_000, "it does not end"
        assert self.engine._blocks.num_free_blocks == self.engine._blocks.num_blocks - 1
        assert not self.scheduler._queue._tickets and not self.scheduler._queue._present

    def running(self) -> Counter[Hashable]:
        return Counter(self._client_of[sequence.request.id] for sequence in self.scheduler.running)


def assert_are_the_models(sequences: list[Sequence], llama: PreTrainedModel) -> None:
    for sequence in sequences:
        request = sequence.request
        assert sequence.output_tokens == hf_greedy(llama, list(request.prompt_tokens), request.max_new_tokens)


@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "no reuse"])
def test_first_token_does_not_wait_for_32_requests_of_another(
    reuse: bool, open_engine: Any, llama: PreTrainedModel
) -> None:
    loop = Loop(open_engine(block_reuse=reuse))
    many = [loop.add("many", num_new=20, prompt=i % 8) for i in range(32)]
    loop.step(7)
    for _ in range(3):
        before = loop.num_steps
        polite = loop.add("polite", num_new=4)
        while polite.request.id not in loop.first_step:
            loop.step()
        assert loop.num_steps == before + 1
        while not polite.is_over:
            loop.step()
            assert loop.running()["many"] == 3
        assert_are_the_models([polite], llama)
        loop.step(2)
        assert loop.running() == {"many": 4}
    loop.finish()
    assert loop.scheduler.num_turns == 3
    assert_are_the_models(many[:10], llama)


@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "no reuse"])
def test_turns_compute_nothing_twice(reuse: bool, open_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that made room keeps its K/V while there are blocks."""
    computed = 0
    forward = Engine._forward

    def count_tokens(engine: Engine, rows: list[Row], **how: Any) -> Any:
        nonlocal computed
        computed += sum(len(row.tokens) for row in rows)
        return forward(engine, rows, **how)

    monkeypatch.setattr(Engine, "_forward", count_tokens)
    monkeypatch.setattr("runtime.loop.fair_queue._PATIENCE", 3)
    loop = Loop(open_engine(block_reuse=reuse))
    sequences = [loop.add(client, num_new=20, prompt=i) for i, client in enumerate("abcdefaaaaaa")]
    loop.finish()
    assert loop.scheduler.num_turns > 10 and loop.scheduler.times.num_preemptions == 0
    reused = sum(sequence.stats.num_reused_tokens for sequence in sequences)
    assert computed + reused == sum(len(sequence.tokens) - 1 for sequence in sequences)


def test_requests_of_three_clients_leave_no_place_idle(open_engine: Any) -> None:
    """Requests that began together end together, as if one client had sent all, and no client is one request ahead."""
    loop = Loop(open_engine())
    for i in range(18):
        loop.add("abc"[i % 3], num_new=90, prompt=i)
    while loop.scheduler.waiting:
        loop.step()
        assert max(loop.tokens.values()) - min(loop.tokens[client] for client in "abc") <= 90
    loop.finish()
    assert loop.num_steps == -(-18 // MAX_BATCH_SIZE) * 90


def test_two_clients_get_equally_many_tokens(open_engine: Any) -> None:
    """Also where one of them came earlier, has more requests, and longer prompts."""
    loop = Loop(open_engine())
    for i in range(20):
        loop.add("first", num_new=100, prompt=i)
    loop.step(20)
    before = loop.tokens["first"]
    for i in range(6):
        loop.add("second", num_new=100, prompt=50 + i)
    loop.step(100)
    first, second = loop.tokens["first"] - before, loop.tokens["second"]
    assert first + second == 400
    assert abs(first - second) <= 2 * 64 + MAX_BATCH_SIZE


def test_more_clients_than_places_all_get_on(open_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.loop.fair_queue._PATIENCE", 8)
    loop = Loop(open_engine())
    sequences = [loop.add(client, num_new=60) for client in range(9)]
    for _ in range(12):
        loop.step(10)
        if not loop.finished:
            assert max(loop.tokens.values()) - min(loop.tokens[client] for client in range(9)) <= 2 * (8 + 5) + 10
    assert max(loop.first_step[sequence.request.id] for sequence in sequences) <= 60
    loop.finish()


def test_absence_earns_nothing(open_engine: Any) -> None:
    """Clients that send one request after another do not keep a client with many from its share."""
    loop = Loop(open_engine())
    for i in range(20):
        loop.add("many", num_new=100, prompt=i)
    last: dict[Hashable, Sequence] = {}
    for _ in range(200):
        for client in range(6):
            if client not in last or last[client].is_over:
                last[client] = loop.add(client, num_new=8, prompt=50 + client)
        loop.step()
    others = sorted(loop.tokens[client] for client in range(6))
    assert loop.tokens["many"] >= 800 / 7 - 100 and loop.tokens["many"] <= others[-1] + 100
    assert others[0] > 0


@pytest.mark.parametrize("sign", [1, -1])
def test_lower_priority_comes_first_within_a_client(sign: int, open_engine: Any, llama: PreTrainedModel) -> None:
    loop = Loop(open_engine())
    sequences = [loop.add("one", num_new=10, priority=sign * i, prompt=i) for i in range(12)]
    loop.finish()
    order = sorted(sequences, key=lambda sequence: loop.first_step[sequence.request.id])
    assert [one.request.id // 4 for one in order] == [one.request.id // 4 for one in sequences[::sign]]
    assert_are_the_models(sequences, llama)


def test_better_priority_makes_room_in_a_client_only(open_engine: Any, llama: PreTrainedModel) -> None:
    loop = Loop(open_engine())
    ours = [loop.add("ours", num_new=40, prompt=i) for i in range(3)]
    other = loop.add("other", num_new=40, priority=10**6, prompt=7)
    loop.step(3)
    urgent = loop.add("ours", num_new=5, priority=-1, prompt=8)
    loop.step()
    assert loop.first_step[urgent.request.id] == loop.num_steps
    assert loop.running() == {"ours": 3, "other": 1} and other in loop.scheduler.running
    assert ours[2] not in loop.scheduler.running
    loop.finish()
    assert_are_the_models([*ours, other, urgent], llama)


@settings(max_examples=draws(20, 6), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), max_tokens=st.integers(92, 300), reuse=st.booleans(), patience=st.integers(1, 20))
def test_whatever_comes_and_goes_outputs_are_the_models(
    data: st.DataObject, max_tokens: int, reuse: bool, patience: int, open_engine: Any, llama: PreTrainedModel
) -> None:
    """Clients, priorities, lengths, drops, and a cache that is too small: nobody waits for ever, no block is lost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.loop.fair_queue._PATIENCE", patience)
        loop = Loop(open_engine(max_tokens=max_tokens, block_reuse=reuse))
        kept: list[Sequence] = []
        for _ in range(data.draw(st.integers(1, 14))):
            sequence = loop.add(
                data.draw(st.integers(0, 5)),
                num_prompt=data.draw(st.integers(1, 60)),
                num_new=data.draw(st.integers(1, 30)),
                priority=data.draw(st.integers(-1, 1)),
                prompt=data.draw(st.integers(0, 9)),
            )
            kept.append(sequence)
            for _ in range(data.draw(st.integers(0, 6))):
                if loop.scheduler.has_work:
                    loop.step()
            dropped = data.draw(st.sampled_from([None, None, None, *kept]))
            if dropped is not None and not dropped.is_over:
                loop.scheduler.drop(dropped)
                kept.remove(dropped)
        loop.finish()
    assert_are_the_models(kept, llama)


def test_turns_of_a_model_with_states_and_with_drafts(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """States stay with a sequence that made room, or are computed again."""
    monkeypatch.setattr("runtime.loop.fair_queue._PATIENCE", 3)
    model, cache = make_model("lfm2"), KVCacheConfig(max_tokens=120)
    engine = make_engine(model, cache, compiler="none", self_draft=SelfDraft("int8"))
    loop = Loop(engine, drafter=SelfDraftModel(engine, use_logits=False))
    sequences = []
    for i, client in enumerate("aaaabcdefaab"):
        sequences.append(loop.add(client, num_prompt=20 + i, num_new=12, prompt=i % 5, priority=i % 3))
        loop.step()
    loop.finish()
    assert loop.scheduler.num_turns > 2
    assert_are_the_models(sequences, model)
    assert engine._states is not None
    engine._states.manager.check_integrity()


def test_counters_of_clients_that_left_are_bounded(open_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.loop.fair_queue._MAX_REMEMBERED", 20)
    loop = Loop(open_engine())
    for i in range(5):
        loop.add("stays", num_new=100, prompt=i)
    for client in range(80):
        loop.add(client, num_prompt=2, num_new=1, prompt=client % 7)
        loop.step()
    assert len(loop.scheduler._queue._used) <= 20 + 2 + MAX_BATCH_SIZE
    loop.finish()


@pytest.mark.parametrize("max_gap_s", [0.0, 0.5])
@pytest.mark.parametrize("fixed_s", [0.0, 0.002, 0.05])
@pytest.mark.parametrize("token_s", [0.0001, 0.001, 0.01])
def test_chunks_take_what_a_gap_leaves(fixed_s: float, token_s: float, max_gap_s: float) -> None:
    """The gap is reached, and after the first chunks not exceeded, but for the least chunk, whatever a token costs."""
    step_s = fixed_s + 4 * token_s
    chunks, gap_s = ChunkSizes(512, max_gap_s), max(2.5 * step_s, max_gap_s)
    gaps = []
    for _ in range(60):
        chunk_s = fixed_s + chunks.num_tokens * token_s
        chunks.step_took(step_s)
        chunks.chunk_took(chunks.num_tokens, chunk_s)
        gaps.append(chunk_s + step_s)
    least = step_s + fixed_s + 4 * token_s
    assert max(gaps[20:]) <= max(gap_s * 1.1, least)
    assert min(gaps[20:]) >= 0.85 * gap_s or chunks.num_tokens == 512


def test_running_streams_wait_no_longer_than_two_steps_and_a_half(
    open_engine: Any, monkeypatch: pytest.MonkeyPatch, llama: PreTrainedModel
) -> None:
    """The clock counts work: a long prompt comes while others generate. Without them it is computed at once."""
    clock = clocks.install(monkeypatch)
    loop = Loop(open_engine(max_tokens=2000), ChunkSizes(512, 0.0))
    running = [loop.add(f"running {i}", num_new=70, prompt=i) for i in range(3)]
    loop.step(20)
    start = clock.now
    loop.step(5)
    step_s = (clock.now - start) / 5
    prompts, gaps = [], list[float]()
    for i in (9, 11):
        gaps.clear()
        prompts.append(loop.add("long", num_prompt=110, num_new=1, prompt=i))
        while not prompts[-1].is_over:
            start = clock.now
            loop.step()
            gaps.append(clock.now - start)
    assert not any(sequence.is_over for sequence in running)
    assert len(gaps) > 3 and max(gaps) <= 2.6 * step_s
    loop.finish()
    assert_are_the_models([*running, *prompts], llama)
    alone = Loop(open_engine(max_tokens=2000), ChunkSizes(512, 0.0))
    sequence = alone.add("long", num_prompt=110, num_new=4, prompt=9)
    alone.step()
    assert sequence.num_generated == 1
