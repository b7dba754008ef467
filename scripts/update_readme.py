"""Writes the flag tables of README.md from the commands themselves; `--check` only says whether they are up to date.

    python scripts/update_readme.py [--check]
"""

import re
import sys
from pathlib import Path
from typing import Any

import typer.main

from specdec_cli.app import app

README = Path(__file__).parents[1] / "README.md"


def flag_table(command: Any) -> str:
    """A Markdown table of a command's visible options, in the order and under the panels of `--help`."""
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    panels: dict[str, list[str]] = {}
    for option in command.params:
        if option.hidden or option.name in ("help", "version"):
            continue
        names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
        panels.setdefault(option.rich_help_panel, []).append(f"| {names} | {_default(option)} | {option.help} |")
    for panel in sorted(panels, key=lambda name: name or ""):
        rows += panels[panel]
    return "\n".join(rows)


def _default(option: Any) -> str:
    if option.required:
        return "required"
    if isinstance(option.show_default, str):
        return option.show_default
    if option.default is None or option.default is False or option.default == []:
        return ""
    if option.default is True:
        return "on"
    return f"`{option.default}`"


def with_tables(text: str) -> str:
    """The README with every block between `<!-- flags: NAME -->` and `<!-- end -->` made anew."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]

    def table(match: re.Match[str]) -> str:
        return f"<!-- flags: {match[1]} -->\n{flag_table(commands[match[1]])}\n<!-- end -->"

    return re.sub(r"<!-- flags: (\w+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def main() -> None:
    text = README.read_text(encoding="utf-8")
    updated = with_tables(text)
    if "--check" in sys.argv[1:]:
        sys.exit("README.md: flag tables differ from the commands; run scripts/update_readme.py" if updated != text else 0)
    README.write_text(updated, encoding="utf-8")


if __name__ == "__main__":
    main()
