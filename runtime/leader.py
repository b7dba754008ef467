"""Leader mode (V2): one loop for all requests, in which a sequence keeps its blocks until it is done.

Requests that do not fit wait and join as others finish. When blocks run out the youngest sequence gives its own back
and is continued later from its tokens, so that the oldest always gets on.
"""

import time
from collections import deque
from collections.abc import Generator
from collections.abc import Sequence as Seq

from runtime.drafters.protocol import Drafter
from runtime.drafting import check_requests, commit, let_go, propose, raise_error_of
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
    max_draft_len = engine.max_draft_len if max_draft_len is None else max_draft_len
    engine.check_draft_len(max_draft_len if drafter else 0)
    check_requests(engine, drafter, requests)
    times = times if times is not None else LoopTimes()
    batch = _Batch(engine, [Sequence.start(request) for request in requests])
    try:
        while batch.waiting or batch.running:
            start, step_time_s = time.perf_counter(), engine.step_time_s
            batch.admit()
            batch.make_room()
            if not batch.running:
                engine.raise_cache_is_taken(batch.waiting[0].request)
            ready = batch.compute_context()
            drafts_start = time.perf_counter()
            drafts = propose(drafter, engine, ready, max_draft_len)
            if drafter is not None:
                times.draft_time_s += time.perf_counter() - drafts_start
            verdicts = engine.step(ready, drafts) if ready else []
            stepped = commit(ready, drafts, verdicts)
            batch.release_finished(drafter)
            times.target_time_s += engine.step_time_s - step_time_s
            times.num_iterations += 1
            times.wall_s += time.perf_counter() - start
            yield from stepped
        raise_error_of(batch.failed)
    finally:
        let_go(engine, drafter, [*batch.running, *batch.waiting])


class _Batch:
    """Who runs and who waits; both oldest first."""

    def __init__(self, engine: Engine, sequences: list[Sequence]) -> None:
        self.engine = engine
        self.waiting = deque(sequences)
        self.running: list[Sequence] = []
        self.failed: list[Sequence] = []
        self._is_full = False

    def admit(self) -> None:
        """Let waiting sequences join while there is room; once blocks ran out, not until somebody has finished."""
        while self.waiting and len(self.running) < self.engine.max_batch_size and not (self._is_full and self.running):
            if not self.engine.admit(self.waiting[0]):
                return
            self.running.append(self.waiting.popleft())

    def make_room(self) -> None:
        """Blocks for the next step of everyone that still runs; the youngest give theirs back if they must."""
        for sequence in list(self.running):
            while sequence in self.running and not self.engine.extend(sequence):
                self.engine.release(self.running[-1])
                self.waiting.appendleft(self.running.pop())
                self._is_full = True

    def compute_context(self) -> list[Sequence]:
        """Spend max_num_tokens on prompts, the oldest first; returns the sequences whose next step gives a token.

        A generation step waits for nobody: its few tokens are computed whatever is left to spend.
        """
        budget, ready = self.engine.max_num_tokens, []
        for sequence in self.running:
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

    def release_finished(self, drafter: Drafter | None) -> None:
        for sequence in [s for s in self.running if s.is_over]:
            self.engine.release(sequence)
            self._is_full = False
            if drafter:
                drafter.forget(sequence.request.id)
            self.running.remove(sequence)
            if sequence.error is not None:
                self.failed.append(sequence)
