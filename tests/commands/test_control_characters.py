"""Control characters, which would move a terminal's cursor or colour it, are shown and not obeyed."""

import json
import os
import pty
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from command_line import Result, Specdec

from commands.output.output import Output, visible

CONTROLS = "a\x1b[31mb\x00c\rd\x9be\x7f"
SHOWN = "a\\x1b[31mb\\x00c\\x0dd\\x9be\\x7f"


OnTerminal = Callable[[Callable[[], object]], str]


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[OnTerminal]:
    """Text that an action writes to standard output where that is a terminal."""
    master, slave = pty.openpty()
    monkeypatch.setenv("NO_COLOR", "1")
    with open(slave, "w", encoding="utf-8") as terminal:

        def written(action: Callable[[], object]) -> str:
            with redirect_stdout(terminal):
                action()
            terminal.write("\x04")
            terminal.flush()
            data = b""
            while not data.endswith(b"\x04"):
                data += os.read(master, 4096)
            return data[:-1].decode().replace("\r\n", "\n")

        yield written
    os.close(master)


def test_terminal_is_shown_what_it_would_obey(on_terminal: OnTerminal) -> None:
    assert on_terminal(lambda: Output().text(CONTROLS + "\n\tü🙂")).expandtabs() == (SHOWN + "\n\tü🙂\n").expandtabs()


def test_pipes_get_the_text_to_the_letter(capfd: pytest.CaptureFixture[str]) -> None:
    Output().text(CONTROLS + "\n\tü")
    assert capfd.readouterr().out == CONTROLS + "\n\tü\n"


def test_every_control_character_but_line_ends_and_tabs_is_shown() -> None:
    text = "".join(map(chr, range(0x100)))
    shown = visible(text)
    assert not [c for c in shown if (ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0) and c not in "\n\t"]
    assert visible("a\u202eb\u2066") == "a\\u202eb\\u2066"  # what turns the direction of text
    assert visible("\x1b") == "\\x1b" and visible("\n\t é") == "\n\t é"


def test_prompt_is_shown_by_run_and_exact_in_json(
    specdec: Specdec, llama_engine_dir: Path, tmp_path: Path, on_terminal: OnTerminal
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"prompt": CONTROLS}))
    arguments = ["run", "--engine-dir", llama_engine_dir, "--input-file", path, "--max-output-len", 2]
    shown = on_terminal(lambda: specdec(*arguments))
    assert f'Input [Text 0]: "{SHOWN}"' in shown
    assert "\x1b[31m" not in shown and "\x00" not in shown
    document = on_terminal(lambda: specdec(*arguments, "--json"))
    assert json.loads(document)["requests"][0]["prompt"] == CONTROLS


def test_errors_show_what_is_in_a_value(specdec: Specdec) -> None:
    result: Result = specdec("run", "--engine-dir", "no\x1b[31mne", "--input-text", "a")
    assert result.exit_code == 1
    assert "no\\x1b[31mne" in result.stderr and "\x1b[31m" not in result.stderr
