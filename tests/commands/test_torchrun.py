"""`torchrun` starts a command in several processes: it is run once, and its engine's ranks are begun as without."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sentences import Said
from tiny import hf_greedy, make_model, repetitive_prompt
from waiting import HANG_S

from runtime.util.errors import SpecDecError
from specdec_cli.app import is_spare

ROOT = Path(__file__).parents[2]
OF_TWO_MACHINES = {"TORCHELASTIC_RUN_ID": "a", "RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.slow  # four processes that import torch
def test_the_command_is_run_once(split_engine_dir: Path, tmp_path: Path, process_environment: dict[str, str]) -> None:
    """And with the threads that it has by itself."""
    prompt = repetitive_prompt(1, 30)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt_ids": prompt}))
    arguments = ["run", "--engine-dir", split_engine_dir, "--input-file", tmp_path / "prompts.jsonl", "--json"]
    arguments += ["--max-output-len", 20, "--ngram-config", "4,2"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "specdec_cli", *map(str, arguments)],
        env={name: value for name, value in process_environment.items() if name != "OMP_NUM_THREADS"}
        | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["requests"][0]["output_ids"] == hf_greedy(make_model("llama"), prompt, 20, eos_token_id=2)


def test_ranks_of_two_machines_are_refused(monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    for name, value in OF_TWO_MACHINES.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SpecDecError) as error:
        is_spare()
    said(error, "2")


@pytest.mark.parametrize(("given", "kept"), [("1", None), ("3", "3")])
def test_torchruns_one_thread_is_not_the_commands(
    given: str, kept: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (OF_TWO_MACHINES | {"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": given}).items():
        monkeypatch.setenv(name, value)
    assert is_spare()
    assert os.environ.get("OMP_NUM_THREADS") == kept
