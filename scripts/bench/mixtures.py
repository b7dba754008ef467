"""A mixture of experts beside OpenVINO GenAI, llama.cpp, and the time that memory needs for what is chosen.

The model is a Qwen3-MoE of 669 M parameters with random weights: 12 layers of 64 experts, 8 of which a token chooses.
Measured are a token after a short prompt and after one of 900, a step of 11 tokens (a prompt of so many), and the
prompt of 900 itself. Systems are processes of their own and take turns, and each turn also measures how fast all
threads read memory: the bytes that a token reads (its experts, attention, output layer, K/V, as the engine has them) by
that are the least time that it can take. Ratios are of measurements of one turn, and medians are given.

    python -m scripts.bench.mixtures --openvino-python ov/bin/python [--dtypes bfloat16,int8,int4] [--runs 5]
        [--work-dir DIR]

bench/peers.py says how OpenVINO is installed and how each system quantizes. llama.cpp is `pip install xllamacpp`, in
this Python or in --llamacpp-python's. `--work-dir` keeps what is made of the model (`--prepare` makes it and ends).
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from runtime import specdec_version
from scripts.bench.peers import (
    FORMATS,
    PACKAGES,
    Model,
    Package,
    Worker,
    describe_machine,
    export_to_gguf,
    export_to_openvino,
    find_package,
    make_engine,
    names_among,
    once,
    positive,
    say,
)

SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 16000,
    "max_position_embeddings": 4096,
}
SYSTEMS = ("specdec", "openvino", "xllamacpp")
SHORT, LONG, FEW, OUTPUT_LEN, DRAFT_LEN, MAX_TOKENS = 32, 900, 11, 48, 10, 1088
STEP_ALONE = "1 token, the step alone"
STEPS = {"1 token": SHORT, STEP_ALONE: SHORT, "1 after 900": LONG}
"""Steps of one token, and the tokens before it."""
XLLAMACPP = Package("import xllamacpp; print(xllamacpp.__version__)", "pip install xllamacpp")
WEIGHT_BITS = {"bfloat16": 16.0, "int8": 8.25, "int4": 4.25}


def save_mixture(directory: Path) -> None:
    """The same weights on every call.

    Embeddings are large beside what layers add, so that tokens choose experts of their own: with transformers' initial
    ones 11 tokens share 19 of the 64 in a layer.
    """
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE))
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(64)
    model.save_pretrained(directory)
    torch.set_default_dtype(torch.float32)


def bytes_of_step(format_name: str, context_len: int) -> float:
    """Bytes that a step of one token reads: weights, those of the experts it chooses, and K/V."""
    hidden, layers, kv_heads = SHAPE["hidden_size"], SHAPE["num_hidden_layers"], SHAPE["num_key_value_heads"]
    heads = 2 * (SHAPE["num_attention_heads"] + kv_heads) * SHAPE["head_dim"]
    quantized = layers * hidden * (heads + 3 * SHAPE["moe_intermediate_size"] * SHAPE["num_experts_per_tok"])
    output, routers = SHAPE["vocab_size"] * hidden, layers * hidden * SHAPE["num_experts"]
    precision = FORMATS[format_name].precision
    output_bits = WEIGHT_BITS[format_name] if precision.quantize_lm_head else 16
    head_bytes = SHAPE["head_dim"] + 4 if precision.kv_cache else 2 * SHAPE["head_dim"]  # 8 bits have a scale
    weight_bytes = (quantized * WEIGHT_BITS[format_name] + output * output_bits + routers * 16) / 8
    return weight_bytes + 2 * layers * kv_heads * head_bytes * context_len


def bytes_per_second() -> float:
    """Bytes a second that all threads read from memory: the best of a few times."""
    numbers, seconds = torch.ones(256 << 18), []
    for _ in range(4):
        start = time.perf_counter()
        torch.dot(numbers, numbers)
        seconds.append(time.perf_counter() - start)
    return numbers.nbytes / min(seconds)


def plan(format_name: str, pythons: dict[str, Path], work_dir: Path, num_threads: int) -> list[tuple[str, Path, dict]]:
    """System, its Python and its worker's settings; what it needs is made unless it is there."""
    model_dir = once(work_dir / "hf-mixture-bfloat16", save_mixture)
    model = Model(SHAPE, max_input_len=1024, max_request_len=MAX_TOKENS)
    settings = {
        "engine_dir": str(make_engine(f"mixture-{format_name}", model, DRAFT_LEN, model_dir, work_dir)),
        "drafting": {"none": ("leader", None, "fixed")},
        "dtype": FORMATS[format_name].dtype,
        "is_quantized": FORMATS[format_name].is_quantized,
        "num_threads": num_threads,
        "variant": "none",
        "max_request_tokens": MAX_TOKENS,
        "max_cache_tokens": MAX_TOKENS,
    }
    planned = [("specdec", Path(sys.executable), settings)]
    if "openvino" in pythons:
        directory = export_to_openvino(pythons["openvino"], model_dir, work_dir, format_name)
        planned.append(("openvino", pythons["openvino"], settings | {"openvino_dir": str(directory)}))
    if "xllamacpp" in pythons:
        file = export_to_gguf(pythons["xllamacpp"], model_dir, work_dir, format_name, "--named-tokens")
        planned.append(("xllamacpp", pythons["xllamacpp"], settings | {"gguf_file": str(file)}))
    return planned


Times = dict[str, float]
"""Seconds by what was measured, and bytes a second of `memory`."""


def measure(worker: Worker, turn: int) -> Times:
    rng = random.Random(turn)

    def job(prompt_len: int, num_tokens: int) -> dict[str, Any]:
        prompt = [rng.randrange(3, SHAPE["vocab_size"]) for _ in range(prompt_len)]
        return worker.measure({"variant": "none", "prompt": prompt, "max_new_tokens": num_tokens})

    short, long = job(SHORT, OUTPUT_LEN), job(LONG, OUTPUT_LEN)
    few = median(job(FEW, 1)["ttft_s"] for _ in range(5))
    times = {
        "1 token": short["tpot_s"],
        "1 after 900": long["tpot_s"],
        "11 tokens": few,
        "prompt of 900": long["ttft_s"],
    }
    return times | ({STEP_ALONE: short["target_s"]} if "target_s" in short else {})


def bench(format_name: str, pythons: dict[str, Path], work_dir: Path, arguments: argparse.Namespace) -> list[str]:
    """Rows of the table."""
    turns: list[dict[str, Times]] = []
    with ExitStack() as stack:
        workers = [Worker(*one) for one in plan(format_name, pythons, work_dir, arguments.threads)]
        for worker in workers:
            stack.callback(worker.stop)
        for worker in workers:
            worker.wait_until_ready()
            say(f"{worker.system}: {worker.note['settings']}")
        for turn in range(arguments.runs + 1):
            turns.append({worker.system: measure(worker, turn) for worker in workers})
            turns[-1]["memory"] = {"bytes_per_second": bytes_per_second()}
            say(f"{format_name}, turn {turn} of {arguments.runs}")
    return list(rows_of(format_name, turns[1:]))


def rows_of(format_name: str, turns: list[dict[str, Times]]) -> Iterator[str]:
    for what in turns[0]["specdec"]:
        ours = [turn["specdec"][what] for turn in turns]
        cells = [format_name, what, f"{median(ours) * 1e3:.2f}"]
        if what in STEPS:
            num_bytes = bytes_of_step(format_name, STEPS[what])
            least = [num_bytes / turn["memory"]["bytes_per_second"] for turn in turns]
            cells += [f"{median(least) * 1e3:.2f}", quotient(ours, least)]
        else:
            cells += ["", ""]
        for system in SYSTEMS[1:]:
            has_it = what in turns[0].get(system, {})
            cells.append(quotient(ours, [turn[system][what] for turn in turns]) if has_it else "")
        yield f"| {' | '.join(cells)} |"


def quotient(ours: list[float], others: list[float]) -> str:
    return f"{median(one / other for one, other in zip(ours, others, strict=True)):.2f}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", type=names_among(WEIGHT_BITS), default=list(WEIGHT_BITS), help="comma-separated")
    parser.add_argument("--runs", type=positive, default=5, help="turns, after one that warms up")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    for name in ("openvino", "llamacpp"):
        parser.add_argument(f"--{name}-python", type=Path, default=Path(sys.executable), help="the Python it is in")
    parser.add_argument(
        "--work-dir", type=Path, help="keeps what is made of the model; remove it when specdec has changed"
    )
    parser.add_argument("--prepare", action="store_true", help="make it, and measure nothing")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    packages = {"openvino": PACKAGES["openvino"], "xllamacpp": XLLAMACPP}
    asked = {"openvino": arguments.openvino_python.absolute(), "xllamacpp": arguments.llamacpp_python.absolute()}
    pythons, versions = {}, {"specdec": specdec_version(), "torch": torch.__version__}
    for name, python in asked.items():
        version, reason = find_package(packages[name], python)
        if version:
            pythons[name], versions[name] = python, version
        else:
            say(f"skipped: {name}: {reason}")
    machine = describe_machine()
    print(
        f"{machine['cpu']}, {machine['num_cores']} cores, {arguments.threads} threads;",
        *machine["instructions"],
    )
    print(", ".join(f"{name} {version}" for name, version in versions.items()), end="\n\n")
    print("| weights | | specdec, ms | bytes ÷ bandwidth, ms | specdec ÷ that | ÷ OpenVINO | ÷ llama.cpp |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        work_dir = (arguments.work_dir or Path(temporary)).resolve()
        work_dir.mkdir(parents=True, exist_ok=True)
        for name in arguments.dtypes:
            if arguments.prepare:
                plan(name, pythons, work_dir, arguments.threads)
            else:
                print("\n".join(bench(name, pythons, work_dir, arguments)), flush=True)


if __name__ == "__main__":
    main()
