"""specdec beside Hugging Face `generate`, OpenVINO GenAI and llama.cpp: same weights, token ids, threads and dtype.

Every system has a process of its own per model and dtype (`scripts/bench/workers`), so that its peak memory is its own.
They take turns, prompt by prompt, one computing at a time, and every output has the same number of tokens, greedily
chosen. Ratios are of two measurements of one prompt in one turn; medians and the range are given. Outputs are compared
with Hugging Face's without a drafter in the same dtype (with specdec's where Hugging Face is not measured): in bfloat16
near ties may fall differently.

`--dtypes int8,int4` quantizes the weights of the model in bfloat16, as each system does by itself: OpenVINO has
activations and K/V in 8 bits too, as specdec; llama.cpp Q8_0 and Q4_0 with K/V in float16. Outputs then differ.

Models: `demo`, the shipped pair; `101m`, `350m` and `1100m` (TinyLlama's shape), Llamas with random weights; `tiny`,
another, to try the script. All processes hold their weights at once, at 1,100 M in float32 4.4 GB each, and OpenVINO
has two: `--peers` chooses.
Prompts: the demo's articles for `demo`, and Spec-Bench's summarization and rag where `../shared/data/spec_bench` is.
Random models have no tokenizer and take the ids of its Vicuna traces. Without it their prompts are random, with
repeated spans.

OpenVINO needs a virtual environment of its own, because it pins another transformers. llama.cpp may be in any: pip
compiles its package for this processor, in a quarter of an hour on two cores. What is not installed is left out, by
name, and nothing is fetched: on a machine without a network the wheels are enough.

    python -m venv ov
    ov/bin/pip install torch==2.13.0
    ov/bin/pip install openvino-genai optimum-intel[openvino]
    python -m venv llama
    CMAKE_ARGS=-DLLAVA_BUILD=OFF llama/bin/pip install llama-cpp-python gguf

    python -m scripts.bench.peers --openvino-python ov/bin/python --llamacpp-python llama/bin/python [--models 101m]
        [--dtypes float32] [--work-dir DIR] [--json FILE]

A short run is `--prompts 1 --runs 1`. `python -m scripts.bench.peers_report FILE...` prints one table of
several machines' JSON files.
"""

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from commands.inputs.dataset import load_samples, summarization_prompt
from runtime import specdec_version
from runtime.builder.build import BuildEffort, build_engine
from runtime.builder.convert import convert
from runtime.checkpoint.config import BuildConfig, Compiler, QuantConfig
from runtime.checkpoint.resolve import resolve_model
from scripts.bench.llamas import LLAMA_101M, save_random_llama
from scripts.bench.peers_report import METRICS, draw, print_result, print_summary

ROOT = Path(__file__).resolve().parents[2]
SPEC_BENCH = ROOT.parent / "shared" / "data" / "spec_bench"
NGRAM_DRAFT_LEN, NGRAM_SIZE, DRAFT_MODEL_DRAFT_LEN = 10, 2, 4
BLOCK, BATCH, MAX_INPUT_LEN, MAX_REQUEST_LEN = 32, 4, 1536, 2048
REFERENCES = ("hugging-face none", "specdec none-v1")  # the first that is measured
# Instruction sets that decide how fast products are, as Linux names them.
INSTRUCTIONS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16"),
    *("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2", "sme"),
)
# (numerator, denominator): peers over specdec, then what leader mode and drafters change.
PAIRS = [
    ("hugging-face none", "specdec none-v2"),
    ("openvino none", "specdec none-v2"),
    ("llama.cpp none", "specdec none-v2"),
    ("hugging-face ngram", "specdec ngram-v2"),
    ("openvino ngram", "specdec ngram-v2"),
    ("llama.cpp ngram", "specdec ngram-v2"),
    ("hugging-face draft-target", "specdec draft-target"),
    ("specdec none-v1", "specdec none-v2"),
    ("specdec ngram-v1", "specdec ngram-v2"),
    ("specdec none-v2", "specdec ngram-v2"),
    ("specdec none-v1", "specdec draft-target"),
    ("hugging-face none", "hugging-face ngram"),
    ("hugging-face none", "hugging-face draft-target"),
    ("openvino none", "openvino ngram"),
    ("llama.cpp none", "llama.cpp ngram"),
]


@dataclass(frozen=True)
class Format:
    """Number formats of a model: its dtype, and how each system quantizes its weights and, where it can, K/V."""

    dtype: str
    precision: QuantConfig = field(default_factory=QuantConfig)
    openvino: tuple[str, ...] = ()
    """Flags of optimum-cli."""
    gguf: str | None = None

    @property
    def is_quantized(self) -> bool:
        return self.gguf is not None


FORMATS = {
    **{dtype: Format(dtype) for dtype in ("float32", "bfloat16", "float16")},
    # OpenVINO and llama.cpp quantize the output layer to 8 bits in both. Ours is quantized in int8 only.
    "int8": Format(
        "bfloat16", QuantConfig("int8", quantize_lm_head=True, kv_cache="INT8"), ("--weight-format", "int8"), "Q8_0"
    ),
    "int4": Format(
        "bfloat16",
        QuantConfig("int4", group_size=64, kv_cache="INT8"),
        ("--weight-format", "int4", "--sym", "--group-size", "64", "--ratio", "1.0"),
        "Q4_0",
    ),
}


@dataclass(frozen=True)
class Package:
    """A peer that may be missing: what tells its version in the Python it is looked for in, and what installs it."""

    probe: str
    install: str


PACKAGES = {
    "openvino": Package(
        "import numpy, openvino, openvino_genai, optimum.intel; print(openvino_genai.__version__)",
        "python -m venv ov && ov/bin/pip install torch==2.13.0 && "
        "ov/bin/pip install openvino-genai optimum-intel[openvino], and give --openvino-python ov/bin/python",
    ),
    "llama.cpp": Package(
        "import numpy, gguf, llama_cpp; print(llama_cpp.__version__)",
        "python -m venv llama && CMAKE_ARGS=-DLLAVA_BUILD=OFF llama/bin/pip install llama-cpp-python gguf, "
        "and give --llamacpp-python llama/bin/python",
    ),
}
PEERS = ("hugging-face", *PACKAGES)


@dataclass(frozen=True)
class Model:
    """`shape`: fields of a random Llama's config, None for the demo."""

    shape: dict[str, int] | None
    compiler: Compiler = "aot"
    max_input_len: int = MAX_INPUT_LEN
    max_request_len: int = MAX_REQUEST_LEN


_LONG: dict[str, Any] = {"max_input_len": 4200, "max_request_len": 4608}
MODELS = {
    "demo": Model(None),
    "101m": Model(LLAMA_101M | {"max_position_embeddings": 8192}, **_LONG),
    "350m": Model(
        {
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "max_position_embeddings": 8192,
        },
        **_LONG,
    ),
    "1100m": Model(
        {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 22,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "vocab_size": 32000,
            "max_position_embeddings": 8192,
        },
        **_LONG,
    ),
    "tiny": Model(
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 512,
            "max_position_embeddings": 2048,
        },
        compiler="none",
    ),
}


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def once(directory: Path, make: Callable[[Path], object]) -> Path:
    """The directory, made unless it is there; what was interrupted is made again."""
    if not directory.exists():
        say(f"making {directory.name}")
        partial = directory.with_name(f"{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        make(partial)
        partial.rename(directory)
    return directory


def make_model(name: str, dtype: str, work_dir: Path) -> Path:
    """The Hugging Face directory of a model in a dtype, which every system starts from."""
    shape = MODELS[name].shape if name in MODELS else None

    def save(directory: Path) -> None:
        if shape:
            save_random_llama(directory, dtype, shape)
            return
        source = resolve_model(name)
        AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype)).save_pretrained(directory)
        AutoTokenizer.from_pretrained(source).save_pretrained(directory)

    return once(work_dir / f"hf-{name}-{dtype}", save)


def make_engine(name: str, model: Model, max_draft_len: int, model_dir: Path, work_dir: Path) -> Path:
    """`name` ends with the format's."""

    def build(directory: Path) -> None:
        checkpoint_dir = directory.with_suffix(".checkpoint")
        precision = FORMATS[name.rpartition("-")[2]].precision
        convert(model_dir, checkpoint_dir, None, replace=True, progress=lambda *_: None, precision=precision)
        settings = BuildConfig(
            compiler=model.compiler,
            max_batch_size=BATCH,
            max_input_len=model.max_input_len,
            max_seq_len=model.max_request_len + max_draft_len,
            max_draft_len=max_draft_len,
            tokens_per_block=BLOCK,
            speculative_decoding_mode="draft_tokens_external" if max_draft_len else "none",
        )
        device = torch.device("cpu")
        build_engine(
            checkpoint_dir,
            directory,
            settings,
            device,
            replace=True,
            phase=lambda _: None,
            effort=BuildEffort(measure_costs=False),
        )
        shutil.rmtree(checkpoint_dir)

    return once(work_dir / f"engine-{name}", build)


def export_to_openvino(python: Path, model_dir: Path, work_dir: Path, format_name: str) -> Path:
    """Weights keep their dtype: optimum compresses models of more than 1,000 M parameters only, unless it is told."""

    def export(directory: Path) -> None:
        command = [python.parent / "optimum-cli", "export", "openvino", "--model", model_dir]
        command += ["--task", "text-generation-with-past", *FORMATS[format_name].openvino, directory]
        offline = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=offline, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise SystemExit(f"optimum-cli failed for {model_dir.name}:\n{done.stdout[-2000:]}")

    return once(work_dir / f"openvino-{stem(model_dir)}-{format_name}", export)


def stem(model_dir: Path) -> str:
    """Name of a model without its dtype: 101m of `hf-101m-bfloat16`."""
    return model_dir.name.removeprefix("hf-").rpartition("-")[0]


def export_to_gguf(python: Path, model_dir: Path, work_dir: Path, format_name: str, *flags: str | Path) -> Path:
    """Flags: of llamacpp_export."""

    def export(directory: Path) -> None:
        directory.mkdir()
        command = [python, "-m", "scripts.bench.workers.llamacpp_export", model_dir, directory / "model.gguf", *flags]
        quantized = FORMATS[format_name].gguf
        command += ["--quantize-to", quantized] if quantized else []
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise SystemExit(f"llamacpp_export failed for {model_dir.name}:\n{done.stdout[-2000:]}")

    return once(work_dir / f"gguf-{stem(model_dir)}-{format_name}", export) / "model.gguf"


def load_prompts(name: str, model_dir: Path, num_prompts: int, prompt_len: int) -> dict[str, list[list[int]]]:
    """Token ids by set, cut to their last `prompt_len`."""
    sets: dict[str, list[list[int]]] = {}
    shape = MODELS[name].shape
    if shape is None:
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        samples = load_samples("demo", eval_task="summarize", dataset_dir=None, max_samples=num_prompts, seed=0)
        sets["demo articles"] = [tokenizer(summarization_prompt(s.text), verbose=False)["input_ids"] for s in samples]
    for category in ("summarization", "rag") if SPEC_BENCH.is_dir() else ():
        if shape is None:
            rows = read_rows(SPEC_BENCH / "question.jsonl", category)
            prompts = [tokenizer(row["turns"][0], verbose=False)["input_ids"] for row in rows]
        else:
            rows = read_rows(SPEC_BENCH / "vicuna_traces.jsonl", category)
            prompts = [[token % shape["vocab_size"] for token in row["prompt_ids"]] for row in rows]
        # Those long enough in their order, then the longest of the others.
        prompts.sort(key=lambda ids: min(len(ids), prompt_len), reverse=True)
        sets[f"Spec-Bench {category}"] = prompts[:num_prompts]
    if shape is not None and not sets:
        sets["synthetic"] = [synthetic_prompt(i, prompt_len, shape["vocab_size"]) for i in range(num_prompts)]
    return {name: [ids[-prompt_len:] for ids in prompts] for name, prompts in sets.items()}


def read_rows(file: Path, category: str) -> list[dict[str, Any]]:
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [row for row in rows if row["category"] == category]


def synthetic_prompt(seed: int, length: int, vocab_size: int) -> list[int]:
    """Spans of 16 tokens, every other one a repetition of what came before."""
    rng = random.Random(seed)
    ids: list[int] = []
    while len(ids) < length:
        start = rng.randrange(max(len(ids) - 16, 1))
        is_new = len(ids) % 32 == 0
        ids += [rng.randrange(3, vocab_size) for _ in range(16)] if is_new else ids[start : start + 16]
    return ids[:length]


class Worker:
    """A system's process. `variants` are what it measures."""

    def __init__(self, system: str, python: Path, settings: dict[str, Any]) -> None:
        self.system = system
        module = {"hugging-face": "hf", "llama.cpp": "llamacpp"}.get(system, system)
        self._process = subprocess.Popen(
            [python, "-m", f"scripts.bench.workers.{module}_worker", json.dumps(settings)],
            env=environment(settings["num_threads"]) | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_until_ready(self) -> None:
        ready = self._receive()
        self.variants: list[str] = ready["variants"]
        self.note = {"settings": ready["note"], "loaded_peak_memory_bytes": ready["peak_memory_bytes"]}

    def measure(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._receive()

    def stop(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the worker of {self.system} ended with exit status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def environment(num_threads: int) -> dict[str, str]:
    own = {"OMP_NUM_THREADS": str(num_threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return os.environ | own


def measure_in_turns(
    workers: list[Worker], sets: dict[str, list[list[int]]], output_len: int, runs: int
) -> list[dict[str, Any]]:
    """One record per system, variant, prompt and run, each turn in an order of its own.

    Run 0, of each set's first prompt, is a warm-up and left out.
    """
    records, rng = [], random.Random(0)
    turn = [(worker, variant) for worker in workers for variant in worker.variants]
    for run in range(runs + 1):
        for set_name, prompts in sets.items():
            for i, prompt in enumerate(prompts if run else prompts[:1]):
                rng.shuffle(turn)
                for worker, variant in turn:
                    job = {"variant": variant, "prompt": prompt, "max_new_tokens": output_len}
                    record = {"system": worker.system, "variant": variant, "set": set_name, "prompt": i, "run": run}
                    records.append(record | worker.measure(job))
        say(f"run {run} of {runs}")
    records = [record for record in records if record["run"] > 0]
    order = [f"{worker.system} {variant}" for worker in workers for variant in worker.variants]
    records.sort(key=lambda record: order.index(label(record)))
    compare_outputs(records)
    return records


def compare_outputs(records: list[dict[str, Any]]) -> None:
    """Put the position of the first difference from the reference, or None, in the place of the output ids."""
    labels = {label(record) for record in records}
    name = next(name for name in REFERENCES if name in labels)
    reference = {key_of(r): r["output_ids"] for r in records if label(r) == name}
    for record in records:
        pairs = zip(record["output_ids"], reference[key_of(record)], strict=True)
        record["first_difference"] = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        record["num_output_tokens"] = len(record["output_ids"])
    for record in records:
        del record["output_ids"]


def key_of(record: dict[str, Any]) -> tuple[str, int, int]:
    """Settings that two records of one turn share."""
    return record["set"], record["prompt"], record["run"]


def label(record: dict[str, Any]) -> str:
    return f"{record['system']} {record['variant']}"


def spread(values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": median(ordered), "min": ordered[0], "max": ordered[-1], "num_values": len(ordered)}


def summarize(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per set and variant. Peak memory is that of the variant's process at the end."""
    rows = []
    for set_name, name in dict.fromkeys((r["set"], label(r)) for r in records):
        own = [r for r in records if (r["set"], label(r)) == (set_name, name)]
        system = own[0]["system"]
        firsts = [r["first_difference"] for r in own if r["run"] == 1]
        peak = max(r["peak_memory_bytes"] for r in records if r["system"] == system and shares_process(r, own[0]))
        rows.append(
            {"set": set_name, "name": name}
            | {metric: spread(r[metric] for r in own) for metric in METRICS}
            | {
                "output_tokens_per_second": spread(r["num_output_tokens"] / r["wall_s"] for r in own),
                "tokens_per_step": spread(r["num_output_tokens"] / r["num_steps"] for r in own),
                "num_output_tokens": sum(r["num_output_tokens"] for r in own),
                "num_steps": sum(r["num_steps"] for r in own),
                "peak_memory_bytes": peak,
                "num_prompts": len(firsts),
                "num_equal": firsts.count(None),
                "first_differences": [first for first in firsts if first is not None],
            }
        )
    return rows


def shares_process(record: dict[str, Any], other: dict[str, Any]) -> bool:
    """OpenVINO has a process per variant."""
    return record["system"] != "openvino" or record["variant"] == other["variant"]


def divide(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every pair's ratios that can be had, each over measurements of one prompt in one turn."""
    by_name: dict[str, dict[tuple[str, int, int], dict[str, Any]]] = {}
    for record in records:
        by_name.setdefault(label(record), {})[key_of(record)] = record
    ratios = []
    for numerator, denominator in PAIRS:
        if numerator in by_name and denominator in by_name:
            pairs = [(record, by_name[denominator][key]) for key, record in by_name[numerator].items()]
            metrics = {metric: spread(n[metric] / d[metric] for n, d in pairs) for metric in METRICS}
            ratios.append({"numerator": numerator, "denominator": denominator} | metrics)
    return ratios


def plan_workers(settings: dict[str, Any], pythons: dict[str, Path], work_dir: Path) -> list[Worker]:
    """A process for specdec and every peer in `pythons`, started; two for OpenVINO.

    Hugging Face quantizes no model by itself.
    """
    python, model_dir, name = Path(sys.executable), Path(settings["model_dir"]), settings["format"]
    planned = [("specdec", python, settings)]
    if "hugging-face" in pythons and not FORMATS[name].is_quantized:
        planned.insert(0, ("hugging-face", pythons["hugging-face"], settings))
    if "openvino" in pythons:
        openvino_dir = export_to_openvino(pythons["openvino"], model_dir, work_dir, name)
        for variant in ("none", "ngram"):
            own = {"openvino_dir": str(openvino_dir), "variant": variant}
            planned.append(("openvino", pythons["openvino"], settings | own))
    if "llama.cpp" in pythons:
        own = {"gguf_file": str(export_to_gguf(pythons["llama.cpp"], model_dir, work_dir, name))}
        planned.append(("llama.cpp", pythons["llama.cpp"], settings | own))
    return [Worker(*plan) for plan in planned]


def drafting_of(settings: dict[str, Any]) -> dict[str, tuple[str, list[Any] | None, str]]:
    """Mode, drafter and draft lengths of each of specdec's variants."""
    ngram = ["ngram", settings["ngram_draft_len"], settings["ngram_size"]]
    variants: dict[str, tuple[str, list[Any] | None, str]] = {
        "none-v1": ("orchestrator", None, "fixed"),
        "none-v2": ("leader", None, "fixed"),
        "ngram-v1": ("orchestrator", ngram, "fixed"),
        "ngram-v2": ("leader", ngram, "fixed"),
    }
    if settings["draft_engine_dir"]:
        drafter = ["draft-target", settings["draft_engine_dir"], settings["draft_model_draft_len"]]
        variants["draft-target"] = ("orchestrator", drafter, "fixed")
    return variants


def prepare(name: str, format_name: str, work_dir: Path, max_request_tokens: int, num_threads: int) -> dict[str, Any]:
    """Settings for workers of a model in a format, which is made unless it is there."""
    model, dtype = MODELS[name], FORMATS[format_name].dtype
    model_dir = make_model(name, dtype, work_dir)
    engine_dir = make_engine(f"{name}-{format_name}", model, NGRAM_DRAFT_LEN, model_dir, work_dir)
    draft_dir = make_model("demo-draft", dtype, work_dir) if name == "demo" else None
    draft_engine_dir = make_engine(f"demo-draft-{format_name}", model, 0, draft_dir, work_dir) if draft_dir else None
    settings = {
        "model_dir": str(model_dir),
        "engine_dir": str(engine_dir),
        "draft_model_dir": draft_dir and str(draft_dir),
        "draft_engine_dir": draft_engine_dir and str(draft_engine_dir),
        "format": format_name,
        "dtype": dtype,
        "is_quantized": FORMATS[format_name].is_quantized,
        "num_threads": num_threads,
        "max_request_tokens": max_request_tokens,
        # What BATCH requests need and no more: its memory counts.
        "max_cache_tokens": BATCH * -(-max_request_tokens // BLOCK) * BLOCK,
        "ngram_size": NGRAM_SIZE,
        "ngram_draft_len": NGRAM_DRAFT_LEN,
        "draft_model_draft_len": DRAFT_MODEL_DRAFT_LEN,
    }
    return settings | {"drafting": drafting_of(settings)}


def bench(
    name: str, format_name: str, pythons: dict[str, Path], work_dir: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Everything about one model in one format."""
    max_request_tokens = arguments.prompt_len + arguments.output_len + NGRAM_DRAFT_LEN
    settings = prepare(name, format_name, work_dir, max_request_tokens, arguments.threads)
    num_prompts = arguments.prompts
    sets = load_prompts(name, Path(settings["model_dir"]), num_prompts, arguments.prompt_len)
    measured = {set_name: prompts[: arguments.prompts] for set_name, prompts in sets.items()}
    with ExitStack() as stack:
        workers = plan_workers(settings, pythons, work_dir)
        for worker in workers:
            stack.callback(worker.stop)
        for worker in workers:
            worker.wait_until_ready()
        records = measure_in_turns(workers, measured, arguments.output_len, arguments.runs)
    result = {
        "model": name,
        "dtype": format_name,
        "prompt_lengths": {set_name: [len(ids) for ids in prompts] for set_name, prompts in measured.items()},
        "notes": {f"{w.system} {' '.join(w.variants)}": w.note for w in workers},
        "systems": summarize(records),
        "ratios": divide(records),
        "records": records,
    }
    return result


def find_package(package: Package, python: Path) -> tuple[str | None, str]:
    """The version of a peer's package in that Python, or None and why not."""
    try:
        done = subprocess.run([python, "-c", package.probe], capture_output=True, text=True)
    except OSError as error:
        return None, f"cannot run {python}: {error}; install: {package.install}"
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return None, f"{python}: {reason}; install: {package.install}"
    return done.stdout.split()[-1], ""


def describe_machine() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())  # of the first processor
    flags = fields.get("flags", fields.get("Features", "")).split()
    return {
        "cpu": fields.get("model name", platform.machine()),
        "num_cores": os.cpu_count(),
        "instructions": [name for name in INSTRUCTIONS if name in flags],
    }


def find_skipped(arguments: argparse.Namespace) -> dict[str, str]:
    skipped = {}
    for name in arguments.models:
        if name != "demo":
            skipped[f"draft-target on {name}"] = "the model has no draft model"
    if not SPEC_BENCH.is_dir():
        skipped["Spec-Bench"] = "no directory `../shared/data/spec_bench`; random models take synthetic prompts"
    if arguments.png and find_spec("matplotlib") is None:
        skipped["PNG"] = "matplotlib is not installed; install: pip install 'specdec-cli[dev]'"
    return skipped


def names_among(known: Iterable[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown name (there are {', '.join(known)}): {name}")
        return names

    return parse


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1: {text}")
    return int(text)


def add_python_flags(parser: argparse.ArgumentParser) -> None:
    for name in ("openvino", "llamacpp"):
        python = os.environ.get(f"SPECDEC_{name.upper()}_PYTHON", sys.executable)
        parser.add_argument(f"--{name}-python", type=Path, metavar="FILE", default=python, help="the Python it is in")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    models = ["demo", "101m", "350m", "1100m"]
    parser.add_argument("--models", type=names_among(MODELS), default=models, help="comma-separated")
    parser.add_argument("--dtypes", type=names_among(FORMATS), default=["float32", "bfloat16"], help="comma-separated")
    parser.add_argument("--peers", type=names_among(PEERS), default=list(PEERS), help="comma-separated")
    parser.add_argument("--prompts", type=positive, default=3, help="of each set")
    parser.add_argument("--prompt-len", type=positive, default=900, help="longer prompts keep their last tokens")
    parser.add_argument("--output-len", type=positive, default=128)
    parser.add_argument("--runs", type=positive, default=3, help="after a warm-up")
    parser.add_argument("--threads", type=positive, default=os.cpu_count())
    add_python_flags(parser)
    parser.add_argument("--work-dir", type=Path, help="keeps models and engines; remove it when specdec has changed")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--png", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.prompt_len > MAX_INPUT_LEN or arguments.prompt_len + arguments.output_len > MAX_REQUEST_LEN:
        parser.error(f"prompts may have {MAX_INPUT_LEN} tokens, with the output {MAX_REQUEST_LEN}")
    for file in (arguments.json, arguments.png):
        if file and not file.parent.is_dir():
            parser.error(f"no such directory: {file.parent}")
    return arguments


def find_peers(arguments: argparse.Namespace) -> tuple[dict[str, Path], dict[str, str], dict[str, str]]:
    """The Python of every peer that is asked for and there, its version, and why the others are left out."""
    pythons, versions, skipped = {"hugging-face": Path(sys.executable)}, {}, {}
    # Not resolved: a virtual environment's python is a link.
    for name, python in (("openvino", arguments.openvino_python), ("llama.cpp", arguments.llamacpp_python)):
        if name in arguments.peers:
            found, reason = find_package(PACKAGES[name], python.absolute())
            if found:
                pythons[name], versions[name] = python.absolute(), found
            else:
                skipped[name] = reason
    return {name: pythons[name] for name in arguments.peers if name in pythons}, versions, skipped


def print_head(document: dict[str, Any]) -> None:
    machine, settings = document["machine"], document["settings"]
    print(f"{machine['cpu']}, {machine['num_cores']} cores, {settings['num_threads']} threads")
    print(f"instructions: {' '.join(machine['instructions']) or '-'}")
    print(", ".join(f"{name} {found or '-'}" for name, found in document["versions"].items()))
    print(f"output {settings['output_len']} tokens, {settings['num_runs']} runs, median [min-max]")
    for name, reason in document["skipped"].items():
        print(f"skipped: {name}: {reason}")


def main() -> None:
    arguments = parse_arguments()
    pythons, versions, missing = find_peers(arguments)
    document: dict[str, Any] = {
        "machine": describe_machine(),
        "versions": {"specdec-cli": specdec_version()}
        | {name: metadata.version(name) for name in ("torch", "transformers")}
        | versions,
        "settings": {
            "num_threads": arguments.threads,
            "max_prompt_len": arguments.prompt_len,
            "output_len": arguments.output_len,
            "num_prompts_of_each_set": arguments.prompts,
            "num_runs": arguments.runs,
            "ngram": {"max_draft_len": NGRAM_DRAFT_LEN, "max_matching_ngram_size": NGRAM_SIZE},
            "draft_target": {"max_draft_len": DRAFT_MODEL_DRAFT_LEN},
        },
        "skipped": missing | find_skipped(arguments),
        "results": [],
    }
    results = document["results"]
    print_head(document)
    with tempfile.TemporaryDirectory() as temporary:
        work_dir = (arguments.work_dir or Path(temporary)).resolve()
        work_dir.mkdir(parents=True, exist_ok=True)
        for name in arguments.models:
            for dtype in arguments.dtypes:
                say(f"{name}, {dtype}")
                results.append(bench(name, dtype, pythons, work_dir, arguments))
                print_result(results[-1])
                sys.stdout.flush()
                if arguments.json:
                    arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
                if arguments.png and "PNG" not in document["skipped"]:
                    draw(results, arguments.png)
    print_summary(document)


if __name__ == "__main__":
    main()
