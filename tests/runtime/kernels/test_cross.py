"""The kernels are the same C++ for every compiler and every processor: slow, and with an emulator for some.

The smallest registers are tried in fewer cases too, in a quarter of a minute: what is laid out by them is not what this
processor's tests see.
"""

from collections.abc import Callable

import pytest

from scripts.tools.cross import Target, check_syntax, compile_library, run, run_few, targets

TARGETS = targets()


CASES = [(check_syntax, "gcc x86-64"), (run_few, "gcc x86-64")]
CASES += [(check, name) for check in (run, compile_library) for name in TARGETS]


@pytest.mark.slow
@pytest.mark.parametrize(("check", "name"), CASES, ids=[f"{check.__name__} {name}" for check, name in CASES])
def test_kernels_compile_and_are_their_formulas_by_every_compiler(
    check: Callable[[Target], tuple[bool, str]], name: str
) -> None:
    target = TARGETS[name]
    if target.missing:
        pytest.skip(f"{target.missing} is missing")
    passed, said = check(target)
    assert passed, said
