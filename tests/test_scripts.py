"""Scripts: what `install.sh` says while it works, with a pip that only pretends."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

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


def install(checkout: Path, pip: str) -> subprocess.CompletedProcess[str]:
    write_program(checkout / ".venv" / "bin" / "pip", pip)
    command = ["bash", checkout / "scripts" / "install.sh", "[dev]"]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60)


def test_every_step_of_the_installation_has_a_line_with_its_size_and_time(checkout: Path) -> None:
    done = install(checkout, 'echo "$@" >> pip.log')
    assert done.returncode == 0 and done.stdout == ""
    torch, ours = done.stderr.splitlines()
    assert re.fullmatch(r"torch==[\d.]+, about \d+ MB to download and \d+ MB on disk  \d+ s", torch)
    assert re.fullmatch(r"specdec and what it needs, with \[dev\], about \d+ MB to download  \d+ s", ours)
    calls = (checkout / "pip.log").read_text().splitlines()
    assert [call.split()[-1] for call in calls] == [torch.split(",")[0], ".[dev]"]


def test_an_installation_that_fails_ends_there(checkout: Path) -> None:
    done = install(checkout, "echo no such package >&2; exit 7")
    assert done.returncode == 7
    assert "no such package" in done.stderr and "specdec and what it needs" not in done.stderr
