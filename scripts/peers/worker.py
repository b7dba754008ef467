"""What all workers of bench_peers.py share: the protocol, the clock and the memory counter. Standard library only.

A worker is a process with one system's model in it. It says on stdout that it is ready, then answers jobs from stdin,
a JSON document per line: {"variant", "prompt", "max_new_tokens"} -> {"output_ids", "ttft_s", ...}. It computes only
while it has a job, so that systems can take turns on the same cores.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Variant = Callable[[list[int], int, Callable[[], None]], list[int]]
"""Greedy output ids of a prompt and a number of tokens. It calls the function it is given once per step of the
target, when that step's tokens have arrived."""


def serve(load: Callable[[dict[str, Any]], tuple[dict[str, Variant], str]]) -> None:
    """Load the variants, and a note on how they are set, by the settings in argv[1]; answer jobs until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    variants, note = load(json.loads(sys.argv[1]))
    ready = {"variants": list(variants), "note": note, "peak_memory_bytes": _peak_memory_bytes()}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        answer = _measure(variants[job["variant"]], job["prompt"], job["max_new_tokens"])
        print(json.dumps(answer), file=answers, flush=True)


def _measure(variant: Variant, prompt: list[int], max_new_tokens: int) -> dict[str, Any]:
    variant(prompt[:16], 2, lambda: None)  # another process had the processor's caches
    arrivals: list[float] = []
    start = time.perf_counter()
    output_ids = variant(prompt, max_new_tokens, lambda: arrivals.append(time.perf_counter()))
    end = time.perf_counter()
    if len(output_ids) != max_new_tokens:
        raise RuntimeError(f"asked for {max_new_tokens} tokens, and there are {len(output_ids)}")
    return {
        "output_ids": output_ids,
        "num_steps": len(arrivals),
        "ttft_s": arrivals[0] - start,
        "tpot_s": (end - arrivals[0]) / max(max_new_tokens - 1, 1),
        "step_s": (end - arrivals[0]) / max(len(arrivals) - 1, 1),
        "wall_s": end - start,
        "peak_memory_bytes": _peak_memory_bytes(),
    }


def _peak_memory_bytes() -> int:
    """Most memory this process had resident, mapped files included.

    From /proc, because getrusage counts the process that started this one as well.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
