"""Promises of both loops, the engine, the session and the serving loop on the exact model of `scripts/campaigns`.

Its engine opens within a millisecond, and its outputs are known from the text alone (`one_by_one`). Whatever requests
come and however small the cache is:

- the loops: each output is the text's own; counts are those that a watch of the engine makes; the oldest get on first
- the engine: what one admission finds is what others computed; its blocks and times are accounted for; whatever fails
- the serving loop: totals are sums of its answers, of each prompt once; nothing of a request stays behind
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from gate import Gate, Waits
from sentences import Said
from tiny import forward
from waiting import wait_until

from commands.serve.http.server import errors_logged
from runtime.checkpoint.config import BuildConfig
from runtime.core.batch import generation_row
from runtime.core.params import SamplingConfig
from runtime.core.request import Draft, Request, Sequence
from runtime.core.stats import LoopTimes
from runtime.drafters.draft_target import DraftModel, SelfDraftModel
from runtime.drafters.ngram import NgramLookup
from runtime.drafters.protocol import Drafter
from runtime.engine.engine import KVCacheConfig
from runtime.loop import orchestrator, scheduler
from runtime.loop.opening import OpenDrafter
from runtime.loop.scheduler import Scheduler
from runtime.loop.serving import LoopLimits, Progress, RequestHandle, ServeRequest, ServingLoop, StepFailed
from runtime.loop.session import Session
from runtime.loop.step import judge
from runtime.util.errors import RequestError, SpecDecError
from scripts.campaigns.cases import Recorder
from scripts.campaigns.oracle import CheckedEngine, ExactModel, Failure, Injected, one_by_one

VOCAB_SIZE, MAX_DRAFT_LEN = 12, 4
MODEL = ExactModel(1, VOCAB_SIZE)
ALL_BANNED = SamplingConfig(bad_words=tuple((token,) for token in range(VOCAB_SIZE)))
SEEDS = range(4)


def build(max_batch_size: int = 4, block_size: int = 4) -> BuildConfig:
    return BuildConfig(
        compiler="none",
        max_batch_size=max_batch_size,
        max_input_len=100,
        max_seq_len=140,
        max_draft_len=MAX_DRAFT_LEN,
        tokens_per_block=block_size,
        speculative_decoding_mode="draft_tokens_external",
    )


def engine_of(
    max_tokens: int | None = None, model: ExactModel = MODEL, max_num_tokens: int = 512, **settings: int
) -> CheckedEngine:
    return CheckedEngine(model, build(**settings), KVCacheConfig(max_tokens=max_tokens), max_num_tokens, copy=model)


def requests_of(draw: random.Random, num: int) -> list[Request]:
    """Prompts of few tokens, which share beginnings."""
    beginnings = [draw.choices(range(VOCAB_SIZE), k=draw.randrange(1, 20)) for _ in range(2)]
    return [
        Request(
            i,
            (*draw.choice(beginnings), *draw.choices(range(VOCAB_SIZE), k=draw.randrange(4))),
            draw.randrange(1, 24),
            sampling=SamplingConfig(temperature=draw.choice([0.0, 1.0]), top_k=0, random_seed=i),
        )
        for i in range(num)
    ]


def enough_for(requests: list[Request]) -> int:
    return max(len(one.prompt_tokens) + one.max_new_tokens for one in requests)


@dataclass
class Watch:
    """Calls of an engine, noted beside it: no count of its own or of a loop's is read."""

    engine: CheckedEngine
    held: list[int] = field(default_factory=list)
    """Requests that hold blocks, in the order of their admission."""
    num_reused: Counter[int] = field(default_factory=Counter)
    first_reused: dict[int, int] = field(default_factory=dict)
    num_put_back: int = 0
    num_asked: int = 0
    """Admissions that were tried; a test sets it back."""
    num_forwards: int = 0
    num_prompt_tokens: int = 0
    """Tokens of prompts, longer than a draft, that were computed; a test sets it back."""
    steps: list[list[int]] = field(default_factory=list)
    """Requests of each step."""

    def __post_init__(self) -> None:
        self._admit, self._release, self._forward = self.engine.admit, self.engine.release, self.engine._forward
        self._step, self._compute = self.engine.step, self.engine.compute_context
        self.engine.compute_context = self.compute_context  # type: ignore[method-assign]
        self.engine.step = self.step  # type: ignore[method-assign]
        self.engine.admit = self.admit  # type: ignore[method-assign]
        self.engine.release = self.release  # type: ignore[method-assign]
        self.engine._forward = self.forward  # type: ignore[method-assign]

    def admit(self, sequence: Sequence, **reads: bool) -> bool:
        number = sequence.request.id
        self.num_asked += 1
        if not self._admit(sequence, **reads):
            return False
        self.held.append(number)
        self.num_reused[number] += sequence.num_computed
        self.first_reused.setdefault(number, sequence.num_computed)
        return True

    def release(self, sequence: Sequence) -> None:
        if sequence.block_table:
            self.held.remove(sequence.request.id)
            self.num_put_back += not sequence.is_over
        self._release(sequence)

    def forward(self, rows: Any, **by: bool) -> Any:
        self.num_forwards += 1
        assert self.num_forwards < 5000, "the loop goes round and round"
        return self._forward(rows, **by)

    def step(self, rows: Any, *, by_copy: bool = False) -> Any:
        if by_copy:
            return self._step(rows, by_copy=True)
        holders = [next(s for s in self.engine.held.values() if s.block_table is row.block_table) for row in rows]
        self.steps.append([sequence.request.id for sequence in holders])
        missing = [len(sequence.tokens) - sequence.num_computed for sequence in holders]
        self.num_prompt_tokens += sum(num for num in missing if num > MAX_DRAFT_LEN + 1)
        return self._step(rows)

    def compute_context(self, sequence: Sequence, num_tokens: int) -> None:
        self.num_prompt_tokens += num_tokens
        self._compute(sequence, num_tokens)

    @property
    def num_steps(self) -> Counter[int]:
        return Counter(number for step in self.steps for number in step)


def drafter_of(kind: str) -> Recorder | None:
    """`model`: a draft model whose own engine says what is wrong with its K/V."""
    if kind == "none":
        return None
    if kind == "ngram":
        return Recorder(NgramLookup(2))
    engine = engine_of(400, ExactModel(2, VOCAB_SIZE))
    return Recorder(DraftModel(engine, VOCAB_SIZE, use_logits=False))


@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
@pytest.mark.parametrize("seed", SEEDS)
def test_leader_mode_serves_the_oldest_first_and_counts_what_it_does(seed: int, drafter: str) -> None:
    draw = random.Random(seed)
    requests = requests_of(draw, draw.randrange(2, 9))
    engine = engine_of(int(enough_for(requests) * draw.choice([1, 1.5, 3])), max_num_tokens=draw.choice([7, 30]))
    watch, recorder, times = Watch(engine), drafter_of(drafter), LoopTimes()
    leader = Scheduler(engine, recorder, MAX_DRAFT_LEN if recorder else 0, times)
    sequences = [Sequence.start(request) for request in requests]
    for sequence in sequences:
        leader.add(sequence)
    has_ended, num_iterations = True, 0
    while leader.has_work:
        unfinished = [one.request.id for one in sequences if not one.is_over]
        watch.num_asked = 0
        may_join = bool(leader.waiting) and len(leader.running) < engine.max_batch_size
        watch.num_prompt_tokens = 0
        before = sum(one.is_over for one in sequences)
        num_iterations += 1
        step = leader.step()
        assert watch.num_prompt_tokens <= engine.max_num_tokens
        in_step = {*watch.held, *(one.request.id for one, _ in step)}
        assert in_step == set(unfinished[: len(in_step)]), "a younger request has blocks, and an older one has none"
        assert watch.num_asked or not (has_ended and may_join), "a place was left, and nobody was asked"
        has_ended = sum(one.is_over for one in sequences) > before
    assert times.num_preemptions == watch.num_put_back
    assert times.num_iterations == num_iterations
    check_all(requests, sequences, watch, recorder)


@pytest.mark.parametrize("seed", SEEDS)
def test_prompts_of_a_step_share_what_it_may_compute_and_delay_nobody(seed: int) -> None:
    """The cache has room for all. Whoever generates gets a token in each step, whoever comes."""
    draw = random.Random(seed)
    requests = [Request(i, tuple(draw.choices(range(12), k=draw.randrange(6, 20))), 9) for i in range(8)]
    engine = engine_of(max_num_tokens=draw.randrange(6, 40))
    watch, leader = Watch(engine), Scheduler(engine, None, 0)
    waiting = [Sequence.start(request) for request in requests]
    while leader.has_work or waiting:
        if (waiting and draw.random() < 0.5) or not leader.has_work:
            leader.add(waiting.pop())
        generating = {one.request.id for one in leader.running if one.num_generated}
        watch.num_prompt_tokens = 0
        step = leader.step()
        assert watch.num_prompt_tokens <= engine.max_num_tokens
        assert generating <= {one.request.id for one, _ in step}
    engine.check_books()


@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
@pytest.mark.parametrize("seed", SEEDS)
def test_orchestrator_mode_takes_turns_and_counts_who_waits(seed: int, drafter: str) -> None:
    draw = random.Random(seed)
    requests = requests_of(draw, draw.randrange(2, 5))
    engine = engine_of(int(enough_for(requests) * draw.choice([1, 1.5, 3])))
    watch, recorder, times = Watch(engine), drafter_of(drafter), LoopTimes()
    sequences: dict[int, Sequence] = {}
    for sequence, _ in orchestrator.generate(engine, requests, recorder, MAX_DRAFT_LEN if recorder else 0, times):
        sequences[sequence.request.id] = sequence
    last = {number: i for i, step in enumerate(watch.steps) for number in step}
    waiting = [sum(i <= end for end in last.values()) - len(step) for i, step in enumerate(watch.steps)]
    assert times.num_preemptions == sum(waiting)
    assert times.num_iterations == len(watch.steps)
    for i, step in enumerate(watch.steps):
        num_steps = Counter(number for one in watch.steps[: i + 1] for number in one)
        unfinished = [number for number, end in last.items() if end > i]
        assert step and max(num_steps.values()) - min((num_steps[one] for one in unfinished), default=99) <= 1
    check_all(requests, list(sequences.values()), watch, recorder)


def check_all(requests: list[Request], sequences: list[Sequence], watch: Watch, recorder: Recorder | None) -> None:
    """Outputs, counts and books when all have ended."""
    assert len(sequences) == len(requests)
    for sequence in sequences:
        request, stats = sequence.request, sequence.stats
        assert sequence.output_tokens == one_by_one(MODEL, request)
        assert stats.num_reused_tokens == watch.num_reused[request.id]
        assert stats.num_generated_tokens == len(sequence.output_tokens)
        assert stats.num_generated_tokens == stats.num_accepted_draft_tokens + stats.num_steps - cut_of(sequence)
        assert stats.num_draft_tokens == sum(stats.per_step_drafted)
        assert len(stats.per_step_drafted) == stats.num_steps == watch.num_steps[request.id]
    watch.engine.check_books()
    assert watch.engine.cache_usage == 0 and not watch.held
    if recorder is not None:
        assert not recorder.remembered


def cut_of(sequence: Sequence) -> int:
    """1 if the budget ended within the tokens that the last step accepted, which then has none of the target's own."""
    stats = sequence.stats
    return int(stats.num_accepted_draft_tokens + stats.num_steps > len(sequence.output_tokens))


class Clock:
    """Stands in for `time.perf_counter`: it goes on while a call is made that takes time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def takes(self, seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*inputs: Any) -> Any:
            self.now += seconds
            return call(*inputs)

        return timed


@pytest.mark.parametrize("loop", [orchestrator, scheduler])
def test_times_are_those_of_its_own_steps_in_both_loops(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting takes a second by this clock and a step ten; the engine has been used before."""
    clock, engine, drafter = Clock(monkeypatch), engine_of(), NgramLookup(2)
    monkeypatch.setattr(engine, "_step", clock.takes(10, engine._step))
    monkeypatch.setattr(drafter, "propose", clock.takes(1, drafter.propose))
    for _ in range(2):
        times = LoopTimes()
        for _ in loop.generate(engine, [Request(i, (1, 2, i), 8) for i in range(3)], drafter, 4, times):
            pass
        n = times.num_iterations
        assert n > 2 and times == LoopTimes(11.0 * n, float(n), 0.0, 10.0 * n, n)


@pytest.mark.parametrize("loop", [orchestrator, scheduler])
@pytest.mark.parametrize("seed", range(2))
def test_request_that_cannot_go_on_ends_alone(loop: Any, seed: int) -> None:
    draw = random.Random(seed)
    requests = requests_of(draw, 4)
    fails = draw.randrange(4)
    requests[fails] = Request(fails, (1, 2), 9, sampling=ALL_BANNED)
    engine, finished = engine_of(), dict[int, list[int]]()
    watch = Watch(engine)
    with pytest.raises(RequestError, match="no token left"):
        for sequence, _ in loop.generate(engine, requests, None, 0):
            finished[sequence.request.id] = sequence.output_tokens
    assert finished == {one.id: one_by_one(MODEL, one) for one in requests if one.id != fails}
    engine.check_books()
    assert not watch.held


@pytest.mark.parametrize("seed", SEEDS)
def test_aborted_requests_leave_nothing_to_anybody(seed: int) -> None:
    draw = random.Random(seed)
    requests = requests_of(draw, 6)
    engine = engine_of(int(enough_for(requests) * 1.5))
    recorder = Recorder(NgramLookup(2))
    leader = Scheduler(engine, recorder, MAX_DRAFT_LEN)
    sequences = [Sequence.start(request) for request in requests]
    for sequence in sequences:
        leader.add(sequence)
    aborted = set[int]()
    while leader.has_work:
        leader.step()
        left = [one for one in sequences if not one.is_over and one.request.id not in aborted]
        if left and draw.random() < 0.3:
            chosen = draw.choice(left)
            leader.drop(chosen)
            aborted.add(chosen.request.id)
            assert chosen.request.id not in recorder.remembered and not chosen.block_table
    for sequence in sequences:
        expected = one_by_one(MODEL, sequence.request)
        number = len(sequence.output_tokens)
        assert sequence.output_tokens == expected[:number]
        assert sequence.request.id in aborted or number == len(expected)
    assert not recorder.remembered
    engine.check_books()


# --- the engine ---


@pytest.mark.parametrize("seed", SEEDS)
def test_requests_that_fit_are_taken_and_others_are_refused(seed: int) -> None:
    """The last token's keys are never needed, and the null block holds no token."""
    draw = random.Random(seed)
    max_tokens, block_size = draw.randrange(4, 60), draw.choice([1, 3, 4, 16])
    engine = engine_of(max_tokens, block_size=block_size)
    room = -(-max_tokens // block_size) * block_size
    assert engine.num_cache_tokens == room
    for num_tokens in (room - 1, room, room + 1, room + 2):
        num_prompt = draw.randrange(1, num_tokens) if num_tokens > 1 else 1
        request = Request(0, (1,) * num_prompt, max(num_tokens - num_prompt, 1))
        if len(request.prompt_tokens) + request.max_new_tokens - 1 <= room:
            engine.check_request(request)
            (*_, (sequence, _)) = scheduler.generate(engine, [request], None, 0)
            assert sequence.output_tokens == one_by_one(MODEL, request)
        else:
            with pytest.raises(SpecDecError, match=str(room)):
                engine.check_request(request)


def test_usage_is_the_share_of_blocks_that_are_held() -> None:
    engine = engine_of(40)  # ten blocks of 4
    sequences = [Sequence.start(Request(i, (i,) * 7, 1)) for i in range(5)]
    assert engine.cache_usage == 0
    for number, sequence in enumerate(sequences, 1):
        assert engine.admit(sequence)
        assert engine.cache_usage == pytest.approx(number * 2 / 10)
    assert not engine.admit(Sequence.start(Request(9, (9,), 1)))
    for sequence in sequences:
        engine.release(sequence)
    assert engine.cache_usage == 0


def test_cleared_cache_is_as_cold_as_a_new_one() -> None:
    """Neither keys nor states are found, and no slot is taken by what nobody can find."""
    model = ExactModel(1, VOCAB_SIZE, num_before=2)
    engine = CheckedEngine(model, build(), KVCacheConfig(state_checkpoint_interval=5), 512)
    request = Request(0, tuple(i % 7 for i in range(30)), 4)
    counts = []
    for _ in range(2):
        reused = []
        for _ in range(2):
            (*_, (sequence, _)) = scheduler.generate(engine, [request], None, 0)
            reused.append(sequence.stats.num_reused_tokens)
        states = engine._states
        assert states is not None and states.manager._kept
        counts.append((reused, len(states.manager._kept)))
        engine.clear_cache()
        assert not states.manager._kept
        states.manager.check_integrity()
    assert counts[0] == counts[1] and counts[0][0][1] > counts[0][0][0] == 0


@pytest.mark.parametrize("when", ["before", "after"])
def test_admission_that_is_interrupted_claims_nothing(when: Any) -> None:
    engine = engine_of()
    first = Request(0, (1, 2, 3, 4, 5, 6, 7), 1)
    for _ in scheduler.generate(engine, [first], None, 0):
        pass
    second = Sequence.start(Request(1, (1, 2, 3, 4, 5, 9, 9), 3))  # whose second block is a copy of the first's
    engine.calls.failure = Failure("block copy", engine.calls.numbers["block copy"], when)
    with pytest.raises(Injected):
        engine.admit(second)
    engine.calls.failure = None
    assert second.num_computed == 0
    engine.release(second)
    engine.check_books()
    for request in (first, second.request):
        (*_, (sequence, _)) = scheduler.generate(engine, [request], None, 0)
        assert sequence.output_tokens == one_by_one(MODEL, request)


def test_time_of_the_copy_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the target takes 10 s by this clock, and one of its copy 1 s."""
    clock, engine = Clock(monkeypatch), engine_of()
    assert engine._copy_step is not None
    engine._step, engine._copy_step = clock.takes(10, engine._step), clock.takes(1, engine._copy_step)
    sequence = Sequence.start(Request(0, (1, 2, 3), 9))
    engine.admit(sequence)
    for number in range(1, 4):
        engine.step([generation_row(sequence, [])], by_copy=True)
        assert (engine.step_time_s, engine.copy_time_s) == (10 * (number - 1), number)
        forward(engine, [sequence], [[]])
        assert (engine.step_time_s, engine.copy_time_s) == (10 * number, number)
    engine.release(sequence)


@pytest.mark.parametrize("num_drafted", range(4))
def test_kept_logits_are_those_of_each_token(num_drafted: int) -> None:
    request = Request(0, (1, 2, 3), 9, keep_logits=True)
    tokens = one_by_one(MODEL, request)
    engine, sequence = engine_of(), Sequence.start(request)
    engine.admit(sequence)
    draft = Draft(tokens[:num_drafted])
    (verdict,) = judge(engine, [sequence], [draft])
    assert len(sequence.commit(draft, verdict)) == len(sequence.logits) == num_drafted + 1  # type: ignore[arg-type]
    for i, logits in enumerate(sequence.logits):
        assert logits.equal(MODEL.logits([*request.prompt_tokens, *tokens[:i]])[0])
    engine.release(sequence)


# --- the session ---


@pytest.mark.parametrize("mode", ["orchestrator", "leader"])
@pytest.mark.parametrize("seed", range(2))
def test_session_gives_outputs_in_the_order_of_its_requests(mode: Any, seed: int) -> None:
    requests = requests_of(random.Random(seed), 7)
    requests = [requests[i] for i in random.Random(seed).sample(range(7), 7)]
    session = Session(engine_of(), mode, opened=OpenDrafter(NgramLookup(2), MAX_DRAFT_LEN))
    generation = session.run(requests)
    assert [one.request for one in generation.sequences] == requests
    assert [one.output_tokens for one in generation.sequences] == [one_by_one(MODEL, one) for one in requests]


@pytest.mark.parametrize("mode", ["orchestrator", "leader"])
def test_run_without_the_drafter_begins_cold_and_takes_no_time_in_a_draft_model(mode: Any) -> None:
    request = Request(0, tuple(range(10)), 3)
    session = Session(engine_of(), mode, opened=OpenDrafter(NgramLookup(2), MAX_DRAFT_LEN))
    session.engine.copy_time_s = 5.0  # of runs before

    def first_reused(sequence: Sequence, tokens: list[int]) -> None:
        found.append(sequence.stats.num_reused_tokens)

    for again in (False, True):
        found: list[int] = []
        run = session.run_without_drafter if again else session.run
        generation = run([request], on_tokens=first_reused)
        assert found[0] == 0 and generation.times.draft_model_time_s == 0
    session.run([request], on_tokens=first_reused)
    assert found[-3] == 9  # and what it left is found


# --- the serving loop ---


@contextmanager
def serving(engine: CheckedEngine, drafter: Drafter | None = None, max_queue_len: int = 100) -> Iterator[ServingLoop]:
    opened = OpenDrafter(drafter, MAX_DRAFT_LEN) if drafter else None
    loop = ServingLoop(Session(engine, "leader", opened=opened), LoopLimits(max_queue_len), lambda answers: None)
    loop.start()
    try:
        yield loop
    finally:
        loop.stop(0)
    engine.check_books()


def wait_for(answers: list[RequestHandle]) -> None:
    wait_until(lambda: all(answer.progress.is_over for answer in answers))


class Always:
    """Drafts one token, the same whatever came before."""

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [Draft([3][: min(max_draft_len, sequence.max_draft_len)]) for sequence in sequences]

    def forget(self, request_id: int) -> None: ...


@pytest.mark.parametrize("seed", range(6))  # the fifth and the sixth find again what was preempted
def test_totals_of_a_server_are_sums_of_its_answers(seed: int) -> None:
    """Each request drafts in its own way: as the server does, with a drafter of its own, or not at all."""
    draw = random.Random(seed)
    requests = requests_of(draw, draw.randrange(3, 9))
    engine = engine_of(int(enough_for(requests) * draw.choice([1, 1.5, 3])))
    watch = Watch(engine)
    with serving(engine, SelfDraftModel(engine, use_logits=False) if seed % 2 else NgramLookup(2)) as loop:
        ways = draw.choices(["default", "own", "none"], k=len(requests))
        asked = [
            ServeRequest(one, drafts_by_default=way == "default", drafter=Always() if way == "own" else None)
            for one, way in zip(requests, ways, strict=True)
        ]
        answers = loop.submit(asked)
        wait_for(answers)
        assert not loop._router._own and loop.num_running == loop.num_waiting == 0
        totals = loop.totals
    for answer, way in zip(answers, ways, strict=True):
        drafted = answer.sequence.stats.per_step_drafted
        assert way == "default" or {*drafted[:-1]} <= {int(way == "own")}
    for answer in answers:
        assert answer.output_tokens == one_by_one(MODEL, answer.request)
        assert answer.progress.num_cached_tokens == watch.first_reused[answer.request.id]
        assert answer.progress.num_tokens == len(answer.output_tokens)
    stats = [answer.sequence.stats for answer in answers]
    assert totals.num_prompt_tokens == sum(len(one.prompt_tokens) for one in requests)
    assert totals.num_generated_tokens == sum(len(one_by_one(MODEL, one)) for one in requests)
    assert totals.num_drafts == sum(one.num_spec_steps for one in stats)
    assert totals.num_draft_tokens == sum(one.num_draft_tokens for one in stats)
    assert totals.num_accepted_tokens == sum(one.num_accepted_draft_tokens for one in stats)
    assert sum(totals.num_accepted_per_position) == totals.num_accepted_tokens
    assert totals.num_finished == {"length": len(requests)}


def test_server_ends_a_request_that_cannot_go_on_and_no_other(said: Said) -> None:
    requests = [*requests_of(random.Random(0), 3), Request(3, (1, 2), 9, sampling=ALL_BANNED)]
    with serving(engine_of(), NgramLookup(2)) as loop:
        answers = loop.submit([ServeRequest(request) for request in requests])
        wait_for(answers)
        assert loop.totals.num_finished == {"error": 1, "length": 3}
    said(answers[3].progress.error)
    assert [one.output_tokens for one in answers[:3]] == [one_by_one(MODEL, one) for one in requests[:3]]


def test_server_drops_who_is_cancelled_before_the_next_step(gate: Gate) -> None:
    """Four run, which are in their fourth step, and two wait."""
    requests = [Request(i, (i, 1), 20) for i in range(6)]
    with serving(engine_of(), Waits()) as loop:
        answers = loop.submit([ServeRequest(request) for request in requests])
        wait_until(lambda: gate.is_reached)
        loop.cancel(answers[1:])
        gate.open()
        wait_for(answers[:1])
        assert loop.totals.num_finished == {"abort": 5, "length": 1}
    assert [one.progress.num_tokens for one in answers] == [20, 4, 4, 4, 0, 0]
    assert answers[0].output_tokens == one_by_one(MODEL, requests[0])


def test_server_drafts_from_what_a_request_may_copy() -> None:
    """Its whole output here."""
    request = Request(0, (1, 2, 3), 20)
    output, num_steps = one_by_one(MODEL, request), []
    for copied in ((), (*request.prompt_tokens, *output)):
        with serving(engine_of(), NgramLookup(2)) as loop:
            answers = loop.submit([ServeRequest(request, copied_tokens=copied)])
            wait_for(answers)
            assert not loop._copied._lookups
        assert answers[0].output_tokens == output
        num_steps.append(answers[0].sequence.stats.num_steps)
    assert num_steps[1] < num_steps[0] / 2


def test_reader_sees_the_tokens_of_whole_steps_only() -> None:
    request = Request(0, (1, 2), 9)
    answer = RequestHandle(ServeRequest(request), Sequence.start(request))
    answer.sequence.tokens += [3, 4, 5]
    for number in range(4):
        answer.progress = Progress(num_tokens=number)
        assert answer.output_tokens == [3, 4, 5][:number]


class FailsOnce:
    """A drafter that fails in the first step with the request 0."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.has_failed = error, False

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        if not self.has_failed and any(sequence.request.id == 0 for sequence in sequences):
            self.has_failed = True
            raise self.error
        return [Draft([])] * len(sequences)

    def forget(self, request_id: int) -> None: ...


@pytest.mark.parametrize("error", [RuntimeError("planted"), SystemExit(3), SpecDecError("planted")], ids=repr)
def test_step_that_fails_ends_those_in_it_alone(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    """Two run, as many as may, and four wait."""
    engine = engine_of(max_batch_size=2)
    requests = [Request(i, (i, 1), 5) for i in range(6)]
    with errors_logged(), serving(engine, FailsOnce(error)) as loop:
        answers = loop.submit([ServeRequest(request) for request in requests])
        wait_for(answers)
    assert "ERROR: a step failed\nTraceback" in capsys.readouterr().err
    failed = [answer for answer in answers if answer.progress.error is not None]
    assert 1 <= len(failed) <= 2 and answers[0] in failed
    assert all(isinstance(answer.progress.error, StepFailed) for answer in failed)
    for answer in answers[2:]:
        assert answer.output_tokens == one_by_one(MODEL, answer.request)


def test_queue_holds_as_many_as_it_says() -> None:
    engine, ids = engine_of(max_batch_size=2), count()

    def ask(number: int) -> list[ServeRequest]:
        return [ServeRequest(Request(next(ids), (1, 2), 3)) for _ in range(number)]

    loop = ServingLoop(Session(engine, "leader"), LoopLimits(3), lambda answers: None)  # which has not begun
    assert loop.capacity == 5
    loop.submit(ask(4))
    with pytest.raises(SpecDecError, match="queue is full"):
        loop.submit(ask(2))
    last = loop.submit(ask(1))
    with pytest.raises(SpecDecError, match="queue is full"):
        loop.submit(ask(1))
    loop.start()
    wait_for(last)
    loop.stop(0)
    engine.check_books()
