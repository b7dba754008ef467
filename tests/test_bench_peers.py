"""bench_peers.py on a tiny model, without OpenVINO: the systems take turns, and what it writes holds what they did."""

import json
import os
import subprocess
import sys
from pathlib import Path

import bench_peers
import pytest
from shared import once

SCRIPT = Path(__file__).parent.parent / "scripts" / "bench_peers.py"
SETTINGS = "--models tiny --dtypes float32 --prompts 1 --runs 1 --prompt-len 64 --output-len 8 --threads 1 --no-details"


@pytest.fixture(scope="module")
def output_dir(shared: Path, kernels: Path) -> Path:
    def make(directory: Path) -> None:
        directory.mkdir()
        files = ["--json", str(directory / "peers.json"), "--png", str(directory / "peers.png")]
        env = {name: value for name, value in os.environ.items() if name != "SPECDEC_OPENVINO_PYTHON"}
        command = [sys.executable, SCRIPT, *SETTINGS.split(), *files]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (directory / "stdout").write_text(done.stdout)

    return once(shared / "peers", make)


def test_every_system_gives_hugging_faces_tokens_and_openvino_is_skipped_by_name(output_dir: Path) -> None:
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
    assert "install" in document["skipped"]["openvino"]
    assert "draft-target on tiny" in document["skipped"]
    assert "skipped: openvino" in (output_dir / "stdout").read_text()


def test_ratios_are_of_one_prompt_in_one_turn(output_dir: Path) -> None:
    (result,) = json.loads((output_dir / "peers.json").read_text())["results"]
    records = {(r["set"], f"{r['system']} {r['variant']}"): r for r in result["records"]}
    (ratio,) = [r for r in result["ratios"] if r["numerator"] == "hugging-face none" and "none-v2" in r["denominator"]]
    own = [
        records[set_name, "hugging-face none"]["wall_s"] / records[set_name, "specdec none-v2"]["wall_s"]
        for set_name in result["prompt_lengths"]
    ]
    assert (ratio["wall_s"]["min"], ratio["wall_s"]["max"]) == pytest.approx((min(own), max(own)))


def test_the_chart_is_a_png(output_dir: Path) -> None:
    pytest.importorskip("matplotlib")
    assert (output_dir / "peers.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [("--models no-such", "no-such"), ("--dtypes float64", "float64"), ("--prompt-len 5000", "1536")],
)
def test_what_it_does_not_know_is_wrong_usage(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_peers.py", *arguments.split()])
    with pytest.raises(SystemExit) as exit_status:
        bench_peers.parse_arguments()
    assert exit_status.value.code == 2
    assert message in capsys.readouterr().err
