"""Times of one step, side by side in one run: compiled step, Hugging Face, V1's whole iteration, drafting.

The model is a random Llama of 101 M parameters (12 layers, 768 wide, 4 KV heads, 16,000 tokens of vocabulary), the
context 1,000 tokens. Hugging Face runs uncompiled with its default attention and its own K/V cache. Calls alternate,
and ratios of medians are printed as a Markdown table, because absolute times on shared machines mean little.

    python -m scripts.bench.step [--dtype float32] [--runs 30] [--work-dir DIR]
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from runtime.builder.build import build_engine
from runtime.builder.convert import convert
from runtime.checkpoint.config import BuildConfig
from runtime.core.batch import Row, pack
from runtime.core.request import Request, Sequence
from runtime.core.stats import LoopTimes
from runtime.drafters.ngram import NgramLookup
from runtime.engine.engine import Engine
from runtime.loop.orchestrator import generate
from runtime.model.attention import CACHE

CONTEXT, DRAFT_LEN, HISTORY = 1000, 10, 50_000
LLAMA_101M = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 16000,
    "max_position_embeddings": 4096,
}

LLAMA_1100M = LLAMA_101M | {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}


def save_random_llama(directory: Path, dtype: str, shape: dict[str, int]) -> None:
    """Save a Llama with random weights, the same on every call; `shape` holds fields of its Hugging Face config."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**shape)).to(getattr(torch, dtype)).save_pretrained(directory)


def make_engine(work_dir: Path, dtype: str, tp_size: int = 1, shape: dict[str, int] = LLAMA_101M) -> tuple[Path, float]:
    """Build the model's engine, unless one is in `work_dir` already; returns it and the seconds it took."""
    engine_dir = work_dir / f"engine-{dtype}-{tp_size}"
    start = time.perf_counter()
    if not engine_dir.exists():
        source, ckpt = work_dir / f"hf-{dtype}", work_dir / f"ckpt-{dtype}-{tp_size}"
        save_random_llama(source, dtype, shape)
        convert(source, ckpt, None, replace=True, progress=lambda *_: None, tp_size=tp_size)
        build = BuildConfig("aot", 4, 1024, 1536 + DRAFT_LEN, DRAFT_LEN, 32, "draft_tokens_external")
        start = time.perf_counter()
        device = torch.device("cpu")
        build_engine(ckpt, engine_dir, build, device, replace=False, phase=lambda _: None)
    return engine_dir, time.perf_counter() - start


def alternate(calls: dict[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """Median milliseconds of each call; the calls take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for run in range(runs + 3):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if run >= 3:
                times[name].append(time.perf_counter() - start)
    return {name: median(values) * 1e3 for name, values in times.items()}


def time_steps(engine: Engine, model: LlamaForCausalLM, runs: int) -> dict[str, float]:
    tokens = torch.randint(0, 16000, (CONTEXT + DRAFT_LEN + 1,), generator=torch.Generator().manual_seed(1)).tolist()
    blocks = list(range(1, 1 + -(-len(tokens) // 32)))
    cache = DynamicCache(config=model.config)
    model(torch.tensor([tokens[:CONTEXT]]), **{CACHE: cache})

    def step(num_tokens: int) -> Callable[[], object]:
        batch = pack([Row(tokens[CONTEXT:][:num_tokens], CONTEXT, blocks, num_tokens)], 32, engine.device)
        return lambda: engine._step(*batch.tensors(), *engine._pool.tensors())

    def forward(num_tokens: int) -> Callable[[], object]:
        ids = torch.tensor([tokens[CONTEXT:][:num_tokens]])

        def call() -> None:
            model(ids, **{CACHE: cache})
            cache.crop(CONTEXT - cache.get_seq_length())

        return call

    with torch.inference_mode():
        engine._step(
            *pack([Row(tokens[:CONTEXT], 0, blocks, 1)], 32, engine.device).tensors(),
            engine._pool.keys,
            engine._pool.values,
        )
        many = DRAFT_LEN + 1
        return alternate({"step 1": step(1), "hf 1": forward(1), "step 11": step(many), "hf 11": forward(many)}, runs)


def time_iterations(engine: Engine) -> tuple[float, float]:
    """Mean milliseconds of V1's whole iteration, and of the compiled step in it, generating after the context."""
    prompt = torch.randint(0, 16000, (900,), generator=torch.Generator().manual_seed(2)).tolist()
    times, first = LoopTimes(), LoopTimes()
    requests = [Request(0, tuple(prompt), 128)]
    for _, _ in generate(engine, requests, NgramLookup(2), DRAFT_LEN, times):
        if first.num_iterations == 0:
            first.add(times)
    num_iterations = times.num_iterations - 1
    wall = (times.wall_s - first.wall_s) / num_iterations
    return wall * 1e3, (times.target_time_s - first.target_time_s) / num_iterations * 1e3


def time_drafting() -> float:
    """Median microseconds of a proposal after 50,000 tokens of history, tokens arriving a few at a time."""
    rng = random.Random(0)
    sequence = Sequence.start(Request(0, tuple(rng.randrange(16000) for _ in range(HISTORY)), 10_000))
    drafter = NgramLookup(2)
    drafter.propose([sequence], DRAFT_LEN)
    times = []
    for _ in range(500):
        sequence.tokens.extend(rng.choice(sequence.tokens[:HISTORY]) for _ in range(rng.randint(1, 4)))
        start = time.perf_counter()
        drafter.propose([sequence], DRAFT_LEN)
        times.append(time.perf_counter() - start)
    return median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--work-dir", type=Path, help="keeps the engine for the next run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work_dir = arguments.work_dir or Path(temporary)
        work_dir.mkdir(parents=True, exist_ok=True)
        engine_dir, build_s = make_engine(work_dir, arguments.dtype)
        model = LlamaForCausalLM.from_pretrained(work_dir / f"hf-{arguments.dtype}").eval()
        with Engine.open(engine_dir) as engine:
            ms = time_steps(engine, model, arguments.runs)
            iteration, step = time_iterations(engine)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.dtype}, built in {build_s:.0f} s\n"
    )
    print("| what | ours | compared with | ratio |\n|---|---|---|---|")
    for n in (1, 11):
        ours, theirs = ms[f"step {n}"], ms[f"hf {n}"]
        print(f"| step of {n} tokens | {ours:.1f} ms | Hugging Face {theirs:.1f} ms | {ours / theirs:.2f} |")
    print(f"| V1 iteration | {iteration:.1f} ms | compiled step {step:.1f} ms | {iteration / step:.2f} |")
    print(f"| drafting, {HISTORY:,} tokens of history | {time_drafting():.0f} µs | | |")


if __name__ == "__main__":
    main()
