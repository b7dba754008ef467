"""`torchrun` starts a command in several processes: it is run once, and its engine's ranks are begun as without."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import PROMPT, Specdec
from shared import shared_engine

from runtime.errors import SpecDecError
from specdec_cli.launched import is_spare

ROOT = Path(__file__).parents[2]
OF_TWO_MACHINES = {"TORCHELASTIC_RUN_ID": "a", "RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


def test_the_command_is_run_once(
    specdec: Specdec, llama_dir: Path, shared: Path, kernels: Path, process_environment: dict[str, str]
) -> None:
    """And with the threads that it has by itself."""
    engine_dir = shared_engine(shared / "engines", llama_dir, tp_size=2)
    arguments = ["run", "--engine-dir", engine_dir, "--input-text", PROMPT, "--ngram-config", "4,2", "--json"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "specdec_cli", *map(str, arguments)],
        env={name: value for name, value in process_environment.items() if name != "OMP_NUM_THREADS"}
        | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["requests"][0]["output_ids"] == specdec(*arguments).document["requests"][0]["output_ids"]


def test_ranks_of_two_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OF_TWO_MACHINES.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SpecDecError, match="one machine, and torchrun has 2"):
        is_spare()


@pytest.mark.parametrize(("given", "kept"), [("1", None), ("3", "3")])
def test_torchruns_one_thread_is_not_the_commands(
    given: str, kept: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (OF_TWO_MACHINES | {"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": given}).items():
        monkeypatch.setenv(name, value)
    assert is_spare()
    assert os.environ.get("OMP_NUM_THREADS") == kept
