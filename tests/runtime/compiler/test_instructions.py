"""Compiler that Inductor calls, and the instructions it may use for the loops between the kernels."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Inductor reads its variables when it is imported: each answer is a fork's of a process that has only torch.
PROGRAM = """
import json, os, sys
from contextlib import nullcontext
import torch

def instructions(whose):
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list
    from runtime.compiler.torch_compile import instructions_looked_up
    with instructions_looked_up() if whose == "ours" else nullcontext():
        return [(str(isa), isa.build_arch_flags()) for isa in valid_vec_isa_list()]

def named():
    from runtime.compiler.torch_compile import named_compiler
    from torch._inductor.cpp_builder import get_cpp_compiler
    with named_compiler():
        return get_cpp_compiler()

for environment, *calls in json.loads(sys.argv[1]):
    if os.fork() == 0:
        os.environ |= environment
        print(json.dumps([eval(call) for call in calls]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, calls
"""
WITHOUT_AVX512 = '#!/bin/sh\ncase "$*" in *-mavx512f*) exit 1;; esac\nexec g++ "$@"\n'


def answers(*questions: tuple[object, ...]) -> list[Any]:
    """Answers to the calls of each question, which is made of variables and calls."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(questions)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in said.splitlines()]


def variables(directory: Path, compiler: str = "g++") -> dict[str, str]:
    return {"TORCHINDUCTOR_CACHE_DIR": str(directory), "CXX": compiler}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A directory with a cache and a compiler that does not know AVX-512, and what was answered: instructions and the
    compiler's name, by GNU's, which an empty name means, and by the other.
    """
    directory = tmp_path_factory.mktemp("instructions")
    compiler = directory / "compiler"
    compiler.write_text(WITHOUT_AVX512)
    compiler.chmod(0o755)
    named = {"  ": directory / "cache", str(compiler): directory / "other cache"}
    asked = [(variables(cache, name), "instructions('ours')", "named()") for name, cache in named.items()]
    return directory, dict(zip(named, answers(*asked), strict=True))


@pytest.mark.slow
def test_nothing_is_compiled_to_know_them(found: tuple[Path, dict[str, Any]]) -> None:
    directory, answered = found
    assert all(isinstance(instructions, list) for instructions, _ in answered.values())
    assert not list(directory.rglob("*.so"))


@pytest.mark.slow
def test_what_the_compiler_does_not_know_is_not_used(found: tuple[Path, dict[str, Any]]) -> None:
    """Compilers before version 13 do not know -mamx-fp16."""
    directory, answered = found
    assert "-mavx512f" not in str(answered[str(directory / "compiler")][0])


@pytest.mark.slow  # torch compiles and loads a library for each set
def test_they_are_those_that_torch_finds_by_trying(tmp_path: Path) -> None:
    theirs = (variables(tmp_path / "theirs"), "instructions('torch')")
    assert len({str(answer) for answer in answers((variables(tmp_path / "ours"), "instructions('ours')"), theirs)}) == 1


def test_an_empty_name_of_a_compiler_means_gnus(tmp_path: Path) -> None:
    """Inductor takes no name for one."""
    assert answers((variables(tmp_path, "  "), "named()")) == [["g++"]]
