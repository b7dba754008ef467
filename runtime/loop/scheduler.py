"""Leader mode (V2): one loop for all requests, in which a sequence keeps its blocks until it is done.

Requests that do not fit wait. They join as other requests finish, or as others make room by the order of the fair queue
(`runtime.loop.fair_queue`); a sequence that made room waits with its blocks. When blocks run out, waiting sequences
give their blocks back first, then the running sequence that is the last in order. Both are continued later from their
tokens, and the first in order always makes progress.
"""

import math
import time
from collections.abc import Generator, Hashable
from collections.abc import Sequence as Seq
from functools import partial

from runtime.core.request import Request, Sequence
from runtime.core.stats import LoopTimes
from runtime.drafters.protocol import Drafter
from runtime.engine.engine import Engine
from runtime.loop.fair_queue import FairQueue
from runtime.loop.prefill_chunks import ChunkSizes
from runtime.loop.step import Stepped, check_requests, make_room, raise_first_error, release_all, step


def generate(
    engine: Engine,
    requests: Seq[Request],
    drafter: Drafter | None = None,
    max_draft_len: int | None = None,
    times: LoopTimes | None = None,
) -> Generator[tuple[Sequence, list[int]]]:
    """Yield (sequence, new tokens) after every step of every request, with at most max_batch_size requests in a step.
    It keeps the promises of `runtime.loop.orchestrator.generate`, also for engines without block reuse.
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
    """Running and waiting sequences, and the step of all running sequences.

    The caller of `step` may add and drop sequences between two steps. Several schedulers may share an engine, in one
    thread or in several (`runtime.util.thread_turns`). `chunks` limits the time for which generating sequences wait for
    prompts; with None, chunks have max_num_tokens.
    """

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter | None = None,
        max_draft_len: int | None = None,
        times: LoopTimes | None = None,
        chunks: ChunkSizes | None = None,
    ) -> None:
        self.engine = engine
        self.drafter = drafter
        self.max_draft_len = engine.max_draft_len if max_draft_len is None else max_draft_len
        engine.check_draft_len(self.max_draft_len if drafter else 0)
        self.times = times if times is not None else LoopTimes()
        self.num_turns = 0
        """Number of times that a running sequence made room for another one's turn."""
        self.running: list[Sequence] = []
        self.failed: list[Sequence] = []
        """Sequences that failed; their `error` says why."""
        self._is_full = False
        self.asked_s = math.inf
        """Last time at which a step was asked for (`runtime.util.thread_turns.Holder`)."""
        self._chunks = chunks
        self._queue = FairQueue()
        self._holding: list[Sequence] = []
        """Waiting sequences that have blocks."""

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences that have not run yet, and sequences that gave up their place in the batch or their blocks."""
        return list(self._queue)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._queue)

    def add(self, sequence: Sequence, client: Hashable = None, priority: int = 0) -> None:
        """Let a sequence, whose request has been checked, wait and join when it is its turn."""
        self._queue.add(sequence, client, priority)

    @property
    def first_waiting(self) -> Sequence:
        """The waiting sequence whose turn is next."""
        return self._queue.candidates(self.running)[0]

    @property
    def holds_room(self) -> bool:
        return bool(self.running or self._holding)

    def step(self) -> Stepped:
        """(sequence, new tokens) of the sequences that continue or are done; those that are done have been released."""
        self.asked_s = math.inf
        try:
            return self.engine.turns.take_with_room(self._step)
        finally:
            self.asked_s = time.monotonic()

    def _step(self) -> Stepped | None:
        """One step of all running sequences; None if the cache has no room for any sequence."""
        start, step_time_s = time.perf_counter(), self.engine.step_time_s
        self.engine.turns.enter(self)
        self._admit()
        self._make_room()
        while not self.running:
            if not make_room(self.engine, self, self.first_waiting.request):
                return None
            self._admit()
            self._make_room()
        with self.engine.alone():
            context_start = time.perf_counter()
            self._read_on()
            ready = self._compute_context()
        is_short, context_s = all(map(self._generates, ready)), time.perf_counter() - context_start
        stepped = step(self.engine, self.drafter, ready, self.max_draft_len, self.times) if ready else []
        self._queue.charge(self.running)
        self._release_finished()
        self.times.target_time_s += self.engine.step_time_s - step_time_s
        self.times.num_iterations += 1
        seconds = time.perf_counter() - start
        self.times.wall_s += seconds
        if self._chunks is not None and ready and is_short:
            self._chunks.step_took(seconds - context_s)
        if not self.has_work:
            self.engine.turns.leave(self)
        return stepped

    def drop(self, sequence: Sequence) -> None:
        """Abort a sequence; its computed blocks stay available to other sequences."""
        self.engine.turns.take(partial(self._drop, sequence))

    def _drop(self, sequence: Sequence) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
            self._is_full = False
        elif sequence in self._holding:
            self._holding.remove(sequence)
        self._queue.remove(sequence)
        release_all(self.engine, self.drafter, [sequence])

    def release_all(self) -> None:
        """Release all sequences, as after a step that failed."""
        sequences = [*self.running, *self._queue]
        self.running.clear()
        self._holding.clear()
        self._queue = FairQueue()
        self._is_full = False
        self.engine.turns.leave(self)
        release_all(self.engine, self.drafter, sequences)

    def give_back(self) -> None:
        """Release the blocks of all sequences, which are computed again from their tokens later."""
        while self._release_waiting():
            pass
        while self.running:
            self._give_back_last()

    def _give_back_last(self) -> None:
        """Preempt the running sequence that is last in order: release its blocks and let it wait."""
        last = self._queue.in_order(self.running)[-1]
        self.engine.release(last)
        self.running.remove(last)
        self._queue.wait(last)
        self.times.num_preemptions += 1

    def _admit(self) -> None:
        """Let waiting sequences run while there is room, or while running sequences make room for their turns."""
        if len(self.running) == self.engine.max_batch_size and not self._queue.are_due:
            return
        while self._queue and self._admit_one():
            pass
        self._queue.settle(self.running)

    def _admit_one(self) -> bool:
        """Let one waiting sequence run; False if none can. After blocks ran out, there is no room until a sequence has
        ended. A sequence that lacks blocks is not overtaken if it is the first in order.
        """
        has_room = len(self.running) < self.engine.max_batch_size and not (self._is_full and self.running)
        for sequence in self._queue.candidates(self.running):
            if has_room and self._enter(sequence):
                return True
            leaving = self._queue.leaving(sequence, self.running)
            if leaving is not None:
                self.running.remove(leaving)
                self._queue.wait(leaving)
                self._holding.append(leaving)
                self.num_turns += 1
                return self._enter(sequence)
            if has_room:
                return False
        return False

    def _enter(self, sequence: Sequence) -> bool:
        """Let a waiting sequence run; False if the cache has too few blocks, even without other waiting sequences."""
        while not sequence.block_table and not self.engine.admit(sequence, reads=False):
            if not self._release_waiting():
                return False
        if sequence in self._holding:
            self._holding.remove(sequence)
        self.running.append(sequence)
        self._queue.run(sequence)
        return True

    def _release_waiting(self) -> bool:
        """Release the blocks of the last waiting sequence that holds blocks; False if no waiting sequence does."""
        if not self._holding:
            return False
        last = self._queue.in_order(self._holding)[-1]
        self._holding.remove(last)
        self.engine.release(last)
        self.times.num_preemptions += 1
        return True

    def _make_room(self) -> None:
        """Give every running sequence blocks for the next step; if blocks are short, the last in order lose theirs."""
        for sequence in list(self.running):
            while sequence in self.running and not self.engine.extend(sequence):
                if self._release_waiting():
                    continue
                self._give_back_last()
                self._is_full = True

    def _generates(self, sequence: Sequence) -> bool:
        """True if the sequence's next step has no more than a token and a draft to compute."""
        num_missing = len(sequence.tokens) - sequence.num_computed
        is_short = num_missing <= self.engine.max_draft_len + 1 and not sequence.unread
        return not sequence.num_unscored and sequence.num_generated > 0 and is_short

    def _read_on(self) -> None:
        """Read K/V from disk, in order; beside sequences that generate, for as long as a chunk of a prompt may take."""
        unread = [sequence for sequence in self._queue.in_order(self.running) if sequence.unread]
        if not unread:
            return
        until = math.inf
        if self._chunks is not None and any(map(self._generates, self.running)):
            until = time.perf_counter() + self._chunks.chunk_s
        for sequence in unread:
            self.engine.read_on(sequence, until)
            if time.perf_counter() >= until:
                break

    def _compute_context(self) -> list[Sequence]:
        """Compute at most max_num_tokens tokens of prompts, in order; returns the sequences whose next step gives a
        token.

        A sequence that generates always steps: its few tokens are computed whatever the budget. Beside such a sequence
        prompts get no more tokens than the next chunk has (`runtime.loop.prefill_chunks`), if chunks are limited.
        """
        num_generating = sum(map(self._generates, self.running))
        if num_generating == len(self.running):
            return list(self.running)
        budget, ready, start = self.engine.max_num_tokens, [], time.perf_counter()
        chunks = self._chunks if num_generating else None
        if chunks is not None:
            budget = min(budget, chunks.num_tokens)
        num_tokens = 0
        for sequence in self._queue.in_order(self.running):
            if sequence.unread:
                continue
            if sequence.num_unscored and budget > 0:
                num_scored = min(sequence.num_unscored, budget)
                self.engine.compute_context(sequence, num_scored)
                num_tokens += num_scored
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
                num_tokens += budget
                budget = 0
        if chunks is not None and num_tokens:
            chunks.chunk_took(num_tokens, time.perf_counter() - start)
        return ready

    def _release_finished(self) -> None:
        for sequence in [s for s in self.running if s.is_over]:
            self.engine.release(sequence)
            self._is_full = False
            if self.drafter:
                self.drafter.forget(sequence.request.id)
            self.running.remove(sequence)
            self._queue.remove(sequence)
            if sequence.error is not None:
                self.failed.append(sequence)
