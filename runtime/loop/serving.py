"""The leader loop of a server: a thread of its own, which takes requests and writes answers.

Callers never block: `submit` puts requests into a bounded queue, and `cancel` marks answers that the loop drops before
its next step. The loop's thread writes sequences. Other threads read them no further than the last `Progress` says,
which is replaced as a whole after each step. No error of a request ends the loop: the answers of a failed step get the
error, and later requests are answered. The loop ends with its engine; `failure` then has the reason.
"""

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from threading import Condition, Thread

from runtime.core.request import Draft, Request, Sequence
from runtime.core.stats import FinishReason
from runtime.drafters.chain import LongestMatch
from runtime.drafters.opened import BoundedDrafter
from runtime.drafters.prediction import CopiedTexts
from runtime.drafters.protocol import Drafter, ask, check_request
from runtime.drafters.under_grammar import UnderGrammar
from runtime.loop.prefill_chunks import ChunkSizes
from runtime.loop.scheduler import Scheduler
from runtime.loop.session import Session
from runtime.util.errors import SpecDecError


@dataclass
class EngineStats:
    """Counts that only grow. Each is written by a single thread, after every step."""

    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_position: list[int] = field(default_factory=list)
    num_finished: Counter[str] = field(default_factory=Counter)
    """Numbers of finished answers, by reason: stop, length, abort or error."""

    def count_step(self, sequence: Sequence, num_new_tokens: int) -> None:
        """Count the last step of a sequence; with its first step also its prompt."""
        stats = sequence.stats
        if stats.num_steps == 1:
            self.num_prompt_tokens += len(sequence.request.prompt_tokens)
        self.num_generated_tokens += num_new_tokens
        num_drafted, num_accepted = stats.per_step_drafted[-1], stats.per_step_accepted[-1]
        if num_drafted:
            self.num_drafts += 1
            self.num_draft_tokens += num_drafted
            self.num_accepted_tokens += num_accepted
            missing = num_drafted - len(self.num_accepted_per_position)
            self.num_accepted_per_position += [0] * missing
            for i in range(num_accepted):
                self.num_accepted_per_position[i] += 1


class DrafterRouter:
    """Asks each request's own drafter, or `default` for requests without one."""

    def __init__(self, default: Drafter | None) -> None:
        self.default = default
        self._own: dict[int, Drafter | None] = {}

    def assign(self, request_id: int, drafter: Drafter | None) -> None:
        """Draft for a request with this drafter alone, or with none, until the request is forgotten."""
        self._own[request_id] = drafter

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        drafts = [Draft([])] * len(sequences)
        places: dict[int, tuple[Drafter, list[int]]] = {}
        for i, sequence in enumerate(sequences):
            drafter = self._own.get(sequence.request.id, self.default)
            if drafter is not None:
                places.setdefault(id(drafter), (drafter, []))[1].append(i)
        for drafter, indices in places.values():
            proposed = ask(drafter, [sequences[i] for i in indices], max_draft_len)
            for i, draft in zip(indices, proposed, strict=True):
                drafts[i] = draft
        return drafts

    def forget(self, request_id: int) -> None:
        drafter = self._own.pop(request_id, self.default)
        if drafter is not None:
            drafter.forget(request_id)


_LOG = logging.getLogger(__name__)


class QueueFull(SpecDecError):
    """The queue is full: no further request may wait."""


class ClientFull(SpecDecError):
    """This client has as many unfinished requests as one client may have."""


class Stopping(SpecDecError):
    """The server is about to end."""


class StepFailed(SpecDecError):
    """The step that computed a request failed, for a reason outside the request."""


@dataclass(frozen=True)
class ServeRequest:
    """A request, and its drafter: the server's with `drafts_by_default`, otherwise `drafter`, or none."""

    request: Request
    drafts_by_default: bool = True
    drafter: Drafter | None = None
    copied_tokens: Seq[int] = ()
    """Text, beside the prompt, of which the output may copy parts; for the server's drafter."""
    counts_output: bool = True
    """False if only the prompt is scored, and the tokens that are generated are discarded."""
    priority: int = 0
    """Priority among the requests of a client: the lowest is answered first."""


@dataclass(frozen=True)
class Progress:
    """The part of an answer that may be read: numbers of generated tokens and of steps."""

    num_tokens: int = 0
    num_steps: int = 0
    num_predicted_tokens: int = 0
    """Draft tokens from the output that the request predicts."""
    num_accepted_predicted_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the K/V cache."""
    finish_reason: FinishReason | None = None
    error: SpecDecError | None = None
    """Reason why the answer ended without being complete."""

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.error is not None


@dataclass(eq=False)
class RequestHandle:
    """A sequence that is being answered.

    `owner` is any object that its reader wants to get back when the answer has grown. `client` is the client that
    asked, and `num_before` the number of that client's unfinished sequences at that time.
    """

    asked: ServeRequest
    sequence: Sequence
    owner: object = None
    client: Hashable = None
    num_before: int = 0
    progress: Progress = field(default_factory=Progress)
    is_cancelled: bool = False

    @property
    def request(self) -> Request:
        return self.asked.request

    @property
    def output_tokens(self) -> list[int]:
        """The output tokens that may be read."""
        start = len(self.request.prompt_tokens)
        return self.sequence.tokens[start : start + self.progress.num_tokens]


@dataclass(frozen=True)
class LoopLimits:
    """Limits of a loop.

    `max_queue_len`: waiting sequences. `max_requests_per_client`: requests of a client that run or wait. `max_gap_s`:
    time between two tokens of a sequence while prompts are computed, unless 2.5 steps are longer
    (`runtime.loop.prefill_chunks`); infinite to compute prompts first.
    """

    max_queue_len: int
    max_requests_per_client: int | None = None
    max_gap_s: float = 0.0


class ServingLoop:
    """Answers requests with an engine until it is stopped. Clients share it by `runtime.loop.fair_queue`. `on_progress`
    is called in the loop's thread after each step, with the answers that have grown.
    """

    def __init__(
        self, session: Session, limits: LoopLimits, on_progress: Callable[[list[RequestHandle]], None]
    ) -> None:
        self.engine, self._draft_engine = session.engine, session.draft_engine
        self.owner_pools = session.opened.owner_pools if session.opened else None
        """Pools of earlier outputs, if the server's drafter searches them."""
        self.limits = limits
        self.totals = EngineStats()
        self._on_progress = on_progress
        self._copied = CopiedTexts()
        self._router = DrafterRouter(_default_drafter(session, self._copied))
        gap_s = limits.max_gap_s
        chunks = None if gap_s == math.inf else ChunkSizes(session.engine.max_num_tokens, gap_s)
        self._scheduler = Scheduler(session.engine, self._router, session.engine.max_draft_len, chunks=chunks)
        self._condition = Condition()
        self._arrived: deque[RequestHandle] = deque()
        self._answers: dict[int, RequestHandle] = {}
        """Unfinished answers, by the ids of their requests."""
        self._num_of: dict[Hashable, Counter[int]] = {}
        """Number of unfinished answers of each client, by the ids of the answers' owners."""
        self._has_cancelled = False
        self._is_stopping = False
        self._thread = Thread(target=self._run, name="specdec-serving", daemon=True)
        self.next_request_id = count().__next__

    @property
    def default_drafter(self) -> Drafter | None:
        return self._router.default

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        return max(len(self._answers) - self.num_running, 0)

    @property
    def num_clients(self) -> int:
        """Number of clients with unfinished sequences."""
        return len(self._num_of)

    @property
    def num_preemptions(self) -> int:
        """Number of times that a sequence gave its K/V blocks back before its end, because blocks ran out."""
        return self._scheduler.times.num_preemptions

    @property
    def num_turns(self) -> int:
        """Number of times that a running sequence made room for another sequence's turn."""
        return self._scheduler.num_turns

    @property
    def capacity(self) -> int:
        """Number of sequences that can be unfinished at once (`_check_room` says when there may be more)."""
        return self.engine.max_batch_size + self.limits.max_queue_len

    @property
    def takes_requests(self) -> bool:
        return self._thread.is_alive() and not self._is_stopping and self.failure is None

    @property
    def failure(self) -> SpecDecError | None:
        """The reason why this engine, or the draft model's, computes no more steps and no request is answered."""
        return self.engine.failure or (self._draft_engine.failure if self._draft_engine else None)

    def start(self) -> None:
        self._thread.start()

    def submit(self, asked: Seq[ServeRequest], owner: object = None, client: Hashable = None) -> list[RequestHandle]:
        """Queue all of these requests or none. SpecDecError if one can never be answered; QueueFull, ClientFull or
        Stopping if they cannot be queued now.
        """
        for one in asked:
            self.engine.check_request(one.request)
            check_request(self._router.default if one.drafts_by_default else one.drafter, one.request)
        with self._condition:
            if self.failure is not None:
                raise self.failure
            if self._is_stopping:
                raise Stopping("the server is shutting down", hint="ask again later")
            self._check_room(len(asked), client)
            num_before = self._num_of.get(client, Counter()).total()
            answers = [RequestHandle(one, Sequence.start(one.request), owner, client, num_before) for one in asked]
            for answer in answers:
                self._answers[answer.request.id] = answer
                self._count(answer, 1)
                self._arrived.append(answer)
            self._condition.notify()
        return answers

    def _check_room(self, num_asked: int, client: Hashable) -> None:
        """QueueFull or ClientFull if there is no room for more sequences of a client.

        A named client without sequences finds a queue of twice the length if another named client holds more than half
        of the room.
        """
        most = self.limits.max_requests_per_client
        if most is not None and len(self._num_of.get(client, ())) >= most:
            raise ClientFull(f"this client has {most} requests on their way, the most it may have", hint="ask later")
        room = self.capacity
        if client is not None and client not in self._num_of:
            others = (num_of.total() for other, num_of in self._num_of.items() if other is not None)
            room += self.limits.max_queue_len if max(others, default=0) > room / 2 else 0
        if len(self._answers) + num_asked > room:
            raise QueueFull(
                f"the queue is full, {self.num_waiting} requests wait and {self.num_running} run", hint="ask later"
            )

    def _count(self, answer: RequestHandle, change: int) -> None:
        """Count an answer of a client that has come (1), or has ended (-1)."""
        num_of = self._num_of.setdefault(answer.client, Counter())
        owner = id(answer if answer.owner is None else answer.owner)
        num_of[owner] += change
        if not num_of[owner]:
            del num_of[owner]
        if not num_of:
            del self._num_of[answer.client]

    def cancel(self, answers: Iterable[RequestHandle]) -> None:
        """Cancel these answers; they are removed before the next step."""
        with self._condition:
            for answer in answers:
                if not answer.progress.is_over:
                    answer.is_cancelled = self._has_cancelled = True
            self._condition.notify()

    def unfinished(self) -> list[RequestHandle]:
        """Unfinished answers, the oldest first."""
        with self._condition:
            return list(self._answers.values())

    def refuse_new(self) -> None:
        """Refuse new requests from now on. Unfinished requests are answered, and then the thread ends."""
        with self._condition:
            self._is_stopping = True
            self._condition.notify()

    def stop(self, timeout_s: float | None = None) -> None:
        """End the loop. Unfinished requests have `timeout_s` seconds; None for no limit."""
        self.refuse_new()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
            self.cancel(self.unfinished())
            self._thread.join()

    def _run(self) -> None:
        while self._wait_for_work():
            try:
                self._step()
            except BaseException as error:  # whatever a drafter raises, those who come later are answered
                if self.failure is not None:
                    return self._fail_all()
                _LOG.exception("a step failed")
                self._fail_step(error)

    def _wait_for_work(self) -> bool:
        """Take in new requests and drop cancelled ones, waiting if there are none; False when the loop is to end."""
        with self._condition:
            while not (self._arrived or self._has_cancelled or self._scheduler.has_work or self._is_stopping):
                self._condition.wait()
            arrived, self._arrived = self._arrived, deque()
            cancelled = [one for one in self._answers.values() if one.is_cancelled] if self._has_cancelled else []
            self._has_cancelled = False
            is_over = self._is_stopping and not (arrived or self._answers)
        for answer in arrived:
            if not answer.asked.drafts_by_default:
                self._router.assign(answer.request.id, answer.asked.drafter)
            if answer.asked.copied_tokens:
                self._copied.add(answer.request.id, list(answer.asked.copied_tokens))
            self._scheduler.add(answer.sequence, answer.client, answer.asked.priority)
        for answer in cancelled:
            self._scheduler.drop(answer.sequence)
            self._end(answer, "abort")
        return not is_over

    def _step(self) -> None:
        if not self._scheduler.has_work:
            return
        advanced = []
        for sequence, new_tokens in self._scheduler.step():
            answer = self._answers[sequence.request.id]
            self.totals.count_step(sequence, len(new_tokens) if answer.asked.counts_output else 0)
            answer.progress = _progress_of(sequence, answer.progress)
            if sequence.finish_reason is not None:
                self._end(answer, "length" if sequence.finish_reason == "length" else "stop")
            advanced.append(answer)
        failed, self._scheduler.failed = self._scheduler.failed, []
        for sequence in failed:
            advanced.append(self._fail(self._answers[sequence.request.id], sequence.error))
        self._notify(advanced)

    def _fail_all(self) -> None:
        """Fail all answers, after the engine has ended."""
        assert self.failure is not None
        cause = StepFailed(self.failure.message, hint=self.failure.hint)
        self._notify([self._fail(answer, cause) for answer in self.unfinished()])

    def _fail_step(self, error: BaseException) -> None:
        """Fail the answers in the step; if there were none, the first waiting answer, which could not be admitted."""
        cause = StepFailed(f"the step failed: {error or type(error).__name__}", hint="the server's log says where")
        failed = list(self._scheduler.running) or [self._scheduler.first_waiting]
        answers = []
        for sequence in failed:
            with suppress(Exception):  # what failed may fail again when it is told to forget
                self._scheduler.drop(sequence)
            answer = self._answers.get(sequence.request.id)
            if answer is not None:
                answers.append(self._fail(answer, cause))
        self._notify(answers)

    def _notify(self, answers: list[RequestHandle]) -> None:
        """Call `on_progress`. An error in it ends neither the loop nor the step."""
        try:
            if answers:
                self._on_progress(answers)
        except Exception:
            _LOG.exception("notifying the listener of a step failed")

    def _fail(self, answer: RequestHandle, error: SpecDecError | None) -> RequestHandle:
        answer.progress = replace(answer.progress, error=error)
        self._end(answer, "error")
        return answer

    def _end(self, answer: RequestHandle, reason: str) -> None:
        self.totals.num_finished[reason] += 1
        with self._condition:
            del self._answers[answer.request.id]
            self._count(answer, -1)


def _default_drafter(session: Session, copied: CopiedTexts) -> Drafter | None:
    if session.opened is None:
        return None
    longest = LongestMatch([session.opened.drafter, UnderGrammar(copied)])
    return BoundedDrafter(longest, session.max_draft_len)


def _progress_of(sequence: Sequence, before: Progress) -> Progress:
    stats = sequence.stats
    is_first = before.num_steps == 0  # tokens found when it is continued later are its own
    num_cached = min(stats.num_reused_tokens, len(sequence.request.prompt_tokens))
    return Progress(
        stats.num_generated_tokens,
        stats.num_steps,
        stats.num_predicted_tokens,
        stats.num_accepted_predicted_tokens,
        num_cached if is_first else before.num_cached_tokens,
        sequence.finish_reason,
    )
