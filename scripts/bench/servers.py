"""`specdec serve` beside llama.cpp's server: the same weights, clients and prompts, plain and with n-gram lookup.

    python -m scripts.bench.servers --llama-server PATH --gguf-python PYTHON [--dtype bfloat16] [--rounds 3]
        [--work-dir DIR]

The model is the random Llama of 101 M parameters of `bench/serve.py` with the demo's tokenizer; prompts are first turns
of Spec-Bench. Four servers of two threads each are open at once, and one computes: in turn they get the same prompts,
new ones every time, so that nothing is found in a cache, from 1, 4 and 16 clients of `specdec bench`. Ratios are of
neighbours in a round; medians and the range are given.

llama.cpp's server, built for this processor:

    cmake -S llama.cpp -B build -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF && cmake --build build --target llama-server

`--gguf-python` is any Python that has numpy and the `gguf` package. Its lookup is `ngram-simple` with our n and length.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from transformers import AutoTokenizer

from scripts.bench.peers import SPEC_BENCH, export_to_gguf
from scripts.bench.serve import CLIENTS, DEMO, DRAFT_LEN, NGRAM_SIZE, make_engine, server

# Clients, and requests of each run.
LOADS = {1: 6, 4: 12, 16: 32}
OUTPUT_LEN, MAX_PROMPT_LEN = 64, 1000
# Of `specdec bench --json`: higher is better for the first, lower for the others.
METRICS = ("output_throughput", "median_tpot_ms", "median_ttft_ms")


def load_prompts() -> list[str]:
    """First turns of Spec-Bench, a category after the other in turn, as long as the engine takes them."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    by_category: dict[str, list[str]] = {}
    for line in (SPEC_BENCH / "question.jsonl").read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        prompt = question["turns"][0]
        if 20 <= len(tokenizer(prompt, verbose=False)["input_ids"]) <= MAX_PROMPT_LEN:
            by_category.setdefault(question["category"], []).append(prompt)
    longest = max(map(len, by_category.values()))
    return [prompts[i] for i in range(longest) for prompts in by_category.values() if i < len(prompts)]


@contextmanager
def llama_server(program: Path, gguf: Path, flags: list[str]) -> Iterator[int]:
    """llama.cpp's server with as many slots as the engine has rows: its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    threads = str(len(os.sched_getaffinity(0)))
    command = [str(program), "--model", str(gguf), "--port", str(port), "--parallel", str(CLIENTS), *flags]
    command += ["--ctx-size", str(CLIENTS * 1536), "--threads", threads, "--threads-batch", threads]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_ready(process, port)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def wait_until_ready(process: "subprocess.Popen[bytes]", port: int) -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise SystemExit(f"llama.cpp's server ended at once, with code {process.returncode}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise SystemExit("llama.cpp's server was not ready in a minute")


def bench(port: int, prompts: list[str], num_clients: int, extra: dict[str, Any]) -> dict[str, float]:
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        file.flush()
        command = [sys.executable, "-m", "specdec_cli", "bench", "--base-url", f"http://127.0.0.1:{port}", "--json"]
        command += ["--dataset", file.name, "--text-column", "prompt", "--num-warmups", "0", "--quiet", "--ignore-eos"]
        command += ["--output-len", str(OUTPUT_LEN), "--concurrency", str(num_clients)]
        command += ["--extra-body", json.dumps(extra)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    document: dict[str, float] = json.loads(done.stdout)
    if document["failed"]:
        raise SystemExit(
            f"{document['failed']} requests failed at port {port} of {extra}:\n{done.stderr}{document['errors']}"
        )
    return document


def shown(values: list[float]) -> str:
    return f"{median(values):.2f} [{min(values):.2f}–{max(values):.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--gguf-python", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work-dir", type=Path)
    args = parser.parse_args()
    with ExitStack() as stack:
        work_dir = args.work_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine_dir = make_engine(work_dir, args.dtype)
        model_dir = work_dir / f"hf-{args.dtype}"
        gguf = export_to_gguf(args.gguf_python.absolute(), model_dir, work_dir, args.dtype, "--tokenizer-dir", DEMO)
        ours, _ = stack.enter_context(server(engine_dir))
        lookup = ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(NGRAM_SIZE)]
        lookup += ["--spec-ngram-simple-size-m", str(DRAFT_LEN)]
        theirs = {
            "none": stack.enter_context(llama_server(args.llama_server, gguf, [])),
            "n-gram": stack.enter_context(llama_server(args.llama_server, gguf, lookup)),
        }
        prompts = load_prompts()
        for port in (ours, *theirs.values()):
            bench(port, prompts[-2:], 1, {})
        print("| clients, drafter | " + " | ".join(f"ours, {metric} | theirs | ratio" for metric in METRICS) + " |")
        print("|---" * (1 + 3 * len(METRICS)) + "|")
        for num_clients, num_requests in LOADS.items():
            measured: dict[str, list[tuple[dict[str, float], dict[str, float]]]] = {name: [] for name in theirs}
            for _ in range(args.rounds):
                for drafter, port in theirs.items():
                    taken, prompts = prompts[:num_requests], prompts[num_requests:] + prompts[:num_requests]
                    extra = {} if drafter == "n-gram" else {"speculative": False}
                    pair = bench(ours, taken, num_clients, extra), bench(port, taken, num_clients, {})
                    measured[drafter].append(pair)
            for drafter, pairs in measured.items():
                print(row(f"{num_clients}, {drafter}", pairs), flush=True)


def row(name: str, pairs: list[tuple[dict[str, float], dict[str, float]]]) -> str:
    """Ratios are above 1 where ours is better."""
    cells = [name]
    for metric in METRICS:
        our, their = [a[metric] for a, _ in pairs], [b[metric] for _, b in pairs]
        better = [b / a if metric.endswith("_ms") else a / b for a, b in zip(our, their, strict=True)]
        cells += [f"{median(our):.1f}", f"{median(their):.1f}", shown(better)]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
