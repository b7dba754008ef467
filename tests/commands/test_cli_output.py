"""Places and looks of messages: brackets stay, colour and progress only where someone looks."""

import io
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Specdec
from rich.table import Table
from sentences import Said

from commands.output.output import Output, check_output_file, fail, megabytes, milliseconds, number, percent

MARKUP = "[10,2,[0]] [bold]b[/bold] [/] \\[x] :smile: [link=a]"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Terminal]:
    """Makes stderr a terminal of colours."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def open_it() -> Terminal:
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        return terminal

    return open_it


@pytest.mark.parametrize("command", ["run table", "convert", "help"])
def test_what_standard_output_cannot_have_is_replaced(
    command: str, specdec: Specdec, llama_dir: Path, llama_engine_dir: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The work is done: no traceback, exit code 0, and all that the encoding has."""
    named = tmp_path / "the 日本 é 🙂"
    shutil.copytree(llama_dir, named)
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(named / "cache"))
    run = ["run", "--engine-dir", llama_engine_dir, "--max-output-len", 4]
    arguments = {
        "run table": [*run, "--input-text", "the 日本 é 🙂"],
        "convert": ["convert", "--model-dir", named, "--output-dir", named / "out"],
        "help": ["run", "--help"],
    }[command]
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "gbk"))
    result = specdec(*arguments)
    assert result.exit_code == 0 and "Traceback" not in result.stderr, result.stderr
    sys.stdout.flush()
    shown = written.getvalue().decode("gbk")
    if command == "convert":
        assert "the 日本 é 🙂".encode("gbk", "replace").decode("gbk") in shown


def test_errors_and_hints_are_printed_to_the_letter(capsys: pytest.CaptureFixture[str]) -> None:
    fail(MARKUP, MARKUP)
    captured = capsys.readouterr()
    assert captured.err == f"error: {MARKUP}\nhint: {MARKUP}\n"
    assert captured.out == ""


def test_tables_are_printed_to_the_letter(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(title=f"T {MARKUP}")
    table.add_column(f"C {MARKUP}")
    table.add_row(f"R {MARKUP}")
    Output().result(table)
    printed = capsys.readouterr().out
    for letter in "TCR":
        assert f"{letter} {MARKUP}" in printed


def test_json_and_quiet_print_no_results(capsys: pytest.CaptureFixture[str]) -> None:
    Output(json=True).result("x")
    Output(quiet=True).result("x")
    Output(json=True).text("x")
    Output(quiet=True).document({"x": 1})
    Output().document({"x": 1})
    assert capsys.readouterr() == ("", "")


def test_documents_are_strict_json(capsys: pytest.CaptureFixture[str], said: Said) -> None:
    with pytest.raises(ValueError) as error:
        Output(json=True).document({"x": float("nan")})
    said(error)


def test_phases_are_lines_without_a_terminal_and_nothing_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    for output in (Output(), Output(json=True), Output(quiet=True)):
        with output.phases() as phase:
            phase("compiling the step")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("compiling the step") == captured.err.count("\n") == 1


def show_progress(output: Output) -> None:
    with output.progress("engine", 2) as advance:
        advance()
    with output.byte_progress("converting") as progress:
        progress(1, 2)


def test_progress_is_shown_on_a_terminal_only(
    open_terminal: Callable[[], Terminal], capsys: pytest.CaptureFixture[str]
) -> None:
    show_progress(Output())
    assert capsys.readouterr() == ("", "")
    terminal = open_terminal()
    show_progress(Output())
    assert "engine" in terminal.getvalue() and "converting" in terminal.getvalue()
    terminal = open_terminal()
    show_progress(Output(json=True))
    show_progress(Output(quiet=True))
    assert terminal.getvalue() == ""


def test_colour_is_left_out_where_no_color_is_set(
    open_terminal: Callable[[], Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = open_terminal()
    fail("x", "y")
    assert "\x1b[31merror:" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = open_terminal()
    fail("x", "y")
    assert terminal.getvalue() == "error: x\nhint: y\n"


def test_numbers_have_units_and_a_dash_where_nothing_was_measured() -> None:
    assert [number(None), milliseconds(None), percent(None)] == ["-"] * 3
    assert [number(1234.567), number(2.0, 1)] == ["1,234.57", "2.0"]
    assert [milliseconds(0.0123), percent(0.5), megabytes(2_500_000)] == ["12.3 ms", "50.0 %", "2.5 MB"]


def test_process_killed_while_it_asks_whether_a_file_can_be_written_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path, missing_ok: bool = False) -> None:
        raise RuntimeError("killed here")

    monkeypatch.setattr(Path, "unlink", killed)
    check_output_file(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_closed_streams_are_the_null_device(process_environment: dict[str, str], tmp_path: Path) -> None:
    script = '"$0" -m specdec_cli cache list >&- 2>&- <&-'
    environment = process_environment | {"SPECDEC_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(["sh", "-c", script, sys.executable], env=environment)
    assert done.returncode == 0
