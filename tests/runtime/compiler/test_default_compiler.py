"""The compiler that is taken where nobody names one; on a GPU what a child process found out decides."""

import sys
import warnings

import pytest
import torch

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


def test_who_names_a_compiler_gets_it_and_the_default_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "packages_run", lambda device: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiler_for(GPU, "aot") == "aot"
        assert compiler_for(GPU, "none") == "none"
    with pytest.warns(SpecDecWarning, match="does not run on this GPU"):
        assert compiler_for(GPU, None) == "none"
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


def test_a_package_is_run_once_in_a_child_process(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled, opened and run for real, and what came of it is known the next time."""
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    children: list[object] = []

    def counted(command: list[str]) -> bool:
        children.append(command)
        return ends_well(command)

    monkeypatch.setattr(choosing, "ends_well", counted)
    assert packages_run(CPU)
    assert packages_run(CPU)
    assert len(children) == 1
    # Of another compiler nothing is known; this one makes no package.
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setattr(choosing, "ends_well", lambda command: False)
    assert not packages_run(CPU)
    monkeypatch.setattr(choosing, "ends_well", counted)
    assert not packages_run(CPU)
    assert len(children) == 1
