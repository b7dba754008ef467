"""Measure what an engine's steps cost, when it is built."""

import time
from collections.abc import Iterator
from itertools import count, islice
from statistics import median

import torch

from runtime.batch import Row
from runtime.config import BuildConfig, MachineSpeed, StepCost
from runtime.engine import Engine, KVCacheConfig
from runtime.request import Request
from runtime.scheduler import generate
from runtime.stats import LoopTimes

_CONTEXT_LENS = (64, 512, 2048)
_CONTEXT_NUM_TOKENS = (64, 256, 512)
"""Pieces of prompts, beside the short rows of generation steps."""
_BATCH_SIZES = (1, 2, 4, 8, 16, 32)
_MAX_CONTEXT_TOKENS = 8 * 2048
"""Limit on the context tokens of all rows together. Beyond what is measured, and between, the cost model goes on in
lines: memory and time for measuring stay bounded.
"""
_MAX_PASSES, _MAX_S = 5, 3.0
"""A model that is too slow for that is measured in one pass, after one that warms up."""
_NUM_HOST_STEPS = 24
_COPIED_BYTES, _NUM_COPIES = 64 << 20, 8


def cache_for_measuring(build: BuildConfig) -> KVCacheConfig:
    """Room for what `measure_steps` does, and no more."""
    cells = [cell for cell in _cells(build) if _fits(build, *cell)]
    num_blocks = max(size * _num_blocks(build, context_len + n) for size, context_len, n in cells)
    return KVCacheConfig(max_tokens=num_blocks * build.tokens_per_block)


def measure_steps(engine: Engine, *, with_prompts: bool = True) -> tuple[StepCost, ...]:
    """The time of steps of 1 to max_draft_len + 1 tokens, for several batch sizes and contexts, and of prompts' pieces.

    Taken in passes through all of them, so that a busy moment of the machine does not fall on one. Pieces of prompts
    take most of the time and vary least: they are in one pass.
    """
    engine.occupy_cache()
    longest = _CONTEXT_NUM_TOKENS[-1] if with_prompts else engine.max_draft_len + 1
    build = engine.config.build_config
    cells = [cell for cell in dict.fromkeys(_cells(build)) if _fits(build, *cell) and cell[2] <= longest]
    seconds: list[list[float]] = [[] for _ in cells]
    start = time.perf_counter()
    for i in range(_MAX_PASSES + 1):
        if i > 1 and time.perf_counter() - start > _MAX_S:
            break
        for (batch_size, context_len, num_tokens), times in zip(cells, seconds, strict=True):
            if num_tokens > engine.max_draft_len + 1 and i != 1:
                continue
            step_s = time_cell(engine, batch_size, context_len, num_tokens)
            if i > 0:  # the first pass warms up
                times.append(step_s)
    return tuple(StepCost(*cell, median(times)) for cell, times in zip(cells, seconds, strict=True))


def time_cell(engine: Engine, batch_size: int, context_len: int, num_tokens: int) -> float:
    """Seconds of one step; it overwrites K/V, so the cache must hold none that are needed."""
    num_logits = num_tokens if num_tokens <= engine.max_draft_len + 1 else 1
    return engine.time_step(_rows(engine, batch_size, context_len, num_tokens, num_logits))


def measure_machine() -> MachineSpeed:
    """The fastest of several copies, so that a busy moment does not count."""
    source, destination = (torch.ones(_COPIED_BYTES, dtype=torch.uint8) for _ in range(2))
    seconds = []
    for _ in range(_NUM_COPIES):
        start = time.perf_counter()
        destination.copy_(source)
        seconds.append(time.perf_counter() - start)
    return MachineSpeed(torch.get_num_threads(), 2 * _COPIED_BYTES / min(seconds))


def measure_host(engine: Engine) -> float:
    """Seconds that a turn of the loop takes beside the compiled step, one sequence at a time and nothing drafted."""
    build = engine.config.build_config
    prompt = tuple(range(min(8, build.max_input_len, engine.config.vocab_size)))
    request = Request(0, prompt, min(_NUM_HOST_STEPS, build.max_request_len - len(prompt)))
    times = LoopTimes()
    for _ in range(2):  # the first time warms up
        times = LoopTimes()
        for _ in generate(engine, [request], times=times):
            pass
    return times.host_time_s / times.num_iterations


def _cells(build: BuildConfig) -> Iterator[tuple[int, int, int]]:
    """(batch_size, context_len, num_tokens), some of them twice."""
    longest = max(build.max_request_len - build.max_draft_len - 1, 0)
    context_lens = sorted({min(context_len, longest) for context_len in _CONTEXT_LENS})
    for batch_size in _batch_sizes(build):
        for context_len in context_lens:
            if batch_size * context_len <= _MAX_CONTEXT_TOKENS:
                for num_tokens in range(1, build.max_draft_len + 2):
                    yield batch_size, context_len, num_tokens
    for context_len in (0, context_lens[-1]):
        for num_tokens in (1, *_CONTEXT_NUM_TOKENS):
            yield 1, context_len, num_tokens


def _batch_sizes(build: BuildConfig) -> list[int]:
    return sorted({min(batch_size, build.max_batch_size) for batch_size in _BATCH_SIZES})


def _num_blocks(build: BuildConfig, num_tokens: int) -> int:
    return -(-num_tokens // build.tokens_per_block)


def _fits(build: BuildConfig, batch_size: int, context_len: int, num_tokens: int) -> bool:
    return context_len + num_tokens <= build.max_request_len


def _rows(engine: Engine, batch_size: int, context_len: int, num_tokens: int, num_logits: int) -> list[Row]:
    """Rows of sequences that own blocks of their own, as long as there are such."""
    num_blocks = _num_blocks(engine.config.build_config, context_len + num_tokens)
    starts = islice(count(1, num_blocks), batch_size)
    return [Row([0] * num_tokens, context_len, list(range(s, s + num_blocks)), num_logits) for s in starts]
