"""Keeps README.md true: flag tables come from the commands, the walk's output from running it.

python scripts/update_readme.py           flag tables
python scripts/update_readme.py --walk    flag tables, and the output of the walk's commands, run in a new directory
python scripts/update_readme.py --check   exit 1 if the flag tables are not up to date
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import typer.main

from commands.options.panels import sort_by_panel
from specdec_cli.app import app

README = Path(__file__).parents[1] / "README.md"
_WALK = re.compile(r"<!-- walk -->\n(.*?)<!-- end walk -->", re.DOTALL)
_COMMAND = re.compile(r"```bash\n(.*?)```\n<!-- output: \w+ -->\n", re.DOTALL)


def flag_table(command: Any) -> str:
    """A Markdown table of a command's visible options, grouped as in its `--help`."""
    rows = []
    for option in sort_by_panel(command.params):
        if not option.hidden and option.name != "help":
            names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
            if option.param_type_name == "argument":
                names = f"`{option.metavar}`"
            rows.append(f"| {names} | {_default(option)} | {option.help} |")
    return "\n".join(["| flag | default | meaning |", "|---|---|---|", *rows])


def _default(option: Any) -> str:
    if option.required:
        return "required"
    if isinstance(option.show_default, str):
        return option.show_default
    if option.default is None or option.default is False or option.default == []:
        return ""
    return "on" if option.default is True else f"`{option.default}`"


def with_tables(text: str) -> str:
    """The README with every block between `<!-- flags: NAME -->` and `<!-- end -->` made anew."""

    def table(match: re.Match[str]) -> str:
        command: Any = typer.main.get_command(app)
        for name in match[1].split():
            command = command.commands[name]
        return f"<!-- flags: {match[1]} -->\n{flag_table(command)}\n<!-- end -->"

    return re.sub(r"<!-- flags: ([\w ]+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def walk_commands(text: str) -> list[str]:
    """The walk's shell commands, in order."""
    walk = _WALK.search(text)
    assert walk is not None, "README.md has no walk"
    return _COMMAND.findall(walk[1])


def run_walk(commands: list[str], directory: Path) -> list[str]:
    """Run the commands in `directory` and return what each printed on stdout."""
    environment_bin = Path(sys.executable).parent
    outputs = []
    for command in commands:
        script = f'export PATH="{environment_bin}:$PATH"\n{command}'
        result = subprocess.run(["bash", "-c", script], cwd=directory, stdout=subprocess.PIPE, text=True, check=True)
        outputs.append(result.stdout)
    return outputs


def with_walk(text: str) -> str:
    """The README with the walk's output pasted anew."""
    with tempfile.TemporaryDirectory() as directory:
        outputs = iter(run_walk(walk_commands(text), Path(directory)))

    def block(match: re.Match[str]) -> str:
        lines = "\n".join(line.rstrip() for line in next(outputs).rstrip().splitlines())
        return f"{match[1]}```text\n{lines}\n```\n<!-- end -->"

    return re.sub(r"(<!-- output: \w+ -->\n).*?<!-- end -->", block, text, flags=re.DOTALL)


def main() -> None:
    text = README.read_text(encoding="utf-8")
    updated = with_tables(text)
    if "--check" in sys.argv[1:]:
        sys.exit("README.md: flag tables are out of date; run scripts/update_readme.py" if updated != text else 0)
    README.write_text(with_walk(updated) if "--walk" in sys.argv[1:] else updated, encoding="utf-8")


if __name__ == "__main__":
    main()
