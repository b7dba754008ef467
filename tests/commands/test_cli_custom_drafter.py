"""`--drafter module:factory`: anybody's drafter speculates, and what is wrong with one is one clear error."""

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Result, tree
from sentences import Said

Run = Callable[..., Result]
REPEATER = """
from runtime.core.request import Draft


class Repeater:
    '''The last token again.'''

    def propose(self, sequences, max_draft_len):
        return [Draft(sequence.tokens[-1:] * max_draft_len) for sequence in sequences]

    def forget(self, request_id):
        pass
"""


def module(directory: Path, name: str, source: str) -> None:
    """A module that can be imported from now on."""
    path = directory / f"{name.replace('.', '/')}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    importlib.invalidate_caches()


@pytest.mark.parametrize("name", ["my_drafter", "a_package.my_drafter"])
def test_module_is_found_in_the_current_directory(run: Run, current_directory: Path, name: str) -> None:
    module(current_directory, name, REPEATER)
    before = tree(current_directory)
    total = run("--drafter", f"{name}:Repeater", "--max-output-len", 12, "--end-id", 0, "--json").document["total"]
    assert total["num_drafts_per_position"][9] > 0, "drafts may be as long as the engine takes"
    assert tree(current_directory) == before


def assert_one_error(result: Result, exit_code: int, said: Said, *values: str) -> None:
    assert result.exit_code == exit_code, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ") and "\nhint: " in result.stderr
    said(result, *values)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, ("ModuleNotFoundError", "'my_drafter'")),
        ("1 / 0", ("ZeroDivisionError", "my_drafter")),
        ("import nothing_of_this_name", ("nothing_of_this_name", "my_drafter")),
        ("", ("my_drafter:make",)),
        ("def makes(): ...", ("my_drafter:make", "makes")),
    ],
)
def test_module_that_cannot_be_used_is_one_error(
    run: Run, current_directory: Path, source: str | None, words: tuple[str, ...], said: Said
) -> None:
    if source is not None:
        module(current_directory, "my_drafter", source)
    assert_one_error(run("--drafter", "my_drafter:make"), 1, said, *words)


@pytest.mark.parametrize(
    "source",
    [
        "raise SystemExit(0)",
        "def make():\n    raise SystemExit(0)",
        f"import sys\n{REPEATER.replace('return [', 'sys.exit(0); return [')}\n\nmake = Repeater",
    ],
    ids=["when imported", "in the factory", "in propose"],
)
def test_module_that_exits_is_one_error_too(run: Run, current_directory: Path, source: str, said: Said) -> None:
    """A script that somebody made a module of: without an error there would be success, and no output."""
    module(current_directory, "my_drafter", source)
    assert_one_error(run("--drafter", "my_drafter:make"), 1, said, "my_drafter")


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("raises", ("`custom_drafters:raises`", "OSError: no weights here")),
        ("needs_an_argument", ("TypeError", "'path'")),
        ("WithoutForget", ("`forget`", "WithoutForget")),
        ("Raises", ("`custom_drafters:Raises`", "KeyError", "no such draft")),
        ("RaisesWhenItForgets", ("`custom_drafters:RaisesWhenItForgets`", "KeyError: 0")),
    ],
)
def test_drafter_that_cannot_be_used_is_one_error(run: Run, factory: str, words: tuple[str, ...], said: Said) -> None:
    assert_one_error(run("--drafter", f"custom_drafters:{factory}", "--max-output-len", 6), 1, said, *words)
