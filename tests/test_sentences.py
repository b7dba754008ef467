"""The snapshots of sentences (`sentences.py`) fail where they should, in a test run of its own."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import sentences
from forked import Forks

TEST = """
pytest_plugins = ("sentences",)
class Result:
    command, stderr = "run", "error: {sentence}: 97"
def test_one(said):
    said(Result, {value})
def test_two(said):
    said(ValueError("no second"))
def test_two_again(said):
    said(ValueError("no second"))
"""


RUN = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"


def pytest_of(
    forks: Forks, directory: Path, *arguments: str, sentence: str = "too many tokens", value: int = 97
) -> str:
    (directory / "test_some.py").write_text(TEST.format(sentence=sentence, value=value))
    given = ["-p", "no:cacheprovider", "--tb=line", "--rootdir", directory, *arguments]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = forks.run(*given, program=RUN, environment=environment, directory=directory)
    return (done.stdout + done.stderr).splitlines()[-1]


def test_a_sentence_is_held_until_the_flag_keeps_another(forks: Forks, tmp_path: Path) -> None:
    """The flag keeps no other value, and removes what no test says any more."""
    directory = tmp_path / "tests"
    (directory / "sentences").mkdir(parents=True)
    shutil.copy(sentences.__file__, directory)
    (directory / "conftest.py").write_text('pytest_plugins = ("sentences",)\n')
    assert "3 passed" in pytest_of(forks, directory, "--update-sentences")
    held = directory / "sentences" / "run.json"
    assert "3 passed" in pytest_of(forks, directory)
    assert "1 failed, 2 passed" in pytest_of(forks, directory, sentence="a token too many")
    assert "1 failed, 2 passed" in pytest_of(forks, directory, "--update-sentences", value=9)
    more = {"test_some.py::test_one (2)": "error: another", "test_some.py::test_gone": "error: of a test that is gone"}
    held.write_text(json.dumps(json.loads(held.read_text()) | more))
    assert "1 error" in pytest_of(forks, directory)
    assert "3 passed" in pytest_of(forks, directory, "--update-sentences", sentence="a token too many")
    assert json.loads(held.read_text()) == {"test_some.py::test_one": "error: a token too many: 97"}
    (others,) = json.loads((directory / "sentences" / "some.json").read_text()).items()
    assert others == ("test_some.py::test_two", "no second")


def test_no_sentence_is_kept_of_a_test_that_is_gone(request: pytest.FixtureRequest) -> None:
    assert request.config.stash[sentences.STALE] == [], "`pytest --update-sentences` removes them"


NOT_SAID = {
    "cache_too_large_for_gpu": "needs a GPU",
    "disk_of_ranks": "needs several GPUs",
    "no_compiler": "a process of its own says it in test_cli_interrupted.py, and tells no code",
}
"""Codes of errors without a sentence, and why."""


def test_every_code_of_an_error_has_a_sentence_or_a_reason() -> None:
    held = " ".join(text for own in sentences.load().values() for text in own.values())
    code = re.compile(r'code="(\w+)"|"(cache_too_\w+)"')
    files = [path.read_text(encoding="utf-8") for path in (Path(__file__).parents[1] / "runtime").rglob("*.py")]
    known = {name for text in files for found in code.findall(text) for name in found if name}
    assert {name for name in known if f" code: {name}" not in f"{held} "} == NOT_SAID.keys()


def test_the_form_of_a_sentence_is_what_values_leave() -> None:
    """`--a` and `--b` are values too; what is wrong, and what to do about it, are not."""
    one, other = "error: `--a` must be at least 1: 0 hint: leave it out", "error: `--b` must be at least 20: -3"
    assert sentences.form_of(one) == "error: … must be at least …: … hint: leave it out"
    assert sentences.form_of(other) != sentences.form_of(one)
    assert sentences.form_of(f"{other} hint: leave it out") == sentences.form_of(one)
    assert sentences.form_of("error: no model is given hint: a") != sentences.form_of(
        "error: no engine is given hint: a"
    )
