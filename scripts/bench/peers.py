"""Programs beside which specdec is measured: OpenVINO GenAI and llama.cpp, each in a Python of its own.

Every system has a process of its own (`scripts/bench/workers`), so that its peak memory is its own. OpenVINO needs a
virtual environment, because it pins another transformers. llama.cpp may be in any: pip compiles its package for this
processor, in a quarter of an hour on two cores. What is not installed is left out, by name, and nothing is fetched: on
a machine without a network the wheels are enough.

    python -m venv ov
    ov/bin/pip install torch==2.13.0
    ov/bin/pip install openvino-genai optimum-intel[openvino]
    python -m venv llama
    CMAKE_ARGS=-DLLAVA_BUILD=OFF llama/bin/pip install llama-cpp-python gguf
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SPEC_BENCH = ROOT.parent / "shared" / "data" / "spec_bench"
# Instruction sets that decide how fast products are, as Linux names them.
INSTRUCTIONS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16"),
    *("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2", "sme"),
)
OPENVINO_FLAGS = {
    "int8": ("--weight-format", "int8"),
    "int4": ("--weight-format", "int4", "--sym", "--group-size", "64", "--ratio", "1.0"),
}
"""Flags of optimum-cli for weights of a format."""


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


def export_to_openvino(python: Path, model_dir: Path, work_dir: Path, format_name: str) -> Path:
    """The model's directory in OpenVINO's format, with weights of `format_name`: `int8` or `int4`."""

    def export(directory: Path) -> None:
        command = [python.parent / "optimum-cli", "export", "openvino", "--model", model_dir]
        command += ["--task", "text-generation-with-past", *OPENVINO_FLAGS[format_name], directory]
        offline = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=offline, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise SystemExit(f"optimum-cli failed for {model_dir.name}:\n{done.stdout[-2000:]}")

    stem = model_dir.name.removeprefix("hf-").rpartition("-")[0]  # smollm2 of `hf-smollm2-float32`
    return once(work_dir / f"openvino-{stem}-{format_name}", export)


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
