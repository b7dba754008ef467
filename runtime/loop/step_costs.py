"""Measures the costs of an engine's steps, at its build or when they are needed (`runtime.checkpoint.costs`)."""

import time
from dataclasses import replace
from itertools import count, islice
from random import Random
from statistics import median

import torch

from runtime.checkpoint.bundle import Bundle
from runtime.checkpoint.config import BuildConfig, EngineConfig, MachineSpeed, StepCost
from runtime.checkpoint.costs import CostModel, MeasuredCosts, are_measured_when_asked_for, keep_costs
from runtime.core.batch import Row
from runtime.core.request import Request, Sequence
from runtime.core.stats import LoopTimes
from runtime.engine.engine import Engine, KVCacheConfig
from runtime.loop.scheduler import Scheduler

_CONTEXT_LENS = (64, 512, 2048)
_CONTEXT_NUM_TOKENS = (64, 256, 512)
"""Tokens of the chunks of prompts that are timed, beside the short rows of generation steps."""
_BATCH_SIZES = (1, 2, 4, 8, 16, 32)
_MAX_CONTEXT_TOKENS = 8 * 2048
"""Limit on the context tokens of all rows together, so that memory and time for measuring stay bounded. Beyond it the
cost model continues in straight lines.
"""
_MAX_KV_BYTES = 288 << 20
"""Limit on the K/V that a build uses for it, so that a build takes little more memory than its weights."""
_MAX_PASSES = 5
_NUM_HOST_STEPS, _NUM_FIRST_STEPS, _MIN_HOST_STEPS, _MAX_HOST_S = 24, 2, 2, 0.3
_COPIED_BYTES, _NUM_COPIES = 64 << 20, 4
_AT_BUILD_S, _WHEN_ASKED_S = 1.2, 0.8
_ANY = Random(0)

Cell = tuple[int, int, int]
"""A kind of step: (batch_size, context_len, num_tokens)."""


def costs_at_build(engine: Engine, *, has_copy: bool) -> EngineConfig:
    """The engine's configuration with its step costs and the machine's speed."""
    machine = measure_machine()  # by the threads that an engine has: a rank is pinned to its cores
    steps = measure_steps(engine, _AT_BUILD_S)
    copy = measure_steps(engine, _AT_BUILD_S, by_copy=True) if has_copy else ()
    return replace(engine.config, step_costs=steps, host_s=measure_host(engine), self_draft_costs=copy, machine=machine)


def costs_when_asked_for(bundle: Bundle, engine: Engine, max_s: float = _WHEN_ASKED_S) -> EngineConfig:
    """The opened bundle's configuration with step costs: those known, and a few more, which are kept.

    Nothing is measured if the engine was measured at its build, or is answering requests. Otherwise the K/V of released
    sequences are forgotten.
    """
    if not are_measured_when_asked_for(bundle.directory) or engine.cache_usage > 0:
        return bundle.config
    known = MeasuredCosts.of(bundle.config)
    measured = MeasuredCosts(
        measure_steps(engine, max_s, known.step_costs),
        known.host_s or measure_host(engine),
        measure_steps(engine, max_s, known.self_draft_costs, by_copy=True)
        if bundle.config.build_config.self_draft
        else (),
    )
    engine.clear_cache()
    if measured != known:
        keep_costs(bundle.directory, measured)
    return replace(bundle.config, **vars(measured))


def cache_for_measuring(build: BuildConfig, block_bytes: int) -> KVCacheConfig:
    """K/V cache with the room that `measure_steps` needs. Sizes that would need more than 288 MB of K/V get no room,
    except the first.
    """
    first, *others = (max(_num_blocks(build, cell) for cell in group) for group in _groups(build))
    num_blocks = max(first, *(number for number in others if number * block_bytes <= _MAX_KV_BYTES), 0)
    return KVCacheConfig(max_tokens=num_blocks * build.tokens_per_block)


def measure_steps(
    engine: Engine, max_s: float, known: tuple[StepCost, ...] = (), *, by_copy: bool = False
) -> tuple[StepCost, ...]:
    """The time of steps of 1 to max_draft_len + 1 tokens, for several batch sizes and contexts, and of prompts' chunks,
    beside the costs that are `known`.

    Steps are timed in up to 5 passes through all sizes, so that a busy moment of the machine does not fall on a single
    size; chunks of prompts take most of the time and vary least, and are in the first pass alone. A step that is no
    chunk is timed after an equal step, as in a generation; the 21 MB of a small model's weights are then in the
    processor's caches. Measuring ends after `max_s` seconds; sizes that are expected to take longer than the seconds
    left are passed over, except the first size if nothing is known. The sizes that most estimates use are measured
    first.
    """
    build = engine.config.build_config
    have = set(map(_cell_of, known))
    room = engine.num_cache_tokens // build.tokens_per_block
    groups = [
        group
        for group in _groups(build)
        if not have.issuperset(group)
        and all(_num_blocks(build, cell) <= room for cell in group)
        and not (by_copy and _is_chunk(build, group[-1]))
    ]
    seconds: dict[Cell, list[float]] = {}
    start, num_occupied = time.perf_counter(), 1
    for i in range(_MAX_PASSES):
        for group in groups:
            costs = (*known, *_costs(seconds))
            passed_s = time.perf_counter() - start
            if costs and passed_s + 2 * _expected_s(costs, group) > max_s:
                continue
            if i > 0 and _is_chunk(build, group[-1]):
                continue
            num_blocks = max(_num_blocks(build, cell) for cell in group) + 1
            engine.occupy_cache(range(num_occupied, num_blocks))
            num_occupied = max(num_occupied, num_blocks)
            for cell in group:
                if not _is_chunk(build, cell):
                    time_cell(engine, *cell, by_copy=by_copy)
                seconds.setdefault(cell, []).append(time_cell(engine, *cell, by_copy=by_copy))
    return (*(cost for cost in known if _cell_of(cost) not in seconds), *_costs(seconds))


def _cell_of(cost: StepCost) -> Cell:
    return cost.batch_size, cost.context_len, cost.num_tokens


def _costs(seconds: dict[Cell, list[float]]) -> tuple[StepCost, ...]:
    return tuple(StepCost(*cell, median(times)) for cell, times in seconds.items())


def _expected_s(costs: tuple[StepCost, ...], group: list[Cell]) -> float:
    model = CostModel(costs, 0.0)

    def step_s(batch_size: int, context_len: int, num_tokens: int) -> float:
        as_one_row = model.step_s(1, context_len, batch_size * num_tokens)
        return max(model.step_s(batch_size, context_len, num_tokens), as_one_row)

    return sum(step_s(*cell) for cell in group)


def time_cell(engine: Engine, batch_size: int, context_len: int, num_tokens: int, *, by_copy: bool = False) -> float:
    """Seconds of a step. It overwrites K/V, so no sequence may hold any."""
    num_logits = num_tokens if num_tokens <= engine.max_draft_len + 1 else 1
    return engine.time_step(_rows(engine, batch_size, context_len, num_tokens, num_logits), by_copy=by_copy)


def measure_machine() -> MachineSpeed:
    """Speed of the machine: the fastest of several copies, so that a busy moment does not count."""
    source, destination = (torch.ones(_COPIED_BYTES, dtype=torch.uint8) for _ in range(2))
    seconds = []
    for _ in range(_NUM_COPIES):
        start = time.perf_counter()
        destination.copy_(source)
        seconds.append(time.perf_counter() - start)
    return MachineSpeed(torch.get_num_threads(), 2 * _COPIED_BYTES / min(seconds))


def measure_host(engine: Engine) -> float:
    """Seconds that an iteration of the loop takes outside the compiled step, for a single sequence without a draft. The
    first iterations warm up; with a slow model there are few.
    """
    build = engine.config.build_config
    prompt = tuple(range(min(8, build.max_input_len, engine.config.vocab_size)))
    num_steps = min(_NUM_FIRST_STEPS + _NUM_HOST_STEPS, build.max_request_len - len(prompt))
    times, first_s, first_steps, start = LoopTimes(), 0.0, 0, time.perf_counter()
    loop = Scheduler(engine, times=times)
    loop.add(Sequence.start(Request(0, prompt, num_steps)))
    try:
        while loop.has_work:
            loop.step()
            if times.num_iterations <= min(_NUM_FIRST_STEPS, num_steps - 1):
                first_s, first_steps = times.host_time_s, times.num_iterations
            elif times.num_iterations >= first_steps + _MIN_HOST_STEPS and time.perf_counter() - start > _MAX_HOST_S:
                break
    finally:
        # Now, and not in the next turn, as a generator's end: the K/V must be forgotten with all others.
        engine.turns.take(loop.release_all)
    return (times.host_time_s - first_s) / (times.num_iterations - first_steps)


def _groups(build: BuildConfig) -> list[list[Cell]]:
    """Groups of cells that are measured together or not at all, the most wanted first.

    For each batch size and context the shortest and the longest rows come first, between which costs are interpolated;
    then the other rows, and chunks of prompts.
    """
    most = max(build.max_request_len - build.max_draft_len - 1, 0)
    contexts = sorted({min(context_len, most) for context_len in _CONTEXT_LENS})
    sizes = sorted({min(batch_size, build.max_batch_size) for batch_size in _BATCH_SIZES})
    grids = [(b, c) for c in contexts for b in (sizes[0], *reversed(sizes[1:])) if b * c <= _MAX_CONTEXT_TOKENS]
    longest = build.max_draft_len + 1
    groups = [[(b, c, n) for n in sorted({1, longest})] for b, c in grids]
    between = [[[(b, c, n)] for n in range(2, longest)] for b, c in grids]
    groups += between[0] if between else []
    groups += _chunks(0)
    groups += [group for one in between[1:] for group in one]
    groups += _chunks(contexts[-1])
    fitting = [[cell for cell in group if cell[1] + cell[2] <= build.max_request_len] for group in groups]
    return [group for group in fitting if group]


def _chunks(context_len: int) -> list[list[Cell]]:
    """Cells for chunks of prompts, each in a group of its own: the time of a long chunk is estimated from shorter ones,
    and may be too long.
    """
    first, *others = _CONTEXT_NUM_TOKENS
    return [[(1, context_len, 1), (1, context_len, first)], *([(1, context_len, n)] for n in others)]


def _is_chunk(build: BuildConfig, cell: Cell) -> bool:
    """True if the cell's rows are longer than a draft's row, so that they are chunks of prompts."""
    return cell[2] > build.max_draft_len + 1


def _num_blocks(build: BuildConfig, cell: Cell) -> int:
    """Number of blocks of all rows together."""
    batch_size, context_len, num_tokens = cell
    return batch_size * -(-(context_len + num_tokens) // build.tokens_per_block)


def _rows(engine: Engine, batch_size: int, context_len: int, num_tokens: int, num_logits: int) -> list[Row]:
    """Rows of `batch_size` sequences, each with blocks of its own, for which the cache must have room. Their tokens are
    random, so that in a mixture of experts they are computed by different experts.
    """
    num_blocks = _num_blocks(engine.config.build_config, (1, context_len, num_tokens))
    starts = islice(count(1, num_blocks), batch_size)
    words = range(engine.config.vocab_size)
    return [
        Row(_ANY.choices(words, k=num_tokens), context_len, list(range(s, s + num_blocks)), num_logits) for s in starts
    ]
