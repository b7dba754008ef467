"""Scripts: what `install.sh` says while it works, with a pip that only pretends."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from waiting import HANG_S

ROOT = Path(__file__).parents[1]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The script in a directory with an environment that has no torch."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "install.sh", tmp_path / "scripts")
    shutil.copy(ROOT / "constraints.txt", tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    write_program(tmp_path / ".venv" / "bin" / "python", "exit 1")
    return tmp_path


def write_program(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def install(checkout: Path, pip: str, *flags: str) -> subprocess.CompletedProcess[str]:
    write_program(checkout / ".venv" / "bin" / "pip", pip)
    command = ["bash", checkout / "scripts" / "install.sh", *flags, "[dev]"]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=HANG_S)


@pytest.mark.parametrize(("flags", "index"), [([], []), (["--cpu"], ["https://download.pytorch.org/whl/cpu"])])
def test_every_step_of_the_installation_has_a_line_with_its_size_and_time(
    flags: list[str], index: list[str], checkout: Path
) -> None:
    done = install(checkout, 'echo "$@" >> pip.log', *flags)
    assert done.returncode == 0 and done.stdout == ""
    torch, ours, kernels, *_ = done.stderr.splitlines()
    assert re.fullmatch(r"torch==[\d.]+, \d+ MB on disk; several GB where it is built for CUDA  \d+ s", torch)
    assert re.fullmatch(r"specdec and what it needs, with \[dev\], about \d+ MB to download  \d+ s", ours)
    assert re.fullmatch(r"kernels for this processor  \d+ s", kernels)
    of_torch, of_ours = ((checkout / "pip.log").read_text()).splitlines()
    assert of_torch.split()[-1] == torch.split(",")[0] and of_ours.split()[-1] == ".[dev]"
    assert [word for word in of_torch.split() if "//" in word] == index and "//" not in of_ours


def test_kernels_that_cannot_be_compiled_do_not_end_the_installation(checkout: Path) -> None:
    write_program(checkout / ".venv" / "bin" / "python", "echo no compiler >&2; exit 1")
    done = install(checkout, "exit 0")
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1].endswith("no compiler")


def test_an_installation_that_fails_ends_there(checkout: Path) -> None:
    done = install(checkout, "echo no such package >&2; exit 7")
    assert done.returncode == 7
    assert "no such package" in done.stderr and "specdec and what it needs" not in done.stderr
