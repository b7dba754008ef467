"""The `specdec` program: shows help without importing the commands, and runs them otherwise."""

import os
import sys
from contextlib import suppress
from shutil import get_terminal_size

from specdec_cli.signals import restore  # before the modules that take time to import

_NEW_PAGE = "\f"
_WIDTH = 80
"""Columns that the texts of help.txt have."""


def main() -> None:
    text = _help(sys.argv[1:])
    if text is not None and "_SPECDEC_COMPLETE" not in os.environ:
        with suppress(OSError):  # of a full disk the commands tell
            _show(text)
            return
    from specdec_cli.app import main as run

    run()


def _show(text: str) -> None:
    restore()
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        os._exit(0)  # `specdec --help | head -1`: Python would tell of the closed pipe once more


def _help(arguments: list[str]) -> str | None:
    """The help that is asked for, on a terminal of 80 columns or more; None for anything else."""
    if not arguments or arguments[-1] not in ("-h", "--help") or len(arguments) > 2:
        return None
    if get_terminal_size().columns < _WIDTH:
        return None  # the commands write it for fewer columns
    return texts_at_once().get(" ".join(arguments[:-1]))


def texts_at_once() -> dict[str, str]:
    """The texts of help.txt: the help of `specdec` under "", then each command's help under its name. `python -m
    scripts.tools.update_docs` writes the file (by `with_headings`) from the commands' own help.
    """
    file = os.path.join(os.path.dirname(__file__), "help.txt")
    with open(file, encoding="ascii", newline="\n") as opened:
        pages = opened.read().split(_NEW_PAGE)
    return dict(page.split("\n", 1) for page in pages[1:])


def with_headings(texts: dict[str, str]) -> str:
    """The content of help.txt: each text behind a form feed and a line with the name of its command."""
    return "".join(f"{_NEW_PAGE}{name}\n{text}" for name, text in texts.items())
