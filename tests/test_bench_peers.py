"""bench/peers.py on a tiny model, without OpenVINO and llama.cpp: systems take turns, and it writes what they did.

Where SPECDEC_LLAMACPP_PYTHON names a Python with llama-cpp-python and gguf, llama.cpp is run, too.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from shared import once
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.bench import peers as bench_peers
from scripts.bench import peers_report as report

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
        "hugging-face none",
        "hugging-face ngram",
        "specdec none-v1",
        "specdec none-v2",
        "specdec ngram-v1",
        "specdec ngram-v2",
    }
    for row in result["systems"]:
        assert row["num_equal"] == row["num_prompts"] == 1, row
        assert row["num_output_tokens"] == 8
        assert row["ttft_s"]["median"] > 0 and row["tpot_s"]["median"] > 0 and row["peak_memory_bytes"] > 1e7
    for name in ("openvino", "llama.cpp"):
        assert "install" in document["skipped"][name]
        assert f"skipped: {name}" in (output_dir / "stdout").read_text()
    assert "draft-target on tiny" in document["skipped"]


@pytest.mark.slow
def test_ratios_are_of_one_prompt_in_one_turn(output_dir: Path) -> None:
    (result,) = json.loads((output_dir / "peers.json").read_text())["results"]
    records = {(r["set"], f"{r['system']} {r['variant']}"): r for r in result["records"]}
    (ratio,) = [r for r in result["ratios"] if r["numerator"] == "hugging-face none" and "none-v2" in r["denominator"]]
    own = [
        records[set_name, "hugging-face none"]["wall_s"] / records[set_name, "specdec none-v2"]["wall_s"]
        for set_name in result["prompt_lengths"]
    ]
    assert (ratio["wall_s"]["min"], ratio["wall_s"]["max"]) == pytest.approx((min(own), max(own)))


@pytest.mark.slow
def test_the_summary_says_where_it_was_measured_and_divides_by_leader_mode(
    output_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads((output_dir / "peers.json").read_text())
    report.print_summary(document)
    summary = capsys.readouterr().out
    assert summary in (output_dir / "stdout").read_text()
    assert f"## {document['machine']['cpu']}: {os.cpu_count()} cores, 1 threads" in summary
    cpuinfo = Path("/proc/cpuinfo").read_text()
    assert document["machine"]["instructions"]
    assert all(f" {name}" in cpuinfo for name in document["machine"]["instructions"])
    (ours,) = [line.split(" | ") for line in summary.splitlines() if line.startswith("| tiny, float32, specdec |")]
    (theirs,) = [
        line.split(" | ") for line in summary.splitlines() if line.startswith("| tiny, float32, hugging-face |")
    ]
    # Two digits of TPOT are left of times under a millisecond.
    assert float(theirs[5].split()[0]) == pytest.approx(float(theirs[2]) / float(ours[2]), rel=0.2)


def test_models_have_the_parameters_in_their_names() -> None:
    for name in ("101m", "350m", "1100m"):
        shape = bench_peers.MODELS[name].shape
        assert shape
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**shape))
        assert model.num_parameters() == pytest.approx(int(name[:-1]) * 1e6, rel=0.01)


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


@pytest.mark.slow
def test_the_chart_is_a_png(output_dir: Path) -> None:
    pytest.importorskip("matplotlib")
    assert (output_dir / "peers.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--models no-such", "no-such"),
        ("--dtypes float64", "float64"),
        ("--peers vllm", "vllm"),
        ("--prompt-len 5000", "1536"),
    ],
)
def test_what_it_does_not_know_is_wrong_usage(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["peers.py", *arguments.split()])
    with pytest.raises(SystemExit) as exit_status:
        bench_peers.parse_arguments()
    assert exit_status.value.code == 2
    assert message in capsys.readouterr().err
