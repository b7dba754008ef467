"""The `specdec` program: shows help without importing the commands, and runs them otherwise."""

import os
import sys
from contextlib import suppress

from specdec_cli.signals import restore  # before the modules that take time to import


def main() -> None:
    text = _help(sys.argv[1:])
    if text is None or "_SPECDEC_COMPLETE" in os.environ:
        from specdec_cli.app import main as run

        run()
        return
    restore()
    with suppress(BrokenPipeError):
        print(text, end="", flush=True)
        return
    os._exit(0)  # `specdec --help | head -1`: Python would tell of the closed pipe once more


def _help(arguments: list[str]) -> str | None:
    """The help that is asked for; None for anything else."""
    if not arguments or arguments[-1] not in ("-h", "--help") or len(arguments) > 2:
        return None
    from specdec_cli.help_texts import TEXTS

    return TEXTS.get(" ".join(arguments[:-1]))
