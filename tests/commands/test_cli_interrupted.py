"""A command that is stopped half way, by Ctrl-C, a full disk or a missing compiler, leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from command_line import Specdec, tree
from tiny import make_model
from transformers import PreTrainedTokenizerFast

from runtime.compiler.kernels import LIBRARY, compile_kernels

# A file that may not grow beyond so many bytes fails like a full disk. Ignored, the signal becomes an OSError.
WITH_LIMIT = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
from specdec_cli.app import main
main()
"""


@pytest.fixture(scope="module")
def large_model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """About 100 MB: converting it takes long enough to be interrupted."""
    directory = tmp_path_factory.mktemp("large") / "model"
    model = make_model("llama", vocab_size=len(tokenizer), hidden_size=512, intermediate_size=4096, num_hidden_layers=4)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def interrupt(
    arguments: Sequence[object], output_dir: Path, environment: dict[str, str], signal_number: int
) -> tuple[int, str]:
    """Run a command, and send it and its children a signal once its temporary directory holds something."""
    process = subprocess.Popen(
        [sys.executable, "-m", "specdec_cli", *map(str, arguments)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while process.poll() is None and not list(output_dir.parent.glob(f".{output_dir.name}.*.tmp")):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert process.poll() is None, "it was done before it could be interrupted"
    os.killpg(process.pid, signal_number)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def assert_stopped(result: tuple[int, str], exit_code: int) -> None:
    assert result[0] == exit_code, result[1]
    assert "Traceback" not in result[1]


@pytest.mark.parametrize(("signal_number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_convert_leaves_nothing(
    large_model_dir: Path, tmp_path: Path, process_environment: dict[str, str], signal_number: int, exit_code: int
) -> None:
    arguments = ["convert", "--model-dir", large_model_dir, "--output-dir", tmp_path / "ckpt"]
    assert_stopped(interrupt(arguments, tmp_path / "ckpt", process_environment, signal_number), exit_code)
    assert tree(tmp_path) == []


@pytest.mark.parametrize("compiler", ["none", "aot"])
def test_interrupted_build_leaves_nothing(
    llama_checkpoint_dir: Path, tmp_path: Path, process_environment: dict[str, str], compiler: str
) -> None:
    arguments = ["build", "--checkpoint-dir", llama_checkpoint_dir, "--output-dir", tmp_path / "engine"]
    arguments += ["--max-input-len", 64, "--max-seq-len", 128, "--compiler", compiler]
    assert_stopped(interrupt(arguments, tmp_path / "engine", process_environment, signal.SIGINT), 130)
    assert tree(tmp_path) == []


def test_interrupted_replacement_keeps_what_was_there(
    large_model_dir: Path, llama_dir: Path, tmp_path: Path, process_environment: dict[str, str], specdec: Specdec
) -> None:
    output_dir = tmp_path / "ckpt"
    assert specdec("convert", "--model-dir", llama_dir, "--output-dir", output_dir).exit_code == 0
    before = {path: path.read_bytes() for path in output_dir.iterdir()}
    arguments = ["convert", "--model-dir", large_model_dir, "--output-dir", output_dir, "--force"]
    assert_stopped(interrupt(arguments, output_dir, process_environment, signal.SIGINT), 130)
    assert list(tmp_path.iterdir()) == [output_dir]
    assert {path: path.read_bytes() for path in output_dir.iterdir()} == before


def run_with_limit(num_bytes: int, *arguments: object, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITH_LIMIT, str(num_bytes), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=120)


@pytest.mark.parametrize(
    "command",
    [
        "convert", "build", "build --compiler aot", "run --output-csv", "run --output-npy", "run --output-logits-npy",
        "run --report",
    ],
)  # fmt: skip
def test_full_disk_is_one_error_and_leaves_nothing(
    command: str, llama_dir: Path, llama_checkpoint_dir: Path, llama_uncompiled_dir: Path, tmp_path: Path,
    process_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    if command == "build --compiler aot":
        # Into the cache: it is to be our file that does not fit, and not one of the compiler's.
        compile_kernels(tmp_path_factory.mktemp("kernels") / LIBRARY)
    output = tmp_path / "output"
    build = ["build", "--checkpoint-dir", llama_checkpoint_dir, "--output-dir", output, "--max-input-len", 64]
    prompts = [argument for _ in range(20) for argument in ("--input-text", "The little dog")]
    run = ["run", "--engine-dir", llama_uncompiled_dir, *prompts, "--max-output-len", 20, "--quiet"]
    limit, arguments = {
        "convert": (100_000, ["convert", "--model-dir", llama_dir, "--output-dir", output]),
        "build": (100_000, [*build, "--compiler", "none"]),
        "build --compiler aot": (1_000, [*build, "--compiler", "aot"]),
        "run --output-csv": (1_000, [*run, "--output-csv", output]),
        "run --output-npy": (1_000, [*run, "--output-npy", output]),
        "run --output-logits-npy": (100_000, [*run, "--output-logits-npy", output]),
        "run --report": (1_000, [*run, "--report", output]),
    }[command]
    done = run_with_limit(limit, *arguments, environment=process_environment)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error: ") == 1, done.stderr
    assert "File too large" in done.stderr and "hint: free space" in done.stderr
    assert tree(tmp_path) == []


def test_machine_without_a_compiler_is_one_error(
    llama_checkpoint_dir: Path, tmp_path: Path, specdec_process: Specdec
) -> None:
    """A model that is compiled already would be found in the compiler's cache."""
    environment = {"CXX": "/none/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    arguments = ["--checkpoint-dir", llama_checkpoint_dir, "--output-dir", tmp_path / "engine", "--compiler", "aot"]
    result = specdec_process("build", *arguments, "--max-input-len", 64, environment=environment)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert "error: no working C++ compiler to build with: /none/g++\nhint: install one" in result.stderr
    assert [name for name in tree(tmp_path) if not name.startswith("cache")] == []
