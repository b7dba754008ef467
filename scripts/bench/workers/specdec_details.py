"""Measurements of specdec alone: steps at two contexts, the memory bound, the host's part, and batches.

Reads settings from argv[1] and prints one JSON document. Its process is none of the workers', whose memory counts.
"""

import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors import safe_open

from runtime.core.batch import Row, pack
from runtime.core.request import Draft, Request, Sequence
from runtime.core.stats import LoopTimes
from runtime.drafters.ngram import NgramLookup
from runtime.engine.engine import Engine, KVCacheConfig
from runtime.loop.scheduler import generate
from scripts.bench.llamas import alternate

NUM_BYTES_READ = 1_500_000_000  # far more than the caches hold


def num_weight_bytes(engine_dir: Path) -> int:
    """Bytes of weights that a step reads: all but the input embeddings."""
    with safe_open(engine_dir / "rank0.safetensors", "pt") as weights:
        names = (name for name in weights.keys() if not name.endswith("embed_tokens.weight"))  # noqa: SIM118
        return sum(weights.get_tensor(name).nbytes for name in names)


def step_after(engine: Engine, num_tokens: int, request_id: int) -> Callable[[], object]:
    """The compiled step of 1 token after a context that was computed: blocks never written would all be one page."""
    tokens = torch.randint(0, engine.config.vocab_size, (num_tokens + 1,), generator=torch.Generator().manual_seed(1))
    sequence = Sequence.start(Request(request_id, tuple(tokens.tolist()), 1))
    if not engine.admit(sequence):
        raise RuntimeError(f"no room in the K/V cache for a context of {num_tokens} tokens")
    engine.forward([sequence], [Draft([])])
    row = Row(sequence.tokens[-1:], num_tokens, sequence.block_table, 1)
    batch = pack([row], engine.config.build_config.tokens_per_block, engine.device)

    def call() -> None:
        with torch.inference_mode():
            engine._step(*batch.tensors(), *engine._pool.tensors())

    return call


def host_ms(engine: Engine, requests: list[Request], settings: dict[str, Any]) -> float:
    """Milliseconds per step outside the compiled step, from when all requests have a token to when one is done."""
    engine.clear_cache()
    drafter, times, started = NgramLookup(settings["ngram_size"]), LoopTimes(), set()
    begin = end = None
    for sequence, _ in generate(engine, requests, drafter, settings["ngram_draft_len"], times):
        started.add(sequence.request.id)
        if begin is None and len(started) == len(requests):
            begin = copy.copy(times)
        if begin and end is None and sequence.finish_reason and times.num_iterations > begin.num_iterations:
            end = copy.copy(times)
    if begin is None or end is None:
        raise RuntimeError(f"outputs of {settings['output_len']} tokens end before {len(requests)} requests run")
    seconds = end.host_time_s + end.draft_time_s - begin.host_time_s - begin.draft_time_s
    return seconds * 1e3 / (end.num_iterations - begin.num_iterations)


def wall_s(engine: Engine, groups: list[list[Request]], settings: dict[str, Any], *, with_prompts: bool) -> float:
    """Seconds for groups of concurrent requests, one group after the other.

    Without prompts their K/V are found in the cache, from a run before.
    """
    if with_prompts:
        engine.clear_cache()
    drafter = NgramLookup(settings["ngram_size"])
    start = time.perf_counter()
    for group in groups:
        for _ in generate(engine, group, drafter, settings["ngram_draft_len"]):
            pass
    return time.perf_counter() - start


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["num_threads"])
    requests = [Request(i, tuple(ids), settings["output_len"]) for i, ids in enumerate(settings["prompts"])]
    one_by_one = [[request] for request in requests]
    contexts, runs = settings["contexts"], settings["runs"]
    engine = Engine.open(Path(settings["engine_dir"]), kv_cache=KVCacheConfig(max_tokens=settings["max_cache_tokens"]))
    walls = {True: [], False: []}
    for run in range(runs + 1):
        for with_prompts, pairs in walls.items():
            pair = [wall_s(engine, groups, settings, with_prompts=with_prompts) for groups in (one_by_one, [requests])]
            if run > 0:
                pairs.append(pair)
    batch = requests[: settings["batch_size"]]
    host = {
        "1": [host_ms(engine, [request], settings) for _ in range(runs) for request in batch],
        str(len(batch)): [host_ms(engine, batch, settings) for _ in range(runs)],
    }
    engine.clear_cache()
    steps = {str(context): step_after(engine, context, -1 - i) for i, context in enumerate(contexts)}
    # Read by all threads in turn with the steps: what memory gives varies by half within minutes.
    array = torch.ones(NUM_BYTES_READ // 4)
    step_ms = alternate({**steps, "read": array.sum}, 30)
    bandwidth = array.nbytes / step_ms.pop("read") * 1e3
    weight_bytes = num_weight_bytes(Path(settings["engine_dir"]))
    bound_ms = weight_bytes / bandwidth * 1e3
    details = {
        "step_ms": step_ms,
        "step_long_over_short": step_ms[str(contexts[1])] / step_ms[str(contexts[0])],
        "read_bandwidth_bytes_per_s": bandwidth,
        "weight_bytes": weight_bytes,
        "weights_over_bandwidth_ms": bound_ms,
        "bound_over_step": bound_ms / step_ms[str(contexts[0])],
        "host_ms_per_step": {batch: {"median": median(v), "min": min(v), "max": max(v)} for batch, v in host.items()},
        "batch": {
            "batch_size": settings["batch_size"],
            "num_requests": len(requests),
            "sequential_s": [sequential for sequential, _ in walls[True]],
            "concurrent_s": [concurrent for _, concurrent in walls[True]],
            "throughput_ratio": median(sequential / concurrent for sequential, concurrent in walls[True]),
            "generation_throughput_ratio": median(sequential / concurrent for sequential, concurrent in walls[False]),
        },
    }
    print(json.dumps(details))


if __name__ == "__main__":
    main()
