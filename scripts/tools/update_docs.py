"""Keeps README.md and docs/ true: flag tables come from the commands, the arguments of `LLM`, the fields of
`SamplingParams` and those of requests' bodies from their descriptions, the list of rooms from the packages' docstrings,
and the walk's output from running the walk.

python -m scripts.tools.update_docs           flag tables, rooms, and the texts of `--help` that are kept ready
python -m scripts.tools.update_docs --walk    the same, and the output of the walk's commands, run in a new directory
python -m scripts.tools.update_docs --check   exit 1 if flag tables or rooms are not up to date

The walk: every ```bash block between `<!-- walk -->` and `<!-- end walk -->`, in the order of the pages in `WALK`, all
in one directory. What a block prints is pasted after it where `<!-- output: NAME -->` ... `<!-- end -->` asks for it.
`<!-- output: NAME, without: │ ROUGE-2 .. │ latency; By category .. -->` leaves out the lines from the first one that
begins with `│ ROUGE-2` to the one before `│ latency`, and those from `By category` to the end; an ellipsis stands
for them.
"""

import ast
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, get_args

import typer.main

from commands.output.help import sort_by_panel
from commands.serve.protocol.schema import ChatRequest, CompletionRequest
from runtime.builder.engine_options import OPTIONS, OTHER_NAMES
from runtime.core.params import (
    FIELDS,
    REQUEST_FIELDS,
    AnswerParams,
    ConversationParams,
    Protocol,
    RequestField,
    SamplingParams,
)
from specdec_cli.app import app, help_texts
from specdec_cli.start import with_headings

ROOT = Path(__file__).parents[2]
HELP_TEXTS = ROOT / "specdec_cli" / "help.txt"
WALK = ("README.md", "docs/drafters.md", "docs/leader-mode.md", "docs/reports.md")
_REGION = re.compile(r"<!-- walk -->\n(.*?)<!-- end walk -->", re.DOTALL)
_OUTPUT = r"<!-- output: (?P<name>[\w-]+)(?:, without: (?P<without>.*?))? -->\n"
_BLOCK = re.compile(rf"```bash\n(?P<command>.*?)```\n(?:{_OUTPUT})?", re.DOTALL)


class WalkBlock(NamedTuple):
    """One shell block of the walk, and the name under which its output is pasted, if it is."""

    command: str
    name: str | None


def read_pages() -> dict[str, str]:
    """README.md and the chapters: path from the root -> text."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def flag_table(command: Any) -> str:
    """A Markdown table of a command's visible options, grouped as in its `--help`."""
    rows = []
    for option in sort_by_panel(command.params):
        if not option.hidden and option.name not in ("help", "help_all"):
            names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
            if option.param_type_name == "argument":
                names = f"`{option.metavar or option.name.upper()}`"
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


def engine_options_table() -> str:
    """A Markdown table of the options of a model's engine, which are arguments of `LLM`."""
    others: dict[str, list[str]] = {}
    for name, own in OTHER_NAMES.items():
        others.setdefault(own, []).append(f"`{name}`")
    rows = [
        f"| {', '.join([f'`{name}`', *others.get(name, [])])} | {one.shown_default} | {one.help} |"
        for name, (_, one) in OPTIONS.items()
    ]
    return "\n".join(["| argument | default | meaning |", "|---|---|---|", *rows])


def request_fields_table() -> str:
    """A Markdown table of the fields of `SamplingParams`, and the names that they have in bodies of requests."""
    rows = [
        f"| `{name}` | `{getattr(SamplingParams, name)!r}` | {field.help} | {_names_in_bodies(name, field)} |"
        for name, (_, field) in FIELDS.items()
    ]
    return "\n".join(["| field | default | meaning | in bodies of |", "|---|---|---|---|", *rows])


def body_fields_table() -> str:
    """A Markdown table of the fields of a request that bodies have."""
    bodies: tuple[Any, ...] = (CompletionRequest, ChatRequest)
    schemas = {body.PROTOCOL: body.model_json_schema()["properties"] for body in bodies}
    rows = []
    for name, (_, field) in REQUEST_FIELDS.items():
        if field.names:
            protocol = next(iter(field.names))
            values = _values_in_body(schemas[protocol][field.names[protocol]])
            default, names = _default_in_bodies(name, field), _names_in_bodies(name, field)
            rows.append(f"| `{name}` | {names} | {default} | {values} | {field.help} |")
    return "\n".join(["| field | bodies | default | values | meaning |", "|---|---|---|---|---|", *rows])


def _names_in_bodies(name: str, field: RequestField) -> str:
    """The protocols whose bodies have the field, with its name where that is another."""
    protocols: dict[str, list[str]] = {}
    for protocol, own in field.names.items():
        protocols.setdefault(own, []).append(protocol)
    if list(protocols) == [name] and len(field.names) == len(get_args(Protocol)):
        return "all"
    return "; ".join(f"{'' if own == name else f'`{own}` in '}{', '.join(of)}" for own, of in protocols.items())


def _default_in_bodies(name: str, field: RequestField) -> str:
    default = next(
        getattr(one, name) for one in (SamplingParams, AnswerParams, ConversationParams) if hasattr(one, name)
    )
    if default is None and field.in_model:  # the model's own value, or a value that asks for nothing
        default = field.neutral[0]
    shown = "" if default is None else f"`{json.dumps(default)}`"
    return f"the model's, else {shown}" if field.in_model else shown


def _values_in_body(schema: dict[str, Any]) -> str:
    """A JSON schema in words: `1 to 128`, or `text, list of up to 32`."""
    if "anyOf" in schema:
        return ", ".join(_values_in_body(one) for one in schema["anyOf"] if one["type"] != "null")
    kind = {"boolean": "true, false", "string": "text", "array": "list", "object": "object"}.get(schema["type"])
    if kind is None:
        least = schema.get("minimum", schema.get("exclusiveMinimum"))
        return f"{'more than ' * ('exclusiveMinimum' in schema)}{_number(least)} to {_number(schema['maximum'])}"
    most, item = schema.get("maxItems", schema.get("maxProperties")), schema.get("additionalProperties")
    kind = kind if most is None else f"{kind} of up to {most:,}"
    return f"{kind}, each {_values_in_body(item)}" if isinstance(item, dict) else kind


def _number(value: float) -> str:
    """A bound, such as 128 or, if it is large, 2^63 - 1."""
    if abs(value) < 1e6:
        return f"{value:g}"
    return f"-2^{int(-value).bit_length() - 1}" if value < 0 else f"2^{int(value).bit_length()} - 1"


def room_table(package: str) -> str:
    """A Markdown table of a package's rooms: every folder with an `__init__.py`, and its docstring."""
    rows = [
        f"| `{path.parent.relative_to(ROOT)}/` | {ast.get_docstring(ast.parse(path.read_text(encoding='utf-8')))} |"
        for path in sorted((ROOT / package).rglob("*/__init__.py"), key=lambda path: path.parent)
    ]
    return "\n".join(["| room | holds |", "|---|---|", *rows])


def with_tables(text: str) -> str:
    """A page with every block from `<!-- flags: NAME -->` or `<!-- rooms: PACKAGE -->` to `<!-- end -->` made anew."""

    def table(match: re.Match[str]) -> str:
        command: Any = typer.main.get_command(app)
        for name in match[1].split():
            command = command.commands[name]
        return f"<!-- flags: {match[1]} -->\n\n{flag_table(command)}\n\n<!-- end -->"

    def rooms(match: re.Match[str]) -> str:
        return f"<!-- rooms: {match[1]} -->\n\n{room_table(match[1])}\n\n<!-- end -->"

    text = _with_block(text, "engine options", engine_options_table())
    text = _with_block(text, "request fields", request_fields_table())
    text = _with_block(text, "body fields", body_fields_table())
    text = re.sub(r"<!-- rooms: (\w+) -->\n.*?<!-- end -->", rooms, text, flags=re.DOTALL)
    return re.sub(r"<!-- flags: ([\w ]+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def _with_block(text: str, name: str, table: str) -> str:
    block = f"<!-- {name} -->\n\n{table}\n\n<!-- end -->"
    return re.sub(rf"<!-- {name} -->\n.*?<!-- end -->", lambda _: block, text, flags=re.DOTALL)


def walk_blocks(pages: dict[str, str]) -> list[WalkBlock]:
    """The walk's shell blocks, in order."""
    regions = [region for page in WALK for region in _REGION.findall(pages[page])]
    return [WalkBlock(match["command"], match["name"]) for region in regions for match in _BLOCK.finditer(region)]


def run_walk(blocks: list[WalkBlock], directory: Path, environment_bin: Path | None = None) -> dict[str, str]:
    """Run the blocks in `directory`; returns what those with a name printed on stdout.

    `specdec` is the one in `environment_bin`, beside this Python unless another is given.
    """
    environment_bin = environment_bin or Path(sys.executable).parent
    outputs = {}
    for block in blocks:
        script = f'set -e\nexport PATH="{environment_bin}:$PATH"\n{block.command}'
        result = subprocess.run(["bash", "-c", script], cwd=directory, stdout=subprocess.PIPE, text=True, check=True)
        if block.name:
            outputs[block.name] = result.stdout
    return outputs


def shortened(output: str, without: str | None) -> str:
    """The lines of an output but for those that `without` names, as `FIRST .. NEXT; FIRST .. NEXT`."""
    lines = [line.rstrip() for line in output.rstrip().splitlines()]
    for span in (without or "").split(";") if without else []:
        first, _, following = (part.strip() for part in span.partition(".."))
        start = _line_with(first, lines)
        end = _line_with(following, lines, start + 1) if following else len(lines)
        lines[start:end] = ["…"]
    return "\n".join(lines)


def _line_with(beginning: str, lines: list[str], first: int = 0) -> int:
    found = next((i for i in range(first, len(lines)) if lines[i].startswith(beginning)), None)
    if found is None:
        sys.exit(f"no line begins with `{beginning}` in this output of the walk:\n" + "\n".join(lines))
    return found


def with_walk(text: str, outputs: dict[str, str]) -> str:
    """A page with the walk's outputs pasted anew."""

    def block(match: re.Match[str]) -> str:
        return f"{match['marker']}```text\n{shortened(outputs[match['name']], match['without'])}\n```\n<!-- end -->"

    return re.sub(rf"(?P<marker>{_OUTPUT}).*?<!-- end -->", block, text, flags=re.DOTALL)


def main() -> None:
    pages = read_pages()
    updated = {page: with_tables(text) for page, text in pages.items()}
    if "--check" in sys.argv[1:]:
        stale = [page for page in pages if updated[page] != pages[page]]
        stale += [HELP_TEXTS.name] if HELP_TEXTS.read_text(encoding="utf-8") != with_headings(help_texts()) else []
        sys.exit(f"out of date: {', '.join(stale)}; run python -m scripts.tools.update_docs" if stale else 0)
    if "--walk" in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as directory:
            outputs = run_walk(walk_blocks(pages), Path(directory))
        updated = {page: with_walk(text, outputs) for page, text in updated.items()}
    for page, text in updated.items():
        (ROOT / page).write_text(text, encoding="utf-8")
    HELP_TEXTS.write_text(with_headings(help_texts()), encoding="utf-8")


if __name__ == "__main__":
    main()
