"""The kernels are the same C++ for every compiler and every processor: slow, and with an emulator for some."""

import pytest
from cross import run, targets

TARGETS = targets()


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_kernels_are_their_formulas_by_every_compiler(name: str) -> None:
    target = TARGETS[name]
    if target.missing:
        pytest.skip(f"{target.missing} is missing")
    passed, said = run(target)
    assert passed, said
