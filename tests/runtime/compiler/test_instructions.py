"""Compiler that Inductor calls, and the instructions it may use for the loops between the kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LOOK = """
import sys
from contextlib import nullcontext
from torch._inductor.cpu_vec_isa import valid_vec_isa_list
from runtime.compiler.programs import instructions_looked_up
with instructions_looked_up() if sys.argv[1] == "ours" else nullcontext():
    print([(str(isa), isa.build_arch_flags()) for isa in valid_vec_isa_list()])
"""


def instructions(whose: str, directory: Path, compiler: str = "g++") -> str:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(directory), "CXX": compiler}
    command = [sys.executable, "-c", LOOK, whose]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_nothing_is_compiled_to_know_them(tmp_path: Path) -> None:
    assert instructions("ours", tmp_path / "cache").startswith("[")
    assert not list(tmp_path.rglob("*.so"))


def test_what_the_compiler_does_not_know_is_not_used(tmp_path: Path) -> None:
    """Compilers before version 13 do not know -mamx-fp16."""
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-mavx512f*) exit 1;; esac\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    assert "-mavx512f" not in instructions("ours", tmp_path / "cache", str(compiler))


@pytest.mark.slow  # torch compiles and loads a library for each set
def test_they_are_those_that_torch_finds_by_trying(tmp_path: Path) -> None:
    assert instructions("ours", tmp_path / "ours") == instructions("torch's", tmp_path / "theirs")


NAMED = """
from runtime.compiler.compilation import named_compiler
from torch._inductor.cpp_builder import get_cpp_compiler
with named_compiler():
    print(get_cpp_compiler())
"""


@pytest.mark.parametrize("named", ["", "  ", "g++", "/usr/bin/env"])
def test_an_empty_name_of_a_compiler_means_gnus(named: str) -> None:
    """Inductor reads the variable when it is imported, and takes no name for one."""
    run = [sys.executable, "-c", NAMED]
    found = subprocess.run(run, env=os.environ | {"CXX": named}, capture_output=True, text=True, check=True).stdout
    assert found == f"{named.strip() or 'g++'}\n"
