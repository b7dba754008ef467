"""`--help`: panels in one order for all commands, and flags that can be read and copied."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from command_line import Specdec

from commands.options.shared import COMMON
from commands.output.help import PANELS
from specdec_cli.app import app, help_texts
from specdec_cli.start import texts_at_once

LONG = ["run", "chat", "serve", "batch", "doctor", "tune", "summarize"]
COMMANDS = [
    *LONG, "convert", "build", "compare", "verify", "corpus create", "corpus merge", "corpus stats",
    "list", "cache list", "cache prune",
]  # fmt: skip
NUM_LINES_OF_A_SCREEN = 50


def flags(command: str) -> list[str]:
    found = typer.main.get_command(app)
    for name in command.split():
        found = found.commands[name]  # type: ignore[attr-defined]
    return [name for option in found.params if not option.hidden for name in option.opts if name.startswith("--")]


def all_help(command: str) -> str:
    return "--help-all" if command in LONG else "--help"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("width", [50, 60, 80, 100])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_flag_is_cut_and_panels_come_in_one_order(
    command: str, width: int, specdec: Specdec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags stand in boxes, or in plain lines where these would leave no room for the help beside the names."""
    monkeypatch.setenv("COLUMNS", str(width))
    lines = specdec(*command.split(), all_help(command)).stdout.splitlines()
    assert max(map(len, lines)) <= width
    words = set(re.findall(r"^(?:│ [* ]*|  (?:-\w, )?)(--[\w-]+)(?: |$)", "\n".join(lines), flags=re.MULTILINE))
    assert len(flags(command)) > 1
    assert [flag for flag in flags(command) if flag not in words] == []
    titles = re.findall(r"^(?:╭─ (.*?) ─+╮|([A-Z][\w ()]+))$", "\n".join(lines), flags=re.MULTILINE)
    titles = [boxed or plain for boxed, plain in titles if boxed or plain in PANELS]
    panels = [title for title in titles if title not in ("Arguments", "Options")]
    assert panels and panels == [panel for panel in PANELS if panel in panels]


@pytest.mark.parametrize("command", ["", "corpus", *COMMANDS])
def test_help_fits_in_two_screens(command: str, specdec: Specdec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown = specdec(*command.split(), "--help").stdout
    assert shown.count("\n") <= 2 * NUM_LINES_OF_A_SCREEN
    assert "<bool>" not in shown


@pytest.mark.parametrize("width", [50, 60, 79])
def test_help_fits_a_narrow_terminal(width: int, specdec: Specdec, monkeypatch: pytest.MonkeyPatch) -> None:
    """The words are the same, and a shell takes the commands as they are."""
    for command in ("", *LONG, "build", "cache prune"):
        wide = specdec(*command.split(), "--help").stdout
        monkeypatch.setenv("COLUMNS", str(width))
        shown = specdec(*command.split(), "--help").stdout
        monkeypatch.delenv("COLUMNS")
        assert max(map(len, shown.splitlines())) <= width
        if command in ("", *LONG):
            assert "".join(shown.replace(" \\\n", " ").split()) == "".join(wide.split())


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("run", "[MODEL] [PROMPT ...] [FLAGS]"),
        ("corpus merge", "FILE ... [FLAGS]"),
        ("compare", "A.json B.json [FLAGS]"),
        ("corpus create", "[FLAGS]"),
    ],
)
def test_usage_in_a_narrow_terminal_has_the_arguments(
    command: str, usage: str, specdec: Specdec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the whole name of the command."""
    monkeypatch.setenv("COLUMNS", "50")
    assert specdec(*command.split(), all_help(command)).stdout.splitlines()[0] == f"Usage: specdec {command} {usage}"


@pytest.mark.parametrize("command", LONG)
def test_help_shows_the_common_flags_and_how_to_see_all(
    command: str, specdec: Specdec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # or names are cut
    short, full = (specdec(command, flag) for flag in ("--help", "--help-all"))
    assert (short.exit_code, full.exit_code) == (0, 0)
    of_command = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    for option in (option for option in of_command if not option.hidden and option.opts[0].startswith("--")):
        assert re.search(rf"│ [* ]*{option.opts[0]} ", full.stdout), option.opts
        is_shown = re.search(rf"^  (-\w, )?{option.opts[0]}( |$)", short.stdout, re.MULTILINE) is not None
        assert is_shown == (option.name in COMMON), option.opts
    assert re.search(r"^  MODEL ", short.stdout, re.MULTILINE)
    # Showing help changes nothing.
    assert specdec(command, "--help").stdout == short.stdout


def test_help_begins_with_what_to_start_with_on_one_screen(specdec: Specdec) -> None:
    texts = {command: specdec(*command.split(), "--help").stdout for command in ("", "run", "chat", "serve")}
    for text in texts.values():
        assert text.count("\n") <= 40 and max(map(len, text.splitlines())) <= 100 and text.isascii()
    overview = texts[""]
    assert overview.index("specdec run demo") < overview.index("Start\n") < overview.index("Measure\n")
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert [name for name in commands if not re.search(rf"^  {name} ", overview, re.MULTILINE)] == []
    assert re.search(r"^Speculation\n  --spec-decode-algo NAME .*AUTO", texts["run"], re.MULTILINE)


def test_without_a_command_the_help_is_shown_and_is_no_error(specdec: Specdec) -> None:
    for group in ([], ["cache"]):
        shown = specdec(*group)
        assert (shown.exit_code, shown.stderr) == (2, "")
        assert shown.stdout.strip() == specdec(*group, "--help").stdout.strip()


def test_help_is_shown_before_any_command_is_imported(specdec: Specdec) -> None:
    """And it is what the commands themselves say."""
    assert help_texts() == texts_at_once()
    program = (
        "import sys; from specdec_cli.start import main; main(); "
        "sys.exit(any(name.split('.')[0] in ('typer', 'rich', 'commands', 'torch') for name in sys.modules))"
    )
    for words in (["--help"], ["serve", "-h"]):
        shown = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
        own = specdec(*words)
        assert own.exit_code == 0, own.stderr
        assert (shown.returncode, shown.stdout) == (0, own.stdout), shown.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is full")
def test_help_that_cannot_be_written_is_one_error() -> None:
    with open("/dev/full", "w") as full:
        shown = subprocess.run(
            [sys.executable, "-m", "specdec_cli", "--help"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert shown.returncode == 1
    assert [line.split(":")[0] for line in shown.stderr.splitlines()] == ["error", "hint"], shown.stderr
