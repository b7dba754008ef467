"""A model that is split over two devices beside the same model on one: times of a step, of a sum, and bytes of weights.

The model is `bench/step.py`'s Llama of 101 M random parameters, or its one of 1.1 B, the context 1,000 tokens. One rank
has all cores that the process may use, each of two half of them. The engines take turns; each turn opens one of them,
and the fastest half of its steps counts, because absolute times on shared machines mean little.

    python -m scripts.bench.ranks [--size 1.1B] [--dtype float32] [--turns 3] [--runs 40] [--work-dir DIR]
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import mean

import torch

import runtime.kernels.collectives  # noqa: F401  (declares the sum)
from runtime.checkpoint.bundle import LIBRARY
from runtime.core.batch import Row, pack
from runtime.engine.devices import cores_of, pin
from runtime.engine.engine import Engine
from runtime.kernels.groups import Rendezvous, Way, join, join_by_number
from runtime.kernels.ops import load_kernels
from scripts.bench.step import CONTEXT, DRAFT_LEN, LLAMA_101M, LLAMA_1100M, make_engine

NUM_FLOATS, NUM_SUMS = 768, 20_000
SHAPES = {"101M": LLAMA_101M, "1.1B": LLAMA_1100M}
WAYS: tuple[Way, ...] = ("shared", "gloo")
QUERIES = (1, DRAFT_LEN + 1)


def time_sums(way: Way) -> float:
    """Microseconds of a sum of 768 floats of two processes, each on its own device."""
    meeting, cores = Rendezvous(way, 2), cores_of((0, 1))
    other = os.fork()
    rank = 0 if other else 1
    pin(cores[rank])
    group = join_by_number(way, meeting.number, 1, 2) if rank else join(meeting, 0, 2)
    group.use()
    all_reduce = torch.ops.specdec.all_reduce if way == "shared" else torch.ops.specdec_distributed.all_reduce
    x = torch.ones(NUM_FLOATS)
    for i in range(2 * NUM_SUMS):
        if i == NUM_SUMS:
            start = time.perf_counter()
        all_reduce(x)
    elapsed = time.perf_counter() - start
    if rank:
        os._exit(0)
    group.leave()
    meeting.close()
    os.waitpid(other, 0)
    pin([*cores[0], *cores[1]])
    return elapsed / NUM_SUMS * 1e6


def time_steps(engine_dir: Path, runs: int) -> dict[int, list[float]]:
    """Milliseconds of steps of so many tokens after the context."""
    tokens = torch.randint(0, 16000, (CONTEXT + DRAFT_LEN + 1,), generator=torch.Generator().manual_seed(1)).tolist()
    blocks = list(range(1, 1 + -(-len(tokens) // 32)))
    times: dict[int, list[float]] = {num_tokens: [] for num_tokens in QUERIES}
    with Engine.open(engine_dir) as engine, torch.inference_mode():

        def step(row: Row) -> float:
            tensors = pack([row], 32, engine.device).tensors()
            start = time.perf_counter()
            engine._step(*tensors, *engine._pool.tensors())
            return (time.perf_counter() - start) * 1e3

        step(Row(tokens[:CONTEXT], 0, blocks, 1))
        for run in range(runs + 3):
            for num_tokens in QUERIES:
                taken = step(Row(tokens[CONTEXT:][:num_tokens], CONTEXT, blocks, num_tokens))
                if run >= 3:
                    times[num_tokens].append(taken)
    return times


def fastest_half(times: list[float]) -> float:
    return mean(sorted(times)[: len(times) // 2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--size", choices=SHAPES, default="101M", help="with --work-dir a directory for each")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--work-dir", type=Path, help="keeps the engines for the next run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work_dir = arguments.work_dir or Path(temporary)
        work_dir.mkdir(parents=True, exist_ok=True)
        engines = {n: make_engine(work_dir, arguments.dtype, n, SHAPES[arguments.size])[0] for n in (1, 2)}
        load_kernels(engines[2] / LIBRARY)
        sums_us = {way: time_sums(way) for way in WAYS}
        times: dict[int, dict[int, list[float]]] = {tp_size: {n: [] for n in QUERIES} for tp_size in engines}
        for _ in range(arguments.turns):
            for tp_size, engine_dir in engines.items():
                for num_tokens, taken in time_steps(engine_dir, arguments.runs).items():
                    times[tp_size][num_tokens] += taken
        num_bytes = {tp_size: (path / "rank0.safetensors").stat().st_size for tp_size, path in engines.items()}
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.size}, {arguments.dtype}\n")
    print("| what | two ranks | one rank | ratio |\n|---|---|---|---|")
    for n in QUERIES:
        ours, theirs = fastest_half(times[2][n]), fastest_half(times[1][n])
        print(f"| step of {n} tokens | {ours:.1f} ms | {theirs:.1f} ms | {ours / theirs:.2f} |")
    ours, theirs = num_bytes[2] / 1e6, num_bytes[1] / 1e6
    print(f"| weights of a rank | {ours:.0f} MB | {theirs:.0f} MB | {ours / theirs:.2f} |")
    for way, sum_us in sums_us.items():
        print(f"| sum of {NUM_FLOATS} floats, {way} | {sum_us:.1f} µs | | |")


if __name__ == "__main__":
    main()
