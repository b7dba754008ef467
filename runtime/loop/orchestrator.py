"""Orchestrator mode (V1): the loop drafts, and calls the target as a stateless request once per step.

Between steps no sequence owns blocks; its K/V are found again by block reuse. This makes the loop easy to change, and a
little slower than leader mode, in which sequences keep their blocks.
"""

import time
from collections import deque
from collections.abc import Generator
from collections.abc import Sequence as Seq
from functools import partial
from typing import Literal

from runtime.core.request import Draft, Request, Sequence
from runtime.core.stats import LoopTimes
from runtime.drafters.protocol import Drafter
from runtime.engine.engine import Engine
from runtime.loop.step import Stepped, check_requests, commit, judge, make_room, raise_first_error, release_all, step
from runtime.util.errors import SpecDecError, UsageError


def generate(
    engine: Engine,
    requests: Seq[Request],
    drafter: Drafter | None = None,
    max_draft_len: int | None = None,
    times: LoopTimes | None = None,
) -> Generator[tuple[Sequence, list[int]]]:
    """Yield (sequence, new tokens) after every step of every request, in groups of the engine's max_batch_size.

    A sequence whose `finish_reason` is set is done. All requests are checked before the first step. Times are added to
    `times` after each step. If a request cannot be continued, RequestError is raised when all others are done.
    UsageError for an engine without block reuse.
    """
    if not engine.block_reuse:
        raise UsageError("orchestrator mode needs block reuse", hint="leave `block_reuse` on", code="block_reuse")
    max_draft_len = engine.max_draft_len if max_draft_len is None else max_draft_len
    engine.check_draft_len(max_draft_len if drafter else 0)
    check_requests(engine, drafter, requests)
    times = times if times is not None else LoopTimes()
    sequences = [Sequence.start(request) for request in requests]  # their clocks run while they wait for their group
    for start in range(0, len(sequences), engine.max_batch_size):
        group = sequences[start : start + engine.max_batch_size]
        running = deque(group)
        try:
            while running:
                yield from engine.turns.take_with_room(partial(_step, engine, running, drafter, max_draft_len, times))
        finally:
            engine.turns.do_or_leave(partial(release_all, engine, drafter, group))
    raise_first_error(sequences)


def step_once(engine: Engine, request: Request, tokens: Seq[int], draft: Seq[int]) -> Sequence:
    """One step of a request of which nothing was kept. `tokens` are its prompt and the tokens generated so far.

    It serves callers that draft elsewhere, such as by another server's model. The returned sequence owns no blocks.
    """
    check_requests(engine, None, [request])
    sequence, drafts = Sequence.start(request), [Draft(list(draft))]
    sequence.tokens = list(tokens)
    if len(draft) > (longest := engine.max_draft_len_of(sequence)):
        raise SpecDecError(
            f"the drafter proposed more than the {longest} tokens that {request.name} can take: {len(draft)}"
        )

    def step_alone() -> Literal[True] | None:
        while not engine.admit(sequence):
            if not make_room(engine, None, request):
                return None
        try:
            with engine.alone():
                commit([sequence], drafts, judge(engine, [sequence], drafts))
        finally:
            engine.release(sequence)
        return True

    engine.turns.take_with_room(step_alone)
    raise_first_error([sequence])
    return sequence


def _step(
    engine: Engine, running: deque[Sequence], drafter: Drafter | None, max_draft_len: int, times: LoopTimes
) -> Stepped | None:
    """Step the sequences at the front of `running` that fit the cache; None if not even the first fits."""
    start, step_time_s = time.perf_counter(), engine.step_time_s
    admitted: list[Sequence] = []
    try:
        while running:
            if engine.admit(running[0]):
                admitted.append(running.popleft())
            elif admitted:
                break
            elif not make_room(engine, None, running[0].request):
                return None
        times.num_preemptions += len(running)
        stepped = step(engine, drafter, admitted, max_draft_len, times)
    finally:
        for sequence in admitted:
            engine.release(sequence)
    times.target_time_s += engine.step_time_s - step_time_s
    times.num_iterations += 1
    running.extend(s for s in admitted if not s.is_over)
    times.wall_s += time.perf_counter() - start
    return stepped
