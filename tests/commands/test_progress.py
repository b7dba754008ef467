"""Progress: bars on a terminal that are gone in the end, plain lines from time to time elsewhere, nothing on stdout."""

import io
import re
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from command_line import NGRAM, PROMPT, Specdec
from rich.console import Console
from rich.text import Text
from waiting import wait_until

from commands.output import progress


class Screen(io.StringIO):
    """A terminal, as a file."""

    def isatty(self) -> bool:
        return True

    @property
    def words(self) -> str:
        """Text that was written, without the control sequences."""
        return Text.from_ansi(self.getvalue()).plain


@pytest.fixture
def terminal() -> Console:
    return Console(file=Screen(), force_terminal=True, width=80, _environ={"TERM": "xterm"})


def test_a_bar_moves_as_things_are_done_and_is_gone_in_the_end(terminal: Console) -> None:
    with progress.counting(terminal, "timing", 12) as advance:
        advance()
        advance(4)
    assert isinstance(terminal.file, Screen)
    assert re.search(r"timing .*5/12", terminal.file.words)
    assert terminal.file.getvalue().endswith("\x1b[2K")  # the line is erased


def test_every_phase_is_listed_with_its_time(terminal: Console) -> None:
    with progress.phases(terminal) as phase:
        for name in ("loading", "compiling"):
            phase(name)
    assert isinstance(terminal.file, Screen)
    last = terminal.file.words[terminal.file.words.rindex("loading") :]
    assert re.search(r"loading.*\d:\d\d:\d\d\s+compiling.*\d:\d\d:\d\d", last, re.DOTALL)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "INTERVAL_S", 0.005)


@pytest.mark.usefixtures("often")
def test_without_a_terminal_a_line_says_how_far_it_is_from_time_to_time() -> None:
    file, before = io.StringIO(), set(threading.enumerate())
    with progress.counting(Console(file=file, width=80), "timing", 12) as advance:
        advance(5)
        wait_until(lambda: file.getvalue().count("5/12\n") >= 2)
        advance()
        wait_until(lambda: "6/12\n" in file.getvalue())
    lines = file.getvalue().splitlines()
    assert all(re.fullmatch(r" +\d+\.\d s  timing: [056]/12", line) for line in lines)
    assert set(threading.enumerate()) <= before  # its thread ends with the block


def test_without_a_terminal_a_phase_that_lasts_is_named_once_and_then_with_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many of the intervals pass."""
    file, says = io.StringIO(), list[Callable[[], None]]()
    monkeypatch.setattr(progress, "_every_interval", lambda say: nullcontext(says.append(say)))
    with progress.phases(Console(file=file, width=80)) as phase:
        phase("loading")
        phase("compiling")
        for _ in range(3):
            says[0]()
    lines = [re.sub(r"^ +\d+\.\d s", "", line) for line in file.getvalue().splitlines()]
    assert lines == ["  loading", "  compiling …", "  compiling"]


@pytest.mark.parametrize("form", ["--json", "--quiet"])
def test_nothing_is_shown_with_json_or_quiet(
    form: str, specdec: Specdec, llama_engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    where = ["run", "--engine-dir", llama_engine_dir, "--input-text", PROMPT, "--max-output-len", 12]
    assert specdec(*where, "--ngram-config", NGRAM, "--check-lossless", form).exit_code == 0
    assert screen.getvalue() == ""
