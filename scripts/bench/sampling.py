"""Cost of choosing a token: positions by themselves, and steps that sample beside greedy ones.

A position has logits as a model's are, a few likely tokens and many that are not (`likely`), or as they are at their
worst (`even`: normal numbers; `equal`: all the same), in bfloat16; beside ours the time of transformers' warpers and
`multinomial`. Steps are those of an engine, which greedy and sampling requests take in turn.

    python -m scripts.bench.sampling [--engine-dir DIR] [--runs 60] [--vocab-sizes 49152 151936 262144]
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import runtime  # before torch, as commands do: it tells OpenMP how long to wait  # noqa: F401

# isort: split
import torch
from torch import Tensor

from runtime.core.params import SamplingConfig
from runtime.core.request import Draft, Request, Sequence
from runtime.core.sampling import Positions, Sampler, choose_all, warpers
from runtime.engine.engine import Engine
from runtime.kernels.library import compile_kernels
from runtime.kernels.ops import load_kernels
from scripts.bench.step import alternate

CUTS: dict[str, dict[str, Any]] = {
    "greedy": {"top_k": 1},
    "no cut": {},
    "temperature 0.7, top_p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "top_p 0.5": {"top_p": 0.5},
    "top_k 40": {"top_k": 40},
    "top_k 5000": {"top_k": 5000},
    "min_p 0.05": {"min_p": 0.05},
    "all": {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
}
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2}
PROMPT_LEN, DRAFT_LEN, NUM_REQUESTS = 200, 10, 16


def config(**fields: Any) -> SamplingConfig:
    return SamplingConfig(**({"top_k": 0} | fields))


def logits_of(kind: str, vocab_size: int) -> Tensor:
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(0))
    if kind == "equal":
        logits.zero_()
    if kind == "likely":
        logits = 2.5 * logits
        logits[:50] += torch.linspace(14, 6, 50)
    return logits.to(torch.bfloat16)


def by_transformers(logits: Tensor, params: SamplingConfig) -> Callable[[], object]:
    processors = warpers(params)

    def call() -> object:
        scores = logits[None].float()
        for processor in processors:
            scores = processor(torch.zeros(1, 0, dtype=torch.int64), scores)
        return scores.argmax() if params.is_greedy else torch.multinomial(scores.softmax(-1), 1)

    return call


def time_positions(vocab_sizes: list[int], runs: int) -> None:
    print("| words | logits | " + " | ".join(CUTS) + " |\n" + "|---" * (len(CUTS) + 2) + "|")
    for vocab_size in vocab_sizes:
        for kind in ("likely", "even", "equal"):
            logits, cells = logits_of(kind, vocab_size), []
            for fields in CUTS.values():
                params = config(**fields)
                asked = [Positions(Sampler(params, (5,)), [5], [], logits[None])]
                ours = lambda asked=asked: [next(one) for one in choose_all(asked)]  # noqa: E731
                time.sleep(0.1)  # until OpenMP's threads, which transformers' calls wake, do not spin any more
                ms = alternate({"ours": ours}, runs)
                theirs = alternate({"theirs": by_transformers(logits, params)}, 3)
                cells.append(f"{ms['ours']:.3f} ({theirs['theirs']:.1f})")
            print(f"| {vocab_size:,} | {kind} | " + " | ".join(cells) + " |", flush=True)


class Steps:
    """Sequences of one request's settings, which take the same step again and again."""

    def __init__(self, engine: Engine, fields: dict[str, Any], num_sequences: int, draft_len: int) -> None:
        self.engine = engine
        generator = torch.Generator().manual_seed(1)
        self.sequences, self.drafts = [], []
        for i in range(num_sequences):
            tokens = torch.randint(100, 2000, (PROMPT_LEN + draft_len,), generator=generator).tolist()
            request = Request(i, tuple(tokens[:PROMPT_LEN]), 64, sampling=config(random_seed=i, **fields))
            self.sequences.append(Sequence.start(request))
            self.drafts.append(Draft(tokens[PROMPT_LEN:]))

    def __enter__(self) -> "Steps":
        assert all(self.engine.admit(sequence) for sequence in self.sequences)
        self.step()
        return self

    def __exit__(self, *error: object) -> None:
        for sequence in self.sequences:
            self.engine.release(sequence)

    def step(self) -> None:
        self.engine.step(self.sequences, self.drafts)
        for sequence in self.sequences:
            sequence.num_computed = PROMPT_LEN - 1


SAMPLED = {
    "temperature 0.7, top_p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "top_k 40": {"top_k": 40},
    "penalties": {"temperature": 0.7, "top_p": 0.9, **PENALTIES},
}


def time_steps(engine: Engine, runs: int) -> None:
    print("\n| step | greedy | sampled | difference | ratio |\n|---|---|---|---|---|")
    for name, num_sequences, draft_len in (
        ("one token", 1, 0),
        (f"{DRAFT_LEN + 1} tokens", 1, DRAFT_LEN),
        (f"{NUM_REQUESTS} requests", NUM_REQUESTS, 0),
    ):
        for label, fields in SAMPLED.items():
            greedy, sampled = alternated(engine, fields, num_sequences, draft_len, runs)
            cells = f"{greedy:.2f} ms | {sampled:.2f} ms | {sampled - greedy:.2f} ms | {sampled / greedy:.3f}"
            print(f"| {name}, {label} | {cells} |", flush=True)


def alternated(
    engine: Engine, fields: dict[str, Any], num_sequences: int, draft_len: int, runs: int
) -> tuple[float, float]:
    """Median milliseconds of greedy steps and of sampled ones, of which ten take turns with ten."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(max(runs // 10, 1)):
        for wanted, own in zip(({"top_k": 1}, fields), times, strict=True):
            with Steps(engine, wanted, num_sequences, draft_len) as steps:
                for _ in range(10):
                    start = time.perf_counter()
                    steps.step()
                    own.append(time.perf_counter() - start)
    return median(times[0]) * 1e3, median(times[1]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine-dir", type=Path, help="an engine of 16 sequences and drafts of 10 tokens")
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--vocab-sizes", type=int, nargs="*", default=[49152, 151936, 262144])
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; milliseconds, in brackets transformers'\n")
    if arguments.engine_dir is None:
        with tempfile.TemporaryDirectory() as directory:
            compile_kernels(Path(directory) / "kernels.so")
            load_kernels(Path(directory) / "kernels.so")
        time_positions(arguments.vocab_sizes, arguments.runs)
        return
    with Engine.open(arguments.engine_dir) as engine:
        time_positions(arguments.vocab_sizes, arguments.runs)
        time_steps(engine, arguments.runs)


if __name__ == "__main__":
    main()
