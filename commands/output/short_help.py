"""`--help` of `specdec` and of commands with many flags: plain text, a line for each command or common flag.

`specdec_cli/help.txt` has these texts ready, made by `python -m scripts.tools.update_docs`: no command is imported to
show one. They are pure ASCII, so any terminal can show them.
"""

import inspect
import re
import shutil
import textwrap
from collections.abc import Iterable, Set
from itertools import groupby
from typing import Any

from commands.output.help import INPUT, OUTPUT, SAMPLING, SERVER, SPECULATION

WIDTH, LEAST_WIDTH, _HELP_COLUMN = 80, 40, 27
_BESIDE_NAMES = 52
"""Columns that Typer's boxes need beside the longest name: types, texts and borders."""
_MODEL = "Model"
_GROUPS = {
    "Start": {
        "run": "answer prompts",
        "chat": "talk with a model in the terminal",
        "serve": "serve a model over HTTP, for OpenAI's and Anthropic's clients",
        "launch": "run Claude Code, Codex or another agent on a model of yours",
        "batch": "answer a file of requests; after a kill it resumes",
    },
    "Measure": {
        "tune": "find the drafter and the draft length that pay on your prompts",
        "drafters": "which draft fits a model: each one's speed here, and its command",
        "summarize": "quality and speed on a dataset, beside Hugging Face",
        "compare": "two JSON documents side by side",
        "doctor": "find what makes a model slow, and what to do about it",
        "predict": "what drafts would save on another machine",
        "check": "prove that answers are an engine's own, by their receipts",
        "regress": "what another engine changes in old answers",
        "fingerprint": "whether two engines or machines give the same bits",
    },
    "Make": {
        "convert": "a model becomes a checkpoint, quantized if you like",
        "build": "a checkpoint becomes an engine; `run MODEL` does both by itself",
        "train": "train a drafting head on the model's own answers",
        "corpus": "make files of text that n-gram lookup searches",
    },
    "Look after": {
        "list": "models on this machine: formats, sizes, last use",
        "pull": "download a model of the hub, such as OWNER/NAME:Q4_K_M",
        "rm": "remove a model's downloaded files and its engines",
        "config": "settings of variables and files, and where each comes from",
        "cache": "list the engines, and remove the oldest",
        "verify": "compare files with their checksums",
        "schema": "print the JSON schema of a command's `--json` document",
    },
}
_PANELS = (_MODEL, INPUT, SERVER, "Cluster", "Runtime", SPECULATION, SAMPLING, OUTPUT)
_PANEL_OF = {
    "model": _MODEL,
    "named": _MODEL,
    "quantization": _MODEL,
    "kv_cache_dtype": _MODEL,
    "max_seq_len": _MODEL,
    "spec_decode_algo": SPECULATION,
    "draft_model_dir": SPECULATION,
    "prompt": INPUT,
    "max_output_len": SAMPLING,
    "output_len": SAMPLING,
    "stop_words": SAMPLING,
}
"""Groups of arguments and flags that the short help puts into another group. They come first in that
group.
"""
_BRIEFS = {
    "model": "directory, GGUF file, hub id, `demo`, or an engine",
    "named": "directory, GGUF file, hub id, `demo`, or an engine",
    "prompt": "texts to continue; `-` reads standard input",
    "batch input_file": "requests, one per line, in OpenAI's batch format",
    "input_file": "prompts in a .txt, .jsonl, .csv or .npy file",
    "input_text": "a prompt, by a flag; repeatable",
    "apply_chat_template": "send prompts as a user's messages",
    "system": "system message",
    "quantization": "weights in int8, int4 or fp8",
    "kv_cache_dtype": "keys and values in int8 or fp8",
    "max_seq_len": "most tokens of prompt and output (to 4,096)",
    "spec_decode_algo": "drafter: AUTO, NGRAM, SUFFIX, ...",
    "draft_model_dir": "a draft model or a trained head",
    "ngram_config": "lookup: [max_draft_len, max_matching_ngram_size]",
    "profile": "draft as `specdec tune` recommends, from a file",
    "max_output_len": "tokens to generate",
    "output_len": "tokens to generate",
    "stop_words": "text that ends an output; repeatable",
    "temperature": "0 is greedy",
    "top_p": "sample among the best tokens of this probability",
    "top_k": "sample among this many best tokens",
    "check_lossless": "compare with no drafter: the same tokens? faster?",
    "stats": "`detailed` adds acceptance by position",
    "report": "write a page with charts",
    "show_tokens": "mark the tokens that were drafted",
    "help_all": "show all flags",
    "api_key": "key that clients must send",
    "served_model_name": "name of the model for clients; repeatable",
    "max_queue_len": "most requests that may wait",
    "output": "write the recommendation, for `--profile`",
    "save": "make the recommendation the model's default",
    "ray": "have Ray's workers answer",
    "dataset": "`demo`, a hub id, or a .jsonl, .csv or .parquet file",
    "hf_model_dir": "model that `--test-hf` runs",
    "traces": "recorded prompts and outputs, by `--output-traces`",
}
"""Short texts of flags for `--help`, for flags whose full help begins with too many words."""


def terminal_width() -> int:
    """Columns for the help text: the terminal's width, between 40 and 80."""
    return max(min(shutil.get_terminal_size().columns, WIDTH), LEAST_WIDTH)


def overview(commands: Set[str], examples: Iterable[str], width: int = WIDTH) -> str:
    """The text of `specdec --help`: `examples`, then the commands to start with, and all commands in groups."""
    lines = ["Usage: specdec COMMAND ...     (`specdec COMMAND --help` shows its flags)", ""]
    lines += ["Faster answers from the same model: a drafter guesses, the model checks.", "Start with:"]
    lines += [*(f"  {example}" for example in examples), ""]
    lines += textwrap.wrap(
        "A model is `demo`, a directory, a GGUF file or a hub id. AUTO drafts where that saves time; "
        "`specdec tune MODEL` finds what is fastest for your prompts.",
        width,
    )
    for group, texts in _GROUPS.items():
        lines += [group, *(_row(name, text, 13, width) for name, text in texts.items() if name in commands)]
    others = sorted(commands - {name for texts in _GROUPS.values() for name in texts})
    lines += ["Others", f"  {', '.join(others)}"] if others else []
    lines += ["--version (-V); --debug shows tracebacks; --install-completion completes words"]
    return _plain(lines, width)


def short_help(command: Any, common: Iterable[str], examples: Iterable[str], width: int = WIDTH) -> str:
    """The text of `specdec COMMAND --help`: examples, and a line for each of the `common` flags."""
    name = command.name or ""
    shown = [param for param in command.params if param.name in common and not _is_hidden(param)]
    arguments = [param for param in shown if param.param_type_name == "argument"]
    lines = [_usage(f"specdec {name}", arguments), ""]
    lines += textwrap.wrap(_first_sentence(command.help or ""), width)
    lines += ["", *(f"  {example}" for example in examples)]
    for panel in _PANELS:
        own = sorted((param for param in shown if _panel(param) == panel), key=_place)
        rows = [_row(_names(param), _brief(name, param), _HELP_COLUMN, width) for param in own]
        lines += [panel, *rows] if rows else []
    return _plain([*lines, _row("--help-all", _BRIEFS["help_all"], _HELP_COLUMN, width)], width)


def needs_plain_help(command: Any, width: int) -> bool:
    """True if Typer's boxes would cut the name of one of the command's flags."""
    longest = max((len(name) for param in command.params if not _is_hidden(param) for name in param.opts), default=0)
    return longest > width - _BESIDE_NAMES


def full_help(command: Any, path: str, width: int) -> str:
    """All arguments and flags, in the order of `command.params`, for columns in which boxes have no room: the texts
    stand below the names. `path` is what calls the command, such as `specdec corpus merge`.
    """
    arguments = [param for param in command.params if param.param_type_name == "argument" and not _is_hidden(param)]
    lines = [*_broken(_usage(path, arguments), width), ""]
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        lines += [*textwrap.wrap(" ".join(paragraph.split()), width), ""]
    for panel, params in groupby(command.params, lambda param: getattr(param, "rich_help_panel", None) or ""):
        own = [param for param in params if not _is_hidden(param)]
        lines += [panel] if panel and own else []
        for param in own:
            metavar = "" if param.param_type_name == "argument" or param.is_flag else f" {param.metavar or 'X'}"
            names = (
                _names(param) if param.param_type_name == "argument" else f"{', '.join(reversed(param.opts))}{metavar}"
            )
            text = " ".join(part for part in (param.help, _default(param), _variable(param)) if part)
            lines += [f"  {names}", *textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)]
    variables = "A flag's variable has its name: SPECDEC_MAX_SEQ_LEN for --max-seq-len."
    lines += ["", *textwrap.wrap(variables, width, break_on_hyphens=False)]
    return "\n".join(lines) + "\n"


def _default(param: Any) -> str:
    shown = param.show_default if param.param_type_name == "option" else None
    if not shown or (shown is True and param.default in (None, False, ())):
        return ""
    return f"[default: {param.default if shown is True else shown}]"


def _variable(param: Any) -> str:
    """The variables that Typer's boxes name: those with names of their own, such as SPECDEC_API_KEY."""
    named = getattr(param, "envvar", None) or ()
    names = [named] if isinstance(named, str) else named
    return f"[variable: {', '.join(names)}]" if names else ""


def _is_hidden(param: Any) -> bool:
    return bool(getattr(param, "hidden", False))


def _plain(lines: Iterable[str], width: int) -> str:
    """Join the lines. Below 80 columns long lines are broken; a shell still accepts a command that is
    broken this way.
    """
    shown = lines if width == WIDTH else [part for line in lines for part in _broken(line, width)]
    return "\n".join(shown) + "\n"


def _broken(line: str, width: int) -> list[str]:
    if len(line) <= width or "\n" in line:
        return [line]
    if not line.startswith("  specdec "):
        return textwrap.wrap(line, width, subsequent_indent="  ", break_on_hyphens=False)
    words = re.findall(r"(?:\"[^\"]*\"|'[^']*'|\S)+", line)
    parts = [f"  {words[0]}"]
    for word in words[1:]:
        if len(parts[-1]) + len(word) + 3 <= width:  # a space before, and a backslash behind
            parts[-1] += f" {word}"
        else:
            parts[-1] += " \\"
            parts.append(f"    {word}")
    return parts


def _row(names: str, text: str, column: int, width: int) -> str:
    first = f"  {names}".ljust(column)
    first = first if first.endswith(" ") else f"{first}  "
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=" " * column)


def _panel(param: Any) -> str:
    return _PANEL_OF.get(param.name, getattr(param, "rich_help_panel", None) or "")


def _place(param: Any) -> int:
    """Sort key: arguments and flags of `_PANEL_OF` come first, in its order."""
    return [*_PANEL_OF].index(param.name) if param.name in _PANEL_OF else len(_PANEL_OF)


def _usage(path: str, arguments: Iterable[Any]) -> str:
    return " ".join(["Usage:", path, *map(_argument, arguments), "[FLAGS]"])


def _argument(param: Any) -> str:
    name = param.metavar or param.name.upper()
    if name.startswith("["):
        return str(name)
    name += " ..." if param.nargs == -1 else ""
    return name if param.required else f"[{name}]"


def _names(param: Any) -> str:
    if param.param_type_name == "argument":
        return str(param.metavar or param.name.upper())
    value = "" if param.is_flag else f" {param.metavar or 'X'}"
    value = " NAME" if "|" in value else value
    return f"{', '.join(reversed(param.opts))}{value}"


def _brief(command: str, param: Any) -> str:
    known = _BRIEFS.get(f"{command} {param.name}") or _BRIEFS.get(param.name)
    return known or _first_clause(param.help or "")


def _first_clause(text: str) -> str:
    brief = re.split(r"[.;:] |\.$", text)[0].rstrip(".")
    return brief[:1].lower() + brief[1:] if brief[1:2].islower() else brief


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", " ".join(text.split()))[0]
