"""The list of planted faults fits the tree, and the program tells which of them tests catch."""

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from waiting import HANG_S

from scripts.tools.faults import ROOT, Fault, arguments_of, place_of, read_faults, read_sources

FAULTS = read_faults()


def test_every_fault_can_be_planted_in_the_function_that_it_names() -> None:
    """It stands in one place; its file may have moved. The text that replaces it makes another program."""
    assert len(FAULTS) >= 100
    texts = Counter((fault.before, fault.after) for fault in FAULTS)
    assert max(texts.values()) == 1
    sources, parse = read_sources(ROOT), cache(ast.parse)
    for fault in FAULTS:
        source = sources[place_of(fault, sources)]
        first = source[: source.index(fault.before)].count("\n") + 1
        lines = range(first, first + fault.before.count("\n") + 1)
        *owners, name = fault.function.split(".")
        found = [
            node
            for node in functions_of(parse(source), name)
            if {*lines} & {*range(node.lineno, (node.end_lineno or 0) + 1)}
        ]
        assert found, f"`{fault.before}` is not in {fault.function}"
        planted = functions_of(ast.parse(source.replace(fault.before, fault.after)), name)
        assert not {ast.dump(node) for node in found} <= {ast.dump(node) for node in planted}, fault.stands_for
        assert all(f"class {owner}" in source for owner in owners), fault.function


def functions_of(tree: ast.Module, name: str) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]


def test_tests_of_every_fault_exist() -> None:
    for fault in FAULTS:
        paths = [word for word in arguments_of(fault.tests, ROOT) if word.endswith(".py")]
        assert paths and all(Path(path).is_file() for path in paths)
    with pytest.raises(ValueError, match="test_of_nothing"):
        arguments_of("test_of_nothing", ROOT)


def test_fault_that_stands_in_two_places_or_nowhere_is_told(tmp_path: Path) -> None:
    fault = Fault("room", "why", "a.py", "f", "return 1", "return 2", "test_a")
    for text, number in (("", 0), ("return 1; return 1", 2)):
        with pytest.raises(ValueError, match=f"{number} places"):
            place_of(fault, {tmp_path / "a.py": text})


TEST = """
from code_of_ours import value

def test_value():
    while value() == 3:
        pass
    assert value() < 2
"""


@pytest.mark.slow
@pytest.mark.parametrize(("after", "said"), [("return 2", "test_value.py::test_value"), ("return 0", "SURVIVED")])
def test_faults_are_caught_or_survive_or_hang_and_are_taken_out_again(after: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_value.py").write_text(TEST)
    path = tmp_path / "code_of_ours.py"
    path.write_text("def value():\n    return 1\n")
    times = path.stat().st_mtime_ns
    fault = Fault("room", "why", "code_of_ours.py", "value", "return 1", after, "test_value")
    program = (
        "from pathlib import Path; from scripts.tools.faults import Fault, judge; "
        f"path = Path({str(path)!r}); print(judge(Fault(**{vars(fault)!r}), path.parent, {{path: path.read_text()}}, "
        "60).said)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout.strip() == said, done.stderr
    assert path.read_text() == "def value():\n    return 1\n" and path.stat().st_mtime_ns == times
