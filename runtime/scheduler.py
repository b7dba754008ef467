"""Leader mode (V2): one loop for all requests, in which a sequence keeps its blocks until it is done.

Requests that do not fit wait and join as others finish. When blocks run out the youngest sequence gives its own back
and is continued later from its tokens, so that the oldest always gets on.
"""

import math
import time
from collections import deque
from collections.abc import Generator
from collections.abc import Sequence as Seq
from functools import partial

from runtime.drafters.protocol import Drafter
from runtime.drafting import check_requests, commit, make_room, propose, raise_first_error, release_all
from runtime.engine import Engine
from runtime.request import Request, Sequence
from runtime.stats import LoopTimes


def generate(
    engine: Engine,
    requests: Seq[Request],
    drafter: Drafter | None = None,
    max_draft_len: int | None = None,
    times: LoopTimes | None = None,
) -> Generator[tuple[Sequence, list[int]]]:
    """Yield (sequence, new tokens) after every step of every request, with at most max_batch_size of them in a step.

    The same promises as `runtime.orchestrator.generate`, for engines without block reuse too.
    """
    leader = Scheduler(engine, drafter, max_draft_len, times)
    check_requests(engine, drafter, requests)
    for request in requests:
        leader.add(Sequence.start(request))
    try:
        while leader.has_work:
            yield from leader.step()
        raise_first_error(leader.failed)
    finally:
        engine.turns.do_or_leave(leader.release_all)


class Scheduler:
    """Running and waiting sequences, both oldest first, and their common step.

    Who calls `step` may add and drop sequences between two steps. Several may share an engine, in one thread or in
    several (`runtime.turns`).
    """

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter | None = None,
        max_draft_len: int | None = None,
        times: LoopTimes | None = None,
    ) -> None:
        self.engine = engine
        self.drafter = drafter
        self.max_draft_len = engine.max_draft_len if max_draft_len is None else max_draft_len
        engine.check_draft_len(self.max_draft_len if drafter else 0)
        self.times = times if times is not None else LoopTimes()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.failed: list[Sequence] = []
        """Sequences that failed, by their `error`."""
        self._is_full = False
        self.asked_s = math.inf
        """Last time that a step was asked for (`runtime.turns.Holder`)."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence, whose request has been checked, join as soon as there is room."""
        self.waiting.append(sequence)

    @property
    def holds_room(self) -> bool:
        return bool(self.running)

    def step(self) -> list[tuple[Sequence, list[int]]]:
        """(sequence, new tokens) of those that go on or are done, which have been released."""
        self.asked_s = math.inf
        try:
            return self.engine.turns.take_with_room(self._step)
        finally:
            self.asked_s = time.monotonic()

    def _step(self) -> list[tuple[Sequence, list[int]]] | None:
        """None where there is no room for any."""
        start, step_time_s = time.perf_counter(), self.engine.step_time_s
        self.engine.turns.enter(self)
        self._admit()
        self._make_room()
        while not self.running:
            if not make_room(self.engine, self, self.waiting[0].request):
                return None
            self._admit()
            self._make_room()
        with self.engine.alone():
            ready = self._compute_context()
        drafts_start = time.perf_counter()
        drafts = propose(self.drafter, self.engine, ready, self.max_draft_len)
        if self.drafter is not None:
            self.times.draft_time_s += time.perf_counter() - drafts_start
        with self.engine.alone():
            stepped = commit(ready, drafts, self.engine.step(ready, drafts)) if ready else []
        self._release_finished()
        self.times.target_time_s += self.engine.step_time_s - step_time_s
        self.times.num_iterations += 1
        self.times.wall_s += time.perf_counter() - start
        if not self.has_work:
            self.engine.turns.leave(self)
        return stepped

    def drop(self, sequence: Sequence) -> None:
        """Abort a sequence; its computed blocks stay available to others."""
        self.engine.turns.take(partial(self._drop, sequence))

    def _drop(self, sequence: Sequence) -> None:
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._is_full = False
        release_all(self.engine, self.drafter, [sequence])

    def release_all(self) -> None:
        """Drop all, as after a step that failed."""
        sequences = [*self.running, *self.waiting]
        self.running.clear()
        self.waiting.clear()
        self._is_full = False
        self.engine.turns.leave(self)
        release_all(self.engine, self.drafter, sequences)

    def give_back(self) -> None:
        """Give back the blocks of all; they go on later from their tokens."""
        while self.running:
            self._give_back_youngest()

    def _give_back_youngest(self) -> None:
        self.engine.release(self.running[-1])
        self.waiting.appendleft(self.running.pop())
        self.times.num_preemptions += 1

    def _admit(self) -> None:
        """Admit waiting sequences while there is room; after blocks ran out, not until a sequence has finished."""
        while self.waiting and len(self.running) < self.engine.max_batch_size and not (self._is_full and self.running):
            if not self.engine.admit(self.waiting[0]):
                return
            self.running.append(self.waiting.popleft())

    def _make_room(self) -> None:
        """Blocks for the next step of everyone that still runs; the youngest give theirs back if they must."""
        for sequence in list(self.running):
            while sequence in self.running and not self.engine.extend(sequence):
                self._give_back_youngest()
                self._is_full = True

    def _compute_context(self) -> list[Sequence]:
        """Spend max_num_tokens on prompts, the oldest first; returns the sequences whose next step gives a token.

        A generation step is never delayed: its few tokens are computed regardless of the remaining budget.
        """
        budget, ready = self.engine.max_num_tokens, []
        for sequence in self.running:
            if sequence.num_unscored and budget > 0:
                num_scored = min(sequence.num_unscored, budget)
                self.engine.compute_context(sequence, num_scored)
                budget -= num_scored
            if sequence.num_unscored:
                continue
            num_missing = len(sequence.tokens) - sequence.num_computed
            if num_missing <= self.engine.max_draft_len + 1:
                ready.append(sequence)
            elif num_missing <= budget:
                ready.append(sequence)
                budget -= num_missing
            elif budget > 0:
                self.engine.compute_context(sequence, budget)
                budget = 0
        return ready

    def _release_finished(self) -> None:
        for sequence in [s for s in self.running if s.is_over]:
            self.engine.release(sequence)
            self._is_full = False
            if self.drafter:
                self.drafter.forget(sequence.request.id)
            self.running.remove(sequence)
            if sequence.error is not None:
                self.failed.append(sequence)
