"""The compiler that is taken where nobody names one."""

import pytest
import torch

from runtime.builder.choosing import compiler_for
from runtime.checkpoint.config import Compiler


@pytest.mark.parametrize(("device", "expected"), [("cpu", "aot"), ("cuda:0", "none"), ("cuda:3", "none")])
def test_default_is_what_has_been_run_on_such_a_device(device: str, expected: Compiler) -> None:
    assert compiler_for(torch.device(device), None) == expected
