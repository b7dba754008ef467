"""Cost and gain of serving a random Llama of 101 M parameters: HTTP beside the leader loop, and a second turn.

    python -m scripts.bench.serve [--dtype float16] [--rounds 3] [--work-dir DIR]

The loop in this process and a server of the same engine take turns with the same requests, n-gram lookup drafting:
`HTTP / loop` is the throughput with 16 clients, which stream, over that of `Session.run`. Then conversations of
900 tokens get their answer and are asked a second time with that answer and a few words more: `turn 2 / cold` is the
time to the first token, over that of prompts of the same length that nobody has sent. Medians, and the range.
"""

import argparse
import http.client
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from runtime.builder.build import build_engine
from runtime.builder.convert import convert
from runtime.checkpoint.config import BuildConfig
from runtime.core.params import SamplingParams
from runtime.core.request import Request
from runtime.drafters.specs import NgramDrafter
from runtime.llm import LLM
from runtime.loop.session import Session
from scripts.bench.step import LLAMA_101M, save_random_llama

CLIENTS, PROMPT_LEN, OUTPUT_LEN, HISTORY_LEN = 16, 100, 64, 900
DRAFT_LEN, NGRAM_SIZE, BLOCK = 4, 2, 32
VOCAB = 4000  # ids that the demo's tokenizer has, whose text the server needs
DEMO = Path(__file__).parents[2] / "runtime" / "demo" / "target"


def make_engine(work_dir: Path, dtype: str) -> Path:
    """Build the engine, unless it is in `work_dir` already."""
    engine_dir = work_dir / f"engine-{dtype}-{CLIENTS}"
    if not engine_dir.exists():
        save_random_llama(work_dir / f"hf-{dtype}", dtype, LLAMA_101M)
        convert(work_dir / f"hf-{dtype}", work_dir / f"ckpt-{dtype}", None, replace=True, progress=lambda *_: None)
        build = BuildConfig("aot", CLIENTS, 1536, 2048, DRAFT_LEN, BLOCK, "draft_tokens_external")
        device = torch.device("cpu")
        build_engine(work_dir / f"ckpt-{dtype}", engine_dir, build, device, replace=False, phase=lambda _: None)
    return engine_dir


@contextmanager
def server(engine_dir: Path) -> Iterator[tuple[int, psutil.Process]]:
    """`specdec serve` of the engine: its port and its process."""
    command = [sys.executable, "-m", "specdec_cli", "serve", "--engine-dir", str(engine_dir), "--port", "0"]
    command += ["--tokenizer-dir", str(DEMO), "--ngram-config", f"{DRAFT_LEN},{NGRAM_SIZE}"]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert started.stderr is not None
    try:
        yield (
            next(int(found[1]) for line in started.stderr if (found := re.search(r"http://127.0.0.1:(\d+) ", line))),
            psutil.Process(started.pid),
        )
    finally:
        started.send_signal(signal.SIGTERM)
        started.wait(60)


def ask(port: int, prompt: list[int], max_tokens: int) -> tuple[float, dict[str, Any]]:
    """Stream an answer: seconds to its first token, and its usage."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    start, first_s, usage = time.perf_counter(), None, {}
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/completions", json.dumps(body | {"stream_options": {"include_usage": True}}))
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            first_s = first_s or time.perf_counter() - start
            usage = json.loads(line[6:]).get("usage") or usage
    connection.close()
    assert first_s is not None
    return first_s, usage


def prompts_of(num: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, VOCAB) for _ in range(length)] for _ in range(num)]


def loop_throughput(llm: LLM, session: Session, prompts: list[list[int]]) -> tuple[float, float]:
    """Tokens a second, and CPU seconds."""
    template = llm.request_of(SamplingParams(max_tokens=OUTPUT_LEN, temperature=0, ignore_eos=True))
    requests: list[Request] = [template.with_prompt(i, prompt, 0) for i, prompt in enumerate(prompts)]
    start, cpu = time.perf_counter(), time.process_time()
    generation = session.run(requests)
    num_tokens = sum(len(sequence.output_tokens) for sequence in generation.sequences)
    return num_tokens / (time.perf_counter() - start), time.process_time() - cpu


def http_throughput(port: int, process: psutil.Process, prompts: list[list[int]]) -> tuple[float, float]:
    before = sum(process.cpu_times()[:2])
    start = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda prompt: ask(port, prompt, OUTPUT_LEN), prompts))
    num_tokens = sum(usage["completion_tokens"] for _, usage in answers)
    return num_tokens / (time.perf_counter() - start), sum(process.cpu_times()[:2]) - before


def turns(llm: LLM, session: Session, port: int, seed: int) -> tuple[float, float, int]:
    """TTFT of a cold prompt and of a second turn, and how many of its tokens were found."""
    template = llm.request_of(SamplingParams(max_tokens=OUTPUT_LEN, temperature=0, ignore_eos=True))
    history, cold = prompts_of(1, HISTORY_LEN - OUTPUT_LEN, seed)[0], prompts_of(1, HISTORY_LEN + 10, seed + 1)[0]
    ask(port, history, OUTPUT_LEN)
    (sequence,) = session.run([template.with_prompt(0, history, 0)]).sequences  # what the server has answered
    said = [*history, *sequence.output_tokens, *prompts_of(1, 10, seed + 2)[0]]
    cold_s, _ = ask(port, cold, 1)
    second_s, usage = ask(port, said, 1)
    return cold_s, second_s, usage["prompt_tokens_details"]["cached_tokens"]


def shown(values: list[float]) -> str:
    return f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-requests", type=int, default=48)
    parser.add_argument("--work-dir", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        engine_dir = make_engine(args.work_dir or Path(temporary), args.dtype)
        with LLM(engine_dir, tokenizer=DEMO, mode="leader") as llm, server(engine_dir) as (port, process):
            session = llm.session(NgramDrafter(DRAFT_LEN, NGRAM_SIZE))
            ratios, cpus, found = [], [], []
            for i in range(args.rounds):
                prompts = prompts_of(args.num_requests, PROMPT_LEN, 100 + i)
                (loop, loop_cpu), (http_, http_cpu) = (
                    loop_throughput(llm, session, prompts),
                    http_throughput(port, process, prompts),
                )
                print(
                    f"loop {loop:.1f} tokens/s, {loop_cpu:.2f} s CPU; HTTP {http_:.1f} tokens/s, {http_cpu:.2f} s CPU"
                )
                ratios.append(http_ / loop)
                cpus.append(http_cpu / loop_cpu)
            print(f"HTTP / loop, {CLIENTS} clients: {shown(ratios)}; CPU of the server / of the loop: {shown(cpus)}")
            for i in range(args.rounds + 2):
                found.append(turns(llm, session, port, 1000 + 10 * i))
            print(f"found of {HISTORY_LEN + 10} tokens: {sorted(num for *_, num in found)}")
            print(f"cold TTFT: {shown([cold for cold, *_ in found])} s")
            print(f"turn 2 / cold: {shown([second / cold for cold, second, _ in found])}")


if __name__ == "__main__":
    main()
