"""Torch's OpenMP threads stay asleep while an engine generates: they would wait for work on the cores that it needs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runtime.core.request import Request, Sequence, VerifyResult
from runtime.core.sampling import NoValidToken
from runtime.core.verify import verify_all
from runtime.engine.engine import Engine
from runtime.kernels.ops import openmp_alone
from runtime.loop import orchestrator

LISTED = """
import os
from pathlib import Path

def threads():
    return sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
"""
GENERATE = """
assert dict(os.environ) == variables
import sys, torch
from runtime.loop import scheduler
from runtime.engine.engine import Engine
from runtime.core.params import SamplingConfig
from runtime.core.request import Request

torch.set_num_threads(4)
with Engine.open(Path(sys.argv[1])) as engine:
    before = threads()
    sampled = SamplingConfig(temperature=0.8, top_k=20)
    requests = [Request(0, (5, 6, 7) * 30, 8), Request(1, (5, 6), 8, sampling=sampled, num_logprobs=3)]
    ids = [sequence.output_tokens for sequence, _ in scheduler.generate(engine, requests) if sequence.finish_reason]
    new = threads()
    for name in before:
        new.remove(name)
    assert [len(one) for one in ids] == [8, 8]
print(*new)
torch.ones(1 << 22).exp()
print(len(threads()) - len(before))
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import torch, transformers, specdec_cli",
        pytest.param("import specdec_cli, runtime.llm, torch", marks=pytest.mark.slow),
    ],
)
def test_generating_begins_no_threads_but_the_kernels(imports: str, llama_engine_dir: Path) -> None:
    """A prompt of many tokens, steps of few, and what is chosen of their logits; a loop of torch's does begin some.

    Importing sets no variable of the environment.
    """
    command = [
        sys.executable,
        "-c",
        f"{LISTED}\nvariables = dict(os.environ)\n{imports}\n{GENERATE}",
        str(llama_engine_dir),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    of_engine, with_torchs = done.stdout.splitlines()
    assert of_engine.split() == ["specdec"] * 3
    assert int(with_torchs) > 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "spins"), [({}, "0"), pytest.param({"GOMP_SPINCOUNT": "77"}, "77", marks=pytest.mark.slow)]
)
def test_of_the_commands_torch_waiting_threads_sleep(given: dict[str, str], spins: str, llama_engine_dir: Path) -> None:
    """GNU's OpenMP shows its settings when it is loaded, by a command that fails later."""
    unset = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-m", "specdec_cli", "run", "--engine-dir", llama_engine_dir]
    command += ["--max-output-len", "999999", "--input-text", "x"]
    done = subprocess.run(command, capture_output=True, text=True, env=unset | given | {"OMP_DISPLAY_ENV": "VERBOSE"})
    assert done.returncode == 1
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr


def test_what_is_around_a_step_is_computed_by_its_thread(
    llama_engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: list[int] = []

    def watched(*arguments: object) -> list[VerifyResult | NoValidToken]:
        numbers.append(torch.get_num_threads())
        return verify_all(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("runtime.loop.step.verify_all", watched)
    commit = Sequence.commit

    def watched_commit(self: Sequence, *arguments: object) -> list[int]:
        numbers.append(torch.get_num_threads())
        return commit(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Sequence, "commit", watched_commit)
    torch.set_num_threads(3)
    try:
        with Engine.open(llama_engine_dir) as engine:
            for _ in orchestrator.generate(engine, [Request(0, (5, 6, 7), 2)]):
                assert torch.get_num_threads() == 3  # whoever reads what is generated has torch's threads
        with pytest.raises(KeyError), openmp_alone():
            raise KeyError
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)
    assert numbers == [1] * 4
