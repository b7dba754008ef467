"""The kernels are the same C++ for every compiler and every processor: slow, and with an emulator for some.

The smallest registers are always tried: what is laid out by them is not what this processor's tests see.
"""

import pytest

from scripts.tools.cross import compile_library, run, targets

TARGETS = targets()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "gcc x86-64" else pytest.mark.slow) for name in TARGETS]
)
def test_kernels_are_their_formulas_by_every_compiler(name: str) -> None:
    target = TARGETS[name]
    if target.missing:
        pytest.skip(f"{target.missing} is missing")
    passed, said = run(target)
    assert passed, said


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_the_library_is_cplusplus_for_every_compiler(name: str) -> None:
    target = TARGETS[name]
    if target.missing:
        pytest.skip(f"{target.missing} is missing")
    passed, said = compile_library(target)
    assert passed, said
