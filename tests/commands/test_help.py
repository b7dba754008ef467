"""`--help`: panels in one order for all commands, and flags that can be read and copied."""

import re

import pytest
import typer.main
from command_line import Specdec

from commands.options.panels import PANELS
from specdec_cli.app import app

COMMANDS = ["convert", "build", "run", "summarize", "compare", "tune", "corpus create", "corpus merge", "corpus stats"]
LONGEST_AT_80 = 28


def flags(command: str) -> list[str]:
    found = typer.main.get_command(app)
    for name in command.split():
        found = found.commands[name]  # type: ignore[attr-defined]
    return [name for option in found.params if not option.hidden for name in option.opts if name.startswith("--")]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("width", [80, 120])
def test_no_flag_is_cut(command: str, width: int, specdec: Specdec, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for three of the K/V cache's, which leave no room for the help beside them at 80 columns."""
    monkeypatch.setenv("COLUMNS", str(width))
    lines = specdec(*command.split(), "--help").stdout.splitlines()
    assert max(map(len, lines)) == width
    words = set(re.findall(r"^│ [* ]*(--[\w-]+) ", "\n".join(lines), flags=re.MULTILINE))
    assert len(flags(command)) > 1
    assert [flag for flag in flags(command) if flag not in words and (width > 80 or len(flag) <= LONGEST_AT_80)] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_panels_come_in_one_order(command: str, specdec: Specdec) -> None:
    titles = re.findall(r"^╭─ (.*?) ─+╮$", specdec(*command.split(), "--help").stdout, flags=re.MULTILINE)
    panels = [title for title in titles if title not in ("Arguments", "Options")]
    assert panels and panels == [panel for panel in PANELS if panel in panels]
