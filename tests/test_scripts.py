"""Scripts: what `install.sh` says while it works, with a pip that only pretends; the kernels' benchmark in small."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import Forks
from waiting import HANG_S

from scripts.bench.kernels import torch_held_to
from scripts.bench.quantized import FORMATS
from scripts.tools.mutate import TESTS
from scripts.tools.mutations import cpp_mutations, mutations

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


def bench_kernels(*arguments: str) -> subprocess.CompletedProcess[str]:
    sizes = "--sets native --rows 1 3 --layer 64 96 --context 40 --vocab-size 100 --seconds 0"
    command = [sys.executable, "-m", "scripts.bench.kernels", *sizes.split(), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_every_kernel_has_a_line_beside_torchs_own(kernels: Path) -> None:
    done = bench_kernels("--margin", "0.9")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("passed: every kernel has 0.00 of torch's speed or more\n")
    lines = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    for dtype in ("float32", "bfloat16", "float16"):
        names = [kernel.split(",")[0].strip() for kernel, name, *_ in lines if name.strip() == dtype]
        assert sorted(set(names)) == ["argmax", "attention", "linear"]
    assert all(float(cell) > 0 for _, _, *cells in lines for cell in cells)


@pytest.mark.slow
def test_a_slow_kernel_is_named_and_ends_in_an_exit_code(kernels: Path) -> None:
    done = bench_kernels("--dtypes", "float32", "--margin", "-1000")
    assert done.returncode == 1
    verdict, *slow = done.stdout.splitlines()[-7:]
    assert verdict == "failed: below 1000.90 of torch's speed"
    assert all(re.fullmatch(r"this processor, .+, float32, [13] rows: [\d.]+", line) for line in slow)


def test_every_format_of_quantized_weights_is_measured(kernels: Path, forks: Forks) -> None:
    sizes = "--layers 64x96 --rows 1 3 --seconds 0 --megabytes 1"
    program = "import runpy; runpy.run_module('scripts.bench.quantized', run_name='__main__')"
    done = forks.run(*sizes.split(), program=program)
    assert done.returncode == 0, done.stderr
    lines = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| 64x96")]
    assert [name.strip() for _, name, *_ in lines] == ["bfloat16", *FORMATS]
    assert all(float(cell) > 0 for _, _, *cells in lines for cell in cells)


@pytest.mark.skipif("AVX" not in torch.backends.cpu.get_cpu_capability(), reason="x86-64's sets of instructions")
def test_torch_is_held_to_a_set_of_instructions() -> None:
    ask = [sys.executable, "-c", "import torch; print(torch.backends.cpu.get_cpu_capability())"]
    said = subprocess.run(ask, env=torch_held_to("x86-64"), capture_output=True, text=True, check=True).stdout.strip()
    assert said != torch.backends.cpu.get_cpu_capability() and "AVX" not in said


SOURCE = """
class Cache:
    def release(self, sequence: int) -> None:
        if self.reuse:
            self.publish(sequence, 1)
        for block in reversed(self.blocks[: sequence - 1]):
            self.holders[block] -= 1
"""


def test_faults_are_made_by_structure_and_every_one_is_another_program() -> None:
    faults = {}
    for mutation in mutations(SOURCE):
        with mutation.planted():
            faults[mutation.address] = ast.unparse(mutation.tree)
        assert ast.unparse(mutation.tree) == ast.unparse(ast.parse(SOURCE))
    assert "self.publish" not in faults["Cache.release drop 0"]
    assert "if not self.reuse" in faults["Cache.release negate 0"]
    assert "[:sequence - 1 + 1]" in faults["Cache.release one-more 0"]
    assert len(set(faults.values())) == len(faults) > 10


def test_names_and_layout_change_no_address() -> None:
    renamed = SOURCE.replace("block", "b").replace("sequence", "s").replace("self.publish(", "self.publish(\n  ")
    assert [m.address for m in mutations(renamed)] == [m.address for m in mutations(SOURCE)]


@pytest.mark.parametrize("file", TESTS)
def test_files_to_change_and_the_tests_that_shall_notice_exist(file: str) -> None:
    source = (ROOT / file).read_text(encoding="utf-8")
    assert any(True for _ in (mutations if file.endswith(".py") else cpp_mutations)(source))
    assert all((ROOT / word).is_file() for word in TESTS[file].split() if word.startswith("tests/"))
