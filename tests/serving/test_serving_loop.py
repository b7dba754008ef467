"""The loop behind a server: it answers as the Python API does, lets go at once, and no request ends it."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from sentences import Said
from tiny import hf_greedy, repetitive_prompt
from transformers import PreTrainedModel
from waiting import HANG_S, wait_until

from commands.serve.http.server import errors_logged
from runtime.core.params import SamplingConfig
from runtime.core.request import Draft, Request, Sequence
from runtime.drafters.draft_target import SelfDraft
from runtime.drafters.ngram import NgramLookup
from runtime.drafters.opened import OpenDrafter
from runtime.drafters.protocol import Drafter
from runtime.engine.engine import Engine
from runtime.loop.serving import LoopLimits, QueueFull, RequestHandle, ServeRequest, ServingLoop, StepFailed, Stopping
from runtime.loop.session import Session
from runtime.util.errors import SpecDecError

NUM_NEW_TOKENS = 24


class Watch:
    """Notes what the loop says, and lets tests wait for it."""

    def __init__(self) -> None:
        self.got_on = Event()
        self.num_calls = 0

    def __call__(self, answers: list[RequestHandle]) -> None:
        self.num_calls += 1
        self.got_on.set()


@pytest.fixture
def engine(llama_engine_dir: Path) -> Iterator[Engine]:
    with Engine.open(llama_engine_dir) as opened:
        yield opened


@contextmanager
def running(engine: Engine, drafter: Drafter | None = None, max_queue_len: int = 100) -> Iterator[ServingLoop]:
    opened = OpenDrafter(drafter, 4) if drafter else None
    loop = ServingLoop(Session(engine, "leader", opened=opened), LoopLimits(max_queue_len), Watch())
    loop.start()
    try:
        yield loop
    finally:
        loop.stop(0)
    assert engine._blocks.num_free_blocks == engine._blocks.num_blocks - 1
    engine._blocks.check_integrity()


def requests(num: int, **settings: Any) -> list[Request]:
    ids = count()
    return [
        Request(next(ids), tuple(repetitive_prompt(i, 6 + 5 * i)), NUM_NEW_TOKENS - i, **settings) for i in range(num)
    ]


def answered(loop: ServingLoop, asked: list[ServeRequest]) -> list[RequestHandle]:
    answers = loop.submit(asked)
    wait_until(lambda: all(answer.progress.is_over for answer in answers))
    return answers


def test_answers_are_those_of_the_model(engine: Engine, llama: PreTrainedModel) -> None:
    asked = requests(9)
    with running(engine, NgramLookup(2)) as loop:
        answers = answered(loop, [ServeRequest(request) for request in asked])
        assert loop.num_running == loop.num_waiting == 0
    for answer, request in zip(answers, asked, strict=True):
        assert answer.output_tokens == hf_greedy(llama, list(request.prompt_tokens), request.max_new_tokens)
        assert answer.progress.finish_reason == "length"


def test_answers_of_a_model_that_drafts_for_itself(self_draft_engine_dir: Path, llama: PreTrainedModel) -> None:
    """Beside requests for which nobody drafts, or a lookup does, in one batch."""
    asked = requests(7)
    with Engine.open(self_draft_engine_dir) as engine, running(engine, SelfDraft(engine, use_logits=False)) as loop:
        others = [ServeRequest(request, drafts_by_default=False, drafter=NgramLookup(1)) for request in asked[4:6]]
        nobody = [ServeRequest(request, drafts_by_default=False) for request in asked[6:]]
        answers = answered(loop, [*map(ServeRequest, asked[:4]), *others, *nobody])
        assert loop.totals.num_accepted_tokens > 0
    for answer, request in zip(answers, asked, strict=True):
        assert answer.output_tokens == hf_greedy(llama, list(request.prompt_tokens), request.max_new_tokens)
    assert all(answer.sequence.stats.num_draft_tokens > 0 for answer in answers[:4])


def test_each_request_drafts_in_its_own_way(engine: Engine) -> None:
    (request, *others) = requests(4)
    asked = [
        ServeRequest(request),
        ServeRequest(others[0], drafts_by_default=False),
        ServeRequest(others[1], drafts_by_default=False, drafter=NgramLookup(1)),
        ServeRequest(others[2], drafts_by_default=False, drafter=Always([3, 3])),
    ]
    with running(engine, Always([4])) as loop:
        default, nobody, ngram, always = answered(loop, asked)
        assert loop._router._own == {}
        totals = loop.totals
    assert set(default.sequence.stats.per_step_drafted) <= {0, 1} != {0}
    assert nobody.sequence.stats.num_draft_tokens == 0
    assert ngram.sequence.stats.num_draft_tokens > 0
    assert 2 in always.sequence.stats.per_step_drafted
    stats = [answer.sequence.stats for answer in (default, nobody, ngram, always)]
    assert totals.num_draft_tokens == sum(one.num_draft_tokens for one in stats)
    assert totals.num_accepted_tokens == sum(one.num_accepted_draft_tokens for one in stats)
    assert sum(totals.num_accepted_per_position) == totals.num_accepted_tokens
    assert totals.num_drafts == sum(one.num_spec_steps for one in stats)
    assert totals.num_generated_tokens == sum(one.num_generated_tokens for one in stats)
    assert totals.num_prompt_tokens == sum(len(one.request.prompt_tokens) for one in asked)
    assert totals.num_finished == {"length": 4}


class Always:
    """Drafts the same whatever came before."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [Draft(self.tokens[: min(max_draft_len, sequence.max_draft_len)]) for sequence in sequences]

    def forget(self, request_id: int) -> None: ...


class Gate(Always):
    """Drafts nothing, and waits at every step until it is let on."""

    def __init__(self) -> None:
        super().__init__([])
        self.may_go, self.has_come = Event(), Event()

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        self.has_come.set()
        assert self.may_go.wait(HANG_S)
        return super().propose(sequences, max_draft_len)


def test_who_is_cancelled_is_gone_before_the_next_step(engine: Engine) -> None:
    gate = Gate()
    with running(engine, gate) as loop:
        answers = loop.submit([ServeRequest(request) for request in requests(6)])
        assert gate.has_come.wait(HANG_S)
        loop.cancel(answers[1:])
        gate.may_go.set()
        wait_until(lambda: len(loop.unfinished()) <= 1)
        assert all(answer.progress.num_tokens <= 1 for answer in answers[1:])
        wait_until(lambda: answers[0].progress.is_over)
        assert answers[0].progress.num_tokens == NUM_NEW_TOKENS
        assert loop.totals.num_finished == {"abort": 5, "length": 1}


def test_all_or_none_are_taken_into_the_queue(engine: Engine) -> None:
    gate = Gate()
    with running(engine, gate, max_queue_len=2) as loop:
        first = loop.submit([ServeRequest(request) for request in requests(5)])
        more = [ServeRequest(Request(100 + i, (4, 5), 2)) for i in range(2)]
        with pytest.raises(QueueFull):
            loop.submit(more)
        assert len(loop.unfinished()) == 5
        loop.submit(more[:1])
        gate.may_go.set()
        wait_until(lambda: not loop.unfinished())
        assert all(answer.progress.finish_reason for answer in first)
        assert len(answered(loop, more[1:])) == 1


def test_a_request_that_cannot_go_on_ends_alone(engine: Engine, said: Said) -> None:
    everything = tuple((token,) for token in range(engine.config.vocab_size))
    impossible = Request(50, (5, 6), 8, sampling=SamplingConfig(bad_words=everything))
    others = requests(2)
    with running(engine, NgramLookup(2)) as loop:
        failed, *fine = answered(loop, [ServeRequest(impossible), *(ServeRequest(request) for request in others)])
        assert loop.totals.num_finished == {"error": 1, "length": 2}
    said(failed.progress.error)
    assert [answer.progress.finish_reason for answer in fine] == ["length", "length"]


class Fails(Always):
    """Raises as often as it is told to."""

    def __init__(self, error: BaseException) -> None:
        super().__init__([])
        self.error, self.num_left = error, 1

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        self.num_left -= 1
        if self.num_left >= 0:
            raise self.error
        return super().propose(sequences, max_draft_len)


@pytest.mark.parametrize("error", [ValueError("planted"), SystemExit(3), SpecDecError("planted")])
def test_a_step_that_fails_ends_who_is_in_it_and_nobody_else(
    engine: Engine, error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = requests(7)
    with errors_logged(), running(engine, Fails(error)) as loop:
        answers = answered(loop, [ServeRequest(request) for request in asked])
        later = answered(loop, [ServeRequest(Request(70, (5, 6, 7), 5))])
    failed = [answer for answer in answers if answer.progress.error is not None]
    assert 1 <= len(failed) <= 4 and all(isinstance(one.progress.error, StepFailed) for one in failed)
    fine = [answer for answer in answers if answer.progress.error is None]
    assert len(fine) >= 3 and all(answer.progress.finish_reason == "length" for answer in [*fine, *later])
    assert "ERROR: a step failed\nTraceback" in capsys.readouterr().err


def test_what_runs_is_finished_and_nothing_new_is_taken_at_the_end(engine: Engine) -> None:
    gate = Gate()
    with running(engine, gate) as loop:
        answers = loop.submit([ServeRequest(request) for request in requests(6)])
        assert gate.has_come.wait(HANG_S)
        loop.refuse_new()
        assert not loop.takes_requests
        with pytest.raises(Stopping):
            loop.submit([ServeRequest(Request(90, (4, 5), 2))])
        gate.may_go.set()
        loop.stop()
        assert [answer.progress.finish_reason for answer in answers] == ["length"] * 6
