"""The compiler that is taken where nobody names one."""

from pathlib import Path

import pytest
import torch
from sentences import Said
from tiny import make_build

from runtime.builder.build import build_engine
from runtime.builder.choosing import compiler_for
from runtime.checkpoint.config import Compiler
from runtime.util.errors import SpecDecError


@pytest.mark.parametrize(("device", "expected"), [("cpu", "aot"), ("cuda:0", "none"), ("cuda:3", "none")])
def test_default_is_what_has_been_run_on_such_a_device(device: str, expected: Compiler) -> None:
    assert compiler_for(torch.device(device), None) == expected


def test_programs_for_cpus_are_refused_on_a_gpu(tmp_path: Path, said: Said) -> None:
    """Before anything is read or written."""
    build, gpu = make_build(compiler="aot"), torch.device("cuda:0")
    with pytest.raises(SpecDecError) as error:
        build_engine(tmp_path / "none", tmp_path / "engine", build, gpu, replace=False, phase=lambda name: None)
    said(error, "aot", "cuda:0")
