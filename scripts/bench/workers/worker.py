"""Base of all workers of bench/real.py: the protocol, the clock and the memory counter.

Standard library only. A worker is a process with one system's model in it. It says on stdout that it is ready, then
answers jobs from stdin, a JSON document per line: {"variant", "prompt", "max_new_tokens"} and what else a `Job` has ->
{"output_ids", "ttft_s", ...}. It computes only while it has a job, so that systems can take turns on the same cores.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Sampling:
    """Cuts of 0 and 1.0 are off."""

    temperature: float
    top_k: int
    top_p: float


@dataclass(frozen=True)
class Job:
    """A prompt's token ids. Without end ids every output has its full length; without sampling it is greedy."""

    prompt: list[int]
    max_new_tokens: int
    end_ids: tuple[int, ...] = ()
    sampling: Sampling | None = None
    seed: int = 0


Variant = Callable[[Job, Callable[[], None]], list[int]]
"""Output ids of a job. It calls the function it is given once per step of the target, when that step's tokens have
arrived."""


Measure = Callable[[Variant, Job], dict[str, Any]]


def serve(load: Callable[[dict[str, Any]], tuple[dict[str, Variant], str]], measure: Measure | None = None) -> None:
    """Load the variants, and a note on how they are set, by the settings in argv[1]; answer jobs until stdin ends.

    `measure` is for what tells its times itself.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    variants, note = load(json.loads(sys.argv[1]))
    ready = {"variants": list(variants), "note": note, "peak_memory_bytes": peak_memory_bytes()}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        fields = json.loads(line)
        variant, sampling = variants[fields.pop("variant")], fields.pop("sampling", None)
        job = Job(**fields, sampling=sampling and Sampling(**sampling))
        print(json.dumps((measure or by_clock)(variant, job)), file=answers, flush=True)


def by_clock(variant: Variant, job: Job) -> dict[str, Any]:
    warm_up = replace(job, prompt=job.prompt[:16], max_new_tokens=2)
    variant(warm_up, lambda: None)  # another process had the processor's caches
    arrivals: list[float] = []
    start = time.perf_counter()
    output_ids = variant(job, lambda: arrivals.append(time.perf_counter()))
    end = time.perf_counter()
    if len(output_ids) != job.max_new_tokens and not (job.end_ids and output_ids):
        raise RuntimeError(f"asked for {job.max_new_tokens} tokens, and there are {len(output_ids)}")
    return {
        "output_ids": output_ids,
        "num_steps": len(arrivals),
        "ttft_s": arrivals[0] - start,
        "tpot_s": (end - arrivals[0]) / max(len(output_ids) - 1, 1),
        "step_s": (end - arrivals[0]) / max(len(arrivals) - 1, 1),
        "wall_s": end - start,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def peak_memory_bytes() -> int:
    """Most memory this process had resident, mapped files included.

    From /proc, because getrusage counts the process that started this one as well.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
