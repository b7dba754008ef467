"""A share of the campaign of damaged files (scripts/campaigns/hostile.py), and whether it sees what it looks for."""

import os
import signal
from pathlib import Path

import pytest

from scripts.campaigns import forks, hostile
from scripts.campaigns.hostile import Case, Outcome, what_is_wrong

NUM_CASES = 40


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, llama_engine_dir: Path, llama_checkpoint_dir: Path) -> Path:
    directory = tmp_path_factory.mktemp("hostile") / "home"
    forks.import_all()
    hostile.make_home(directory, llama_engine_dir, llama_checkpoint_dir)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(20, NUM_CASES, 20))]
)
def test_damaged_files_are_clear_errors(first: int, home: Path) -> None:
    counts, wrong = hostile.count_cases(home, first, 20)
    assert not wrong
    assert sum(number for name, number in counts.items() if name.endswith(": error")) >= 8


FLIPPED = Case(0, "engine", "engine/rank0.safetensors", "one bit", hostile.RUN)
CLEAR = "error: it is damaged: x\nhint: make it again\n"


@pytest.mark.parametrize(
    ("outcome", "is_changed", "wrong"),
    [
        (Outcome(1, 0, CLEAR), True, None),
        (Outcome(0, 0, ""), False, None),
        (Outcome(0, 0, ""), None, None),
        (Outcome(0, 0, ""), True, "success although the file has changed"),
        (Outcome(1, 0, CLEAR), False, "an error although nothing has changed"),
        (Outcome(1, 0, "Traceback (most recent call last)"), True, "a traceback"),
        (Outcome(1, 0, CLEAR + CLEAR), True, "no error of two lines, exit code 1"),
        (Outcome(2, 0, CLEAR), True, "no error of two lines, exit code 2"),
        (Outcome(0, 7, ""), None, "ended by signal 7 (Bus error)"),
    ],
)
def test_outcomes_are_judged(outcome: Outcome, is_changed: bool | None, wrong: str | None) -> None:
    assert what_is_wrong(FLIPPED, outcome, is_changed) == wrong


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (rb'{"a": "\u00E9"}', True),
        (b'{"a":  "\\u00e9"}\n', True),
        (rb'{"a": "\u00e9"}', False),  # nothing at all has changed
        (rb'{"a": "\u00e8"}', False),
        (rb'{"A": "\u00e9"}', False),
        (rb'{"a": "\u00e9"', False),
        (b"[" * 100_000, False),
        (b"\xff", False),
    ],
)
def test_json_of_another_layout_says_the_same(other: bytes, same: bool) -> None:
    assert hostile.says_the_same(rb'{"a": "\u00e9"}', other) == same


def test_kept_digests_are_made_again() -> None:
    case = Case(0, "cache", "cache/digests/0", "one bit", hostile.RUN)
    assert what_is_wrong(case, Outcome(0, 0, ""), True) is None
    assert what_is_wrong(case, Outcome(1, 0, CLEAR), True) == "an error although it can be made again"


def test_a_signal_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_cli.app.main", lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert hostile.run_in_process(("verify", "x"), tmp_path).signal == signal.SIGKILL
