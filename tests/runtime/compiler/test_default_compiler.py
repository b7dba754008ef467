"""The compiler that is taken where nobody names one; on a GPU what a child process found out decides."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
from sentences import Said

from runtime.compiler import choosing
from runtime.compiler.choosing import compiler_for, default_compiler, ends_well, packages_run
from runtime.errors import SpecDecWarning

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(("device", "run", "expected"), [("cuda", True, "aot"), ("cuda", False, "none")])
def test_on_a_gpu_packages_are_taken_that_run(device: str, run: bool, expected: str) -> None:
    assert default_compiler(device, lambda: run) == expected


def test_on_a_cpu_nothing_is_tried() -> None:
    def not_asked() -> bool:
        raise AssertionError

    assert default_compiler("cpu", not_asked) == "aot"
    assert compiler_for(CPU, None) == "aot"


def test_who_names_a_compiler_gets_it_and_the_default_is_told(monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    monkeypatch.setattr(choosing, "packages_run", lambda device: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiler_for(GPU, "aot") == "aot"
        assert compiler_for(GPU, "none") == "none"
    with pytest.warns(SpecDecWarning) as warned:
        assert compiler_for(GPU, None) == "none"
    said(warned)
    monkeypatch.setattr(choosing, "packages_run", lambda device: True)
    assert compiler_for(GPU, None) == "aot"


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("", True),
        ("import sys; sys.exit(1)", False),
        ("raise RuntimeError", False),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", False),
    ],
    ids=["well", "exit status", "exception", "segmentation fault"],
)
def test_how_a_child_ends(program: str, expected: bool) -> None:
    assert ends_well([sys.executable, "-c", program]) == expected


def test_a_program_that_is_not_there_does_not_end_well() -> None:
    assert not ends_well(["/nowhere/python"])


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "-static-libstdc++"])
def test_a_package_is_compiled_opened_and_run_in_a_child_process(
    options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A g++ may link a libstdc++ of its own into each library."""
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\nexec g++ "$@" {options}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert ends_well([sys.executable, *choosing._TRIAL, "cpu"])


def test_what_came_of_a_child_process_is_known_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are those of the compiler that was asked for: of another nothing is known."""
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    children = tmp_path / "children"
    program = f"import os; print('x', file=open({str(children)!r}, 'a')); exit(os.environ.get('CXX') == '/bin/false')"
    monkeypatch.setattr(choosing, "_TRIAL", ("-c", program))
    for num_children, compiler, expected in ((1, None, True), (2, "/bin/false", False), (2, None, True)):
        if compiler:
            monkeypatch.setenv("CXX", compiler)
        else:
            monkeypatch.delenv("CXX", raising=False)
        assert [packages_run(CPU), packages_run(CPU)] == [expected] * 2
        assert children.read_text().count("x") == num_children
