"""Real models from GGUF files on Spec-Bench's six kinds of prompts: specdec beside OpenVINO GenAI, llama.cpp and HF.

`--questions` takes another file of questions by category: SPEED-Bench's `qualitative.jsonl` has eleven kinds. Its
license lets nobody pass the texts on; `nemo_skills/dataset/speed-bench/prepare.py` of NVIDIA-NeMo/Skills fetches them.

SmolLM2-135M-Instruct (Q4_1) with its chat template, and Gemma 3 270M (Q4_K_M), which is no chat model and takes the
text as it is. Prompts are token ids, the same for all. Outputs end at the model's end ids or after `--output-len`
tokens, chosen greedily and as the model's publisher samples. llama.cpp and Hugging Face read the same file (Hugging
Face dequantises it, to bfloat16). OpenVINO quantizes the dequantised numbers again, in its own way, to 8 and to 4 bits,
since it reads no such file of its own. specdec drafts for itself with a copy in int4 of the same numbers in bfloat16:
the file's weights have as few bits as the copy.

Systems are processes of their own (`scripts/bench/workers`) and take turns, prompt by prompt. Times of a kind are added
up over its prompts: TPOT is seconds after the first token by tokens after the first. What is measured stands in
`--json` and is not measured again, so that a run may be cut into pieces by `--models`, `--kinds` and `--systems`;
ratios are best taken of what was measured in one piece.

    python -m scripts.bench.real --json FILE [--models smollm2] [--kinds chat,rag] [--systems specdec,llama.cpp]
        [--questions qualitative.jsonl]
        [--openvino-python ov/bin/python] [--llamacpp-python llama/bin/python] [--hf-python hf/bin/python]
        [--work-dir DIR] [--update README.md docs/benchmarks.md]

`scripts/real_model.sh` fetches SmolLM2. Files are looked for in `$SPECDEC_REAL_DIR`, else in ~/.cache/specdec-real;
bench/peers.py says how the peers are installed, and Hugging Face needs `accelerate` and `gguf`. What is missing is left
out, by name. `--work-dir` keeps what is made of the models (`--prepare` makes it and ends), `--update` writes the
tables between the marks `<!-- real models: NAME -->` and `<!-- end real models -->` of Markdown files.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from commands.inputs.dataset import first_turn
from runtime import specdec_version
from runtime.builder.engine_cache import engine_of_model, settings_of
from runtime.llm import LLM
from runtime.text.chat import ChatTemplate
from runtime.text.trace_lines import check_text
from runtime.util.cache import cache_dir
from runtime.util.errors import SpecDecError
from scripts.bench import peers as bench_peers
from scripts.bench import real_report
from scripts.bench.peers import ROOT, SPEC_BENCH, Package, Worker, names_among, once, positive, say

MAX_PROMPT_LEN, MAX_REQUEST_LEN = 1600, 2048
START_IDS = list(range(100, 108))
SPEC_BENCH_KINDS = {
    "chat": ("writing", "reasoning", "coding", "roleplay", "extraction", "stem", "humanities", "math"),
    "translation": ("translation",),
    "summarization": ("summarization",),
    "qa": ("qa",),
    "maths": ("math_reasoning",),
    "rag": ("rag",),
}
"""Spec-Bench's six tasks, and the categories of each."""


@dataclass(frozen=True)
class RealModel:
    """A file, and how its publisher samples: SmolLM2's model card, Gemma's generation_config."""

    title: str
    file: str
    sampling: dict[str, float]


MODELS = {
    "smollm2": RealModel("SmolLM2-135M-Instruct", "smollm2.gguf", {"temperature": 0.2, "top_k": 0, "top_p": 0.9}),
    "gemma3": RealModel("Gemma 3 270M", "gemma-3-270m.gguf", {"temperature": 1.0, "top_k": 64, "top_p": 0.95}),
}
NGRAM, SUFFIX, SELF = ["ngram", 10, 2], ["suffix", 10], ["self", 8]
DRAFTING: dict[str, dict[str, tuple[str, list[Any] | None, str]]] = {
    "specdec": {
        "no drafter": ("leader", None, "fixed"),
        "n-gram `[10,2]`, fixed": ("leader", NGRAM, "fixed"),
        "n-gram `[10,2]`, automatic": ("leader", NGRAM, "auto"),
        "`AUTO` (suffix matching)": ("leader", SUFFIX, "auto"),
    },
    "specdec-bfloat16": {
        "no drafter": ("leader", None, "fixed"),
        "self-draft int4, automatic": ("leader", SELF, "auto"),
    },
}
PEERS = {"openvino-int8": "none", "openvino-int4": "none", "llama.cpp": "none", "hugging-face": "none"}
"""The variant of each that is measured."""
SYSTEMS = (*DRAFTING, *PEERS)
PACKAGES = bench_peers.PACKAGES | {
    "hugging-face": Package(
        "import accelerate, gguf, transformers; print(transformers.__version__)",
        "pip install accelerate gguf, and give --hf-python its Python",
    )
}
FROM_NUMBERS = ("specdec-bfloat16", "openvino-int8", "openvino-int4")
"""Systems that are made of the numbers as Hugging Face dequantises them."""


def read_questions(file: Path) -> dict[str, list[str]]:
    """First turns by kind: Spec-Bench's tasks, a chat's categories in turn; the categories of any other file."""
    by_category: dict[str, list[str]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        where = f"question {row['question_id']} of {file}"
        text = check_text(first_turn(row.get("turns", row.get("messages")), where), where)
        by_category.setdefault(row["category"], []).append(text)
    if set(by_category) != {name for names in SPEC_BENCH_KINDS.values() for name in names}:
        return by_category
    return {
        kind: [text for nth in zip(*(by_category[name] for name in names), strict=True) for text in nth]
        for kind, names in SPEC_BENCH_KINDS.items()
    }


def encode_prompts(texts: list[str], llm: LLM, num_prompts: int) -> list[list[int]]:
    """Token ids of the first texts that are not too long, `num_prompts` of them at most."""
    template = find_template(llm)
    encoded = (template.encode([{"role": "user", "content": t}]) if template else llm.encode(t)[0] for t in texts)
    return list(islice((list(ids) for ids in encoded if len(ids) <= MAX_PROMPT_LEN), num_prompts))


def find_template(llm: LLM) -> ChatTemplate | None:
    """None for a model that is not for chats."""
    try:
        return llm.chat_template
    except SpecDecError:
        return None


class Plan:
    """A model: what is made of it, and the processes that have it, each started when it is first needed."""

    def __init__(self, name: str, pythons: dict[str, Path], work_dir: Path, arguments: argparse.Namespace) -> None:
        self.name, self.model, self._pythons, self._work_dir = name, MODELS[name], pythons, work_dir
        self.file = real_dir() / self.model.file
        self._num_threads = arguments.threads
        self._stack, self._workers = ExitStack(), dict[str, Worker]()

    def settings(self, system: str) -> dict[str, Any]:
        """Settings of a system's worker; its files are made unless they are there."""
        common: dict[str, Any] = {
            "num_threads": self._num_threads,
            "max_request_tokens": MAX_REQUEST_LEN,
            "max_cache_tokens": MAX_REQUEST_LEN,
            "dtype": "bfloat16",
            "is_quantized": True,
        }
        if system in DRAFTING:
            return common | {"engine_dir": str(self._engine(system)), "drafting": DRAFTING[system]}
        if system == "llama.cpp":
            return common | {"gguf_file": str(self.file)}
        if system == "hugging-face":
            return common | {"model_dir": str(self.file)}
        format_name = system.removeprefix("openvino-")
        made = bench_peers.export_to_openvino(
            self._pythons["openvino"], self._dequantized(), self._work_dir, format_name
        )
        return common | {"openvino_dir": str(made)}

    def worker(self, system: str) -> Worker:
        if system not in self._workers:
            package = package_of(system)
            worker = Worker(package, self._pythons[package], self.settings(system))
            self._stack.callback(worker.stop)
            worker.wait_until_ready()
            self._workers[system] = worker
        return self._workers[system]

    def close(self) -> None:
        self._stack.close()

    def llm(self) -> LLM:
        return LLM(str(self._engine("specdec")))

    def has_engine(self) -> bool:
        return any((cache_dir() / "engines").glob(f"{self.file.name}-*"))

    def _engine(self, system: str) -> Path:
        """Engine directory in the cache of engines, where `run` finds it too."""
        if system == "specdec":
            source, settings = self.file, settings_of({})
        else:
            source, settings = self._dequantized(), settings_of({"dtype": "bfloat16", "self_draft": "int4"})
        return self._stack.enter_context(engine_of_model(str(source), settings))

    def _dequantized(self) -> Path:
        def make(directory: Path) -> None:
            command = [self._pythons["hugging-face"], "-m", "scripts.bench.workers.dequantize", self.file, directory]
            subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)

        return once(self._work_dir / f"hf-{self.name}-float32", make)

    def seconds_to_first_token(self, system: str) -> float:
        """Time from the start of a command to its first token, everything that is made once being there.

        Ours is `specdec run --model-dir`, theirs a Python process that loads the model.
        """
        start = time.perf_counter()
        if system in DRAFTING:
            source = ["--model-dir", self.file] if system == "specdec" else ["--engine-dir", self._engine(system)]
            prompt = self._work_dir / "start.jsonl"
            prompt.write_text(json.dumps({"prompt_ids": START_IDS}) + "\n", encoding="utf-8")
            asked = ["--input-file", prompt, "--max-output-len", "1", "--quiet"]
            command = [sys.executable, "-m", "specdec_cli", "run", *source, *asked]
            subprocess.run(command, check=True, stdout=subprocess.PIPE)
            return time.perf_counter() - start
        package = package_of(system)
        worker = Worker(package, self._pythons[package], self.settings(system))
        worker.wait_until_ready()
        worker.measure({"variant": PEERS[system], "prompt": START_IDS, "max_new_tokens": 2})
        seconds = time.perf_counter() - start
        worker.stop()
        return seconds


def real_dir() -> Path:
    return Path(os.environ.get("SPECDEC_REAL_DIR") or Path.home() / ".cache" / "specdec-real")


def measure_kind(
    plan: Plan, kind: str, prompts: list[list[int]], end_ids: list[int], document: dict[str, Any], systems: list[str],
    output_len: int,
) -> None:  # fmt: skip
    """Measure all of a kind that is not yet in the document, in turns."""
    known = {key_of(record) for record in document["records"]}
    rng = random.Random(kind)
    for i, prompt in enumerate(prompts):
        turn = [
            {"model": plan.name, "kind": kind, "prompt": i, "system": system, "variant": variant, "mode": mode}
            for system in systems
            for variant in DRAFTING.get(system, {"": None})
            for mode in real_report.MODES
        ]
        rng.shuffle(turn)
        for record in turn:
            if key_of(record) in known:
                continue
            job = {
                "variant": record["variant"] or PEERS[record["system"]],
                "prompt": prompt,
                "max_new_tokens": output_len,
                "end_ids": end_ids,
                "sampling": plan.model.sampling if record["mode"] == "sampled" else None,
                "seed": i + 1,
            }
            measured = plan.worker(record["system"]).measure(job)
            measured["num_output_tokens"] = len(measured.pop("output_ids"))
            document["records"].append(record | {"num_prompt_tokens": len(prompt)} | measured)


def package_of(system: str) -> str:
    """Package of a system: openvino of `openvino-int8`."""
    return next(name for name in ("specdec", *PACKAGES) if system.startswith(name))


def key_of(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record[name] for name in ("model", "kind", "prompt", "system", "variant", "mode"))


def place_of(record: dict[str, Any], kinds: list[str]) -> tuple[int, ...]:
    """Order of the tables: systems and variants as they are named here, in whatever turn they were measured."""
    variants = list(DRAFTING.get(record["system"], {"": None}))
    return (
        list(MODELS).index(record["model"]),
        SYSTEMS.index(record["system"]),
        variants.index(record["variant"]),
        kinds.index(record["kind"]),
        record["prompt"],
        real_report.MODES.index(record["mode"]),
    )


def measure_starts(plan: Plan, systems: list[str], document: dict[str, Any]) -> list[str]:
    """Time each system's start once, ours also with its engine to build; returns the systems that can be had."""
    starts = document["seconds_to_first_token"].setdefault(plan.name, {})
    there = []
    for system in systems:
        try:
            if system == "specdec" and not plan.has_engine() and "specdec, first" not in starts:
                starts["specdec, first"] = plan.seconds_to_first_token(system)
            plan.settings(system)
            if system not in starts:
                starts[system] = plan.seconds_to_first_token(system)
        except (SystemExit, SpecDecError, subprocess.CalledProcessError) as error:
            document["skipped"][f"{plan.name}, {system}"] = str(error)
            say(f"skipped: {plan.name}, {system}: {error}")
        else:
            there.append(system)
    return there


def find_systems(arguments: argparse.Namespace) -> tuple[list[str], dict[str, Path], dict[str, str], dict[str, str]]:
    """Requested systems that are there, the Python of each package, its version, and why others are left out."""
    pythons, versions, skipped = {"specdec": Path(sys.executable)}, {"specdec-cli": specdec_version()}, {}
    given = {
        "openvino": arguments.openvino_python,
        "llama.cpp": arguments.llamacpp_python,
        "hugging-face": arguments.hf_python,
    }
    for name, python in given.items():
        found, reason = bench_peers.find_package(PACKAGES[name], python.absolute())
        if found:
            pythons[name], versions[name] = python.absolute(), found
        else:
            skipped[name] = reason
    systems = []
    for system in arguments.systems:
        needs = {package_of(system)} | ({"hugging-face"} if system in FROM_NUMBERS else set())
        if needs <= set(pythons):
            systems.append(system)
        else:
            skipped.setdefault(system, f"needs {' and '.join(sorted(needs - set(pythons)))}")
    return systems, pythons, versions, skipped


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", required=True, help="what was measured, kept and added to")
    parser.add_argument("--models", type=names_among(MODELS), default=list(MODELS), help="comma-separated")
    parser.add_argument("--kinds", help="comma-separated (default: all that the questions have)")
    parser.add_argument("--systems", type=names_among(SYSTEMS), default=list(SYSTEMS), help="comma-separated")
    parser.add_argument("--questions", type=Path, default=SPEC_BENCH / "question.jsonl", metavar="FILE")
    parser.add_argument("--prompts", type=positive, default=2, help="of each kind")
    parser.add_argument("--output-len", type=positive, default=64)
    parser.add_argument("--threads", type=positive, default=os.cpu_count())
    bench_peers.add_python_flags(parser)
    parser.add_argument("--hf-python", type=Path, default=Path(sys.executable), metavar="FILE", help="Hugging Face's")
    parser.add_argument("--work-dir", type=Path, help="keeps models and engines; remove it when specdec has changed")
    parser.add_argument("--prepare", action="store_true", help="make models and engines, and measure nothing")
    parser.add_argument("--update", type=Path, nargs="*", default=[], metavar="FILE", help="Markdown files with marks")
    arguments = parser.parse_args()
    for file in (arguments.json.parent, *arguments.update, arguments.questions):
        if not file.exists():
            parser.error(f"no such file or directory: {file}")
    try:
        arguments.questions = read_questions(arguments.questions)
        arguments.kinds = names_among(arguments.questions)(arguments.kinds or ",".join(arguments.questions))
    except (SpecDecError, argparse.ArgumentTypeError) as error:
        parser.error(str(error))
    if arguments.update and list(arguments.questions) != list(SPEC_BENCH_KINDS):
        parser.error("`--update` writes Spec-Bench's tables, and these are other questions")
    return arguments


def measure(plan: Plan, systems: list[str], document: dict[str, Any], arguments: argparse.Namespace) -> None:
    if arguments.prepare:
        for system in systems:
            plan.settings(system)
            say(f"{plan.name}: {system} is there")
        return
    systems = measure_starts(plan, systems, document)
    save(document, arguments.json)
    with plan.llm() as llm:
        asked = {kind: encode_prompts(arguments.questions[kind], llm, arguments.prompts) for kind in arguments.kinds}
        end_ids = sorted(llm.end_ids)
    kinds = list(arguments.questions)
    for kind, prompts in asked.items():
        measure_kind(plan, kind, prompts, end_ids, document, systems, arguments.output_len)
        document["records"].sort(key=lambda record: place_of(record, kinds))
        save(document, arguments.json)
        say(f"{plan.name}, {kind}")


def save(document: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    arguments = parse_arguments()
    systems, pythons, versions, skipped = find_systems(arguments)
    document: dict[str, Any] = {"seconds_to_first_token": {}, "records": []}
    if arguments.json.exists():
        document = json.loads(arguments.json.read_text(encoding="utf-8"))
    document |= {
        "date": time.strftime("%Y-%m-%d"),
        "machine": bench_peers.describe_machine(),
        "versions": versions,
        "output_len": arguments.output_len,
        "num_threads": arguments.threads,
        "skipped": skipped,
    }
    for name, reason in skipped.items():
        say(f"skipped: {name}: {reason}")
    with tempfile.TemporaryDirectory() as temporary:
        work_dir = (arguments.work_dir or Path(temporary)).resolve()
        os.environ["SPECDEC_CACHE_DIR"] = str(work_dir / "cache")  # the first command builds its engine
        work_dir.mkdir(parents=True, exist_ok=True)
        for name in arguments.models:
            plan = Plan(name, pythons, work_dir, arguments)
            if not plan.file.exists():
                say(f"skipped: {name}: no such file: {plan.file}; hint: scripts/real_model.sh fetches SmolLM2")
                continue
            try:
                measure(plan, systems, document, arguments)
            except (SystemExit, SpecDecError) as error:  # a worker's end: what came until then is kept
                document["skipped"][name] = str(error)
                say(f"broken off: {name}: {error}")
            finally:
                plan.close()
                save(document, arguments.json)
    titles = {name: model.title for name, model in MODELS.items()}
    for name, text in real_report.tables(document, titles).items():
        print(text)
        for file in arguments.update:
            real_report.put(file, name, text)


if __name__ == "__main__":
    main()
