"""bench/peers.py on a tiny model, without OpenVINO and llama.cpp: systems take turns, and it writes what they did.

Where SPECDEC_LLAMACPP_PYTHON names a Python with llama-cpp-python and gguf, llama.cpp is run, too.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shared import once

from scripts.bench import peers as bench_peers

ROOT = Path(__file__).parents[1]
SCRIPT = [sys.executable, "-m", "scripts.bench.peers"]
SETTINGS = "--models tiny --dtypes float32 --prompts 1 --runs 1 --prompt-len 64 --output-len 8 --threads 1"


@pytest.fixture(scope="module")
def output_dir(shared: Path, kernels: Path) -> Path:
    def make(directory: Path) -> None:
        directory.mkdir()
        files = ["--json", str(directory / "peers.json"), "--png", str(directory / "peers.png")]
        peers = ("SPECDEC_OPENVINO_PYTHON", "SPECDEC_LLAMACPP_PYTHON")
        env = {name: value for name, value in os.environ.items() if name not in peers}
        command = [*SCRIPT, *SETTINGS.split(), *files]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (directory / "stdout").write_text(done.stdout)

    return once(shared / "peers", make)


@pytest.mark.slow
def test_every_system_gives_hugging_faces_tokens_and_missing_peers_are_skipped_by_name(output_dir: Path) -> None:
    document = json.loads((output_dir / "peers.json").read_text())
    (result,) = document["results"]
    assert {row["name"] for row in result["systems"]} == {
        "hugging-face none", "hugging-face ngram", "specdec none-v1", "specdec none-v2", "specdec ngram-v1",
        "specdec ngram-v2",
    }  # fmt: skip
    for row in result["systems"]:
        assert row["num_equal"] == row["num_prompts"] == 1, row
        assert row["num_output_tokens"] == 8
        assert row["ttft_s"]["median"] > 0 and row["tpot_s"]["median"] > 0 and row["peak_memory_bytes"] > 1e7
    for name in ("openvino", "llama.cpp"):
        assert "install" in document["skipped"][name]
        assert f"skipped: {name}" in (output_dir / "stdout").read_text()
    assert "draft-target on tiny" in document["skipped"]


@pytest.mark.skipif("SPECDEC_LLAMACPP_PYTHON" not in os.environ, reason="no llama-cpp-python")
@pytest.mark.parametrize("dtype", bench_peers.FORMATS)
def test_llama_cpp_gives_specdecs_tokens(dtype: str, tmp_path: Path, kernels: Path) -> None:
    own = f"--dtypes {dtype} --peers llama.cpp --json {tmp_path / 'peers.json'}"
    command = [*SCRIPT, *SETTINGS.split(), *own.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((tmp_path / "peers.json").read_text())["results"]
    rows = [row for row in result["systems"] if row["name"].startswith("llama.cpp")]
    assert {row["name"] for row in rows} == {"llama.cpp none", "llama.cpp ngram"}
    for row in rows:
        if bench_peers.FORMATS[dtype].is_quantized:  # in another way than ours
            assert row["num_output_tokens"] == 8
        else:
            assert row["num_equal"] == 1 or (dtype != "float32" and row["first_differences"][0] > 0), row
