"""Every kernel for the CPU beside torch's own, for several sets of instructions.

Ours are compiled for each set, and torch is held to the same one: in a process of its own, by ATEN_CPU_CAPABILITY,
ONEDNN_MAX_CPU_ISA and MKL_ENABLE_INSTRUCTIONS, which MKL does not heed on other processors than Intel's: there
MKL_CBWR keeps it from AVX. In it turns of the two alternate, and the ratio of their times is the median over the pairs,
because absolute times on shared machines mean little. A linear layer beside torch's as it is and with its weight
packed, the faster of the two; attention beside `scaled_dot_product_attention` of keys and values that lie in one piece,
each KV head's queries as rows of one product.

    python -m scripts.bench.kernels [--sets native haswell] [--dtypes float32] [--seconds 1] [--margin 0.2]

Prints a Markdown table for each set: torch's time ÷ ours at each number of rows. Of the ways to compute products the
one that `build` would choose counts. Exits with 1 if one of those is below 0.9, less the margin for a noisy machine.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F

from runtime.checkpoint.config import ARITHMETICS
from runtime.core.params import GREEDY
from runtime.core.sampling import Positions, Sampler, kernel_arguments
from runtime.kernels.library import compile_kernels, instructions
from runtime.kernels.ops import fastest_arithmetic, load_kernels

FLOOR = 0.9
TURN, PAUSE = 0.02, 0.03  # seconds of calls, and of rest before them
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 12, 4, 64, 32
# The compiler's name, what the processor must have, and torch's names: ATen's, oneDNN's and MKL's.
SETS = {
    "native": ("this processor", "", None),
    "skylake-avx512": ("AVX-512 without BF16", "avx512bw", ("avx512", "AVX512_CORE", "AVX512")),
    "haswell": ("AVX2", "avx2", ("avx2", "AVX2", "AVX2")),
    "x86-64": ("generic", "", ("default", "SSE41", "SSE4_2")),
}
Call = Callable[[], object]


def torch_held_to(march: str) -> dict[str, str]:
    """The environment of a process in which torch has no instructions beyond those of `march`."""
    names = SETS[march][2]
    if names is None:
        return dict(os.environ)
    variables = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
    held = dict(zip(variables, names, strict=True))
    if march == "x86-64" and not is_intels():
        held["MKL_CBWR"] = "COMPATIBLE"
    return os.environ | held


def is_intels() -> bool:
    """True on an Intel processor, as Linux says; where nobody says, MKL heeds its variable."""
    cpuinfo = Path("/proc/cpuinfo")
    return not cpuinfo.exists() or "GenuineIntel" in cpuinfo.read_text()


def alternate(ours: Call, theirs: list[Call], seconds: float) -> tuple[float, float]:
    """Milliseconds of one call of ours, and how many times as long the fastest of torch's takes.

    In turns of several calls, after a pause: OpenMP's threads wait for work for milliseconds, on the cores that ours
    would run on, and within a model neither meets the other's.
    """
    calls = (ours, *theirs)
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds * len(calls)
    while len(times[0]) < 3 or time.perf_counter() < end:
        for call, taken in zip(calls, times, strict=True):
            time.sleep(PAUSE)
            taken.append(median(list(timed(call))[1:]))  # the first wakes threads
    own, *others = times
    ratios = [median(their / our for our, their in zip(own, other, strict=True)) for other in others]
    return median(own) * 1e3, min(ratios)


def timed(call: Call) -> Iterator[float]:
    """Seconds of each of some calls: at least four, and more of short ones."""
    begin = time.perf_counter()
    for count in itertools.count():
        start = time.perf_counter()
        if count > 4 and start - begin > TURN:
            return
        call()
        yield time.perf_counter() - start


def linear_calls(rows: int, dtype: torch.dtype, sizes: argparse.Namespace, arithmetic: int) -> tuple[Call, list[Call]]:
    num_inputs, num_outputs = sizes.layer
    x, weight = torch.randn(rows, num_inputs, dtype=dtype), torch.randn(num_outputs, num_inputs, dtype=dtype)
    packed = torch.ops.specdec.pack_linear(weight)
    theirs: list[Call] = [lambda: F.linear(x, weight)]
    try:
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        product = torch.ops.mkldnn._linear_pointwise
        product(x, reordered, None, "none", [], "")
        theirs.append(lambda: product(x, reordered, None, "none", [], ""))
    except RuntimeError:  # oneDNN has no product of this dtype with these instructions
        pass
    return lambda: torch.ops.specdec.linear(x, packed, None, num_outputs, arithmetic), theirs


def attention_calls(
    rows: int, dtype: torch.dtype, sizes: argparse.Namespace, arithmetic: int
) -> tuple[Call, list[Call]]:
    """Few rows after a context; many rows are a prompt from its beginning, which torch calls causal."""
    context = sizes.context if rows <= 32 else 0
    num_keys = context + rows
    num_blocks = -(-num_keys // BLOCK_SIZE)
    query, key, value = (torch.randn(1, n, rows, HEAD_DIM, dtype=dtype) for n in (HEADS, KV_HEADS, KV_HEADS))
    key_pool = torch.randn(num_blocks, KV_HEADS, HEAD_DIM, BLOCK_SIZE, dtype=dtype)
    value_pool = torch.randn(num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=dtype)
    positions = torch.arange(context, num_keys)[None]
    blocks = torch.arange(num_blocks)[None]
    keys, values = (torch.randn(1, KV_HEADS, num_keys, HEAD_DIM, dtype=dtype) for _ in range(2))
    group = HEADS // KV_HEADS

    def ours() -> object:
        pools = (key_pool, value_pool, positions, positions, blocks)
        return torch.ops.specdec.paged_attention(query, key, value, *pools, HEAD_DIM**-0.5, 0, arithmetic)

    if context:
        grouped = query.view(1, KV_HEADS, group * rows, HEAD_DIM)
        visible = torch.arange(num_keys) <= positions.mT if rows > 1 else None
        mask = visible.repeat(group, 1) if visible is not None else None
        return ours, [lambda: F.scaled_dot_product_attention(grouped, keys, values, mask)]
    own_keys, own_values = (kv.repeat_interleave(group, 1) for kv in (keys, values))
    return ours, [lambda: F.scaled_dot_product_attention(query, own_keys, own_values, is_causal=True)]


def argmax_calls(rows: int, dtype: torch.dtype, sizes: argparse.Namespace) -> tuple[Call, list[Call]]:
    logits = torch.randn(rows, sizes.vocab_size).to(dtype)
    arguments = kernel_arguments([Positions(Sampler(GREEDY, ()), [], [0] * (rows - 1), logits)])
    draft_tokens = logits.argmax(-1)  # all are accepted
    return lambda: torch.ops.specdec.choose(*arguments, draft_tokens), [lambda: logits.argmax(-1)]


def measure(march: str, sizes: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row of the table at a time; in a process whose torch is held to the set."""
    torch.manual_seed(0)
    torch.set_flush_denormal(True)
    with tempfile.TemporaryDirectory() as directory:
        compile_kernels(Path(directory) / "kernels.so", march)
        load_kernels(Path(directory) / "kernels.so")
    for name in sizes.dtypes:
        for label, calls in kernels_of(getattr(torch, name), sizes).items():
            cells = [alternate(*calls(rows), sizes.seconds) for rows in sizes.rows]
            yield {"kernel": label, "dtype": name, "cells": cells, "counts": not label.endswith("not chosen")}


def kernels_of(dtype: torch.dtype, sizes: argparse.Namespace) -> dict[str, Callable[[int], tuple[Call, list[Call]]]]:
    """Calls of ours and of torch's for a number of rows, by the table's names."""
    choices = torch.ops.specdec.arithmetics() if dtype == torch.bfloat16 else [0]
    chosen = ARITHMETICS.index(fastest_arithmetic(dtype, 11))
    kernels: dict[str, Callable[[int], tuple[Call, list[Call]]]] = {}
    for name, calls in (("linear", linear_calls), ("attention", attention_calls)):
        for choice in choices:
            label = f"{name}, {ARITHMETICS[choice]}{'' if choice == chosen else ', not chosen'}"
            kernels[label] = lambda rows, calls=calls, choice=choice: calls(rows, dtype, sizes, choice)
    kernels["argmax"] = lambda rows: argmax_calls(rows, dtype, sizes)
    return kernels


def run_held(march: str, arguments: list[str]) -> tuple[str, list[dict[str, Any]]]:
    """The instructions that torch names as its own, and the rows of the table."""
    command = [sys.executable, "-m", "scripts.bench.kernels", *arguments, "--measure", march]
    done = subprocess.run(command, env=torch_held_to(march), stdout=subprocess.PIPE, check=True)
    capability, *rows = (json.loads(line) for line in done.stdout.splitlines())
    return capability, rows


def table(measured: list[dict[str, Any]], rows: list[int]) -> str:
    heads = " | ".join(f"{n} rows, ms" if n > 1 else "1 row, ms" for n in rows)
    ratios = " | ".join(f"torch ÷ ours, {n}" for n in rows)
    lines = [f"| kernel | dtype | {ratios} | {heads} |", "|---" * (2 + 2 * len(rows)) + "|"]
    for row in measured:
        times, quotients = zip(*row["cells"], strict=True)
        cells = [f"{quotient:.2f}" for quotient in quotients] + [f"{ms:.3g}" for ms in times]
        lines.append(f"| {row['kernel']} | {row['dtype']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 11, 512])
    parser.add_argument("--layer", nargs=2, type=int, default=[768, 2048], help="inputs and outputs")
    parser.add_argument("--context", type=int, default=1000, help="keys before few rows")
    parser.add_argument("--vocab-size", type=int, default=16000)
    parser.add_argument("--seconds", type=float, default=0.7, help="for each ratio")
    parser.add_argument("--margin", type=float, default=0.0, help="what a noisy machine may lack of the floor")
    parser.add_argument("--measure", choices=SETS, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if arguments.measure:
        print(json.dumps(torch.backends.cpu.get_cpu_capability()))
        for row in measure(arguments.measure, arguments):
            print(json.dumps(row), flush=True)
        return 0
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, a layer of {arguments.layer}", end="")
    print(f", {arguments.context} keys before few rows, {arguments.vocab_size:,} logits", flush=True)
    too_slow = []
    for march in arguments.sets:
        name, needed, _ = SETS[march]
        if needed and needed not in instructions():
            print(f"\n{name}: not here, the processor lacks {needed}")
            continue
        capability, measured = run_held(march, sys.argv[1:])
        print(f"\n{name} (`-march={march}`, torch: {capability})\n\n{table(measured, arguments.rows)}", flush=True)
        for row in measured:
            for rows, (_, ratio) in zip(arguments.rows, row["cells"], strict=True):
                if row["counts"] and ratio < FLOOR - arguments.margin:
                    too_slow.append(f"{name}, {row['kernel']}, {row['dtype']}, {rows} rows: {ratio:.2f}")
    floor = f"{FLOOR - arguments.margin:.2f} of torch's speed"
    verdict = f"failed: below {floor}" if too_slow else f"passed: every kernel has {floor} or more"
    print("", verdict, *too_slow, sep="\n")
    return 1 if too_slow else 0


if __name__ == "__main__":
    sys.exit(main())
