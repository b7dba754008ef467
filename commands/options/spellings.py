"""Spellings of flags: hyphens or underscores, other programs' names, and our earlier names."""

import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from functools import cache
from types import MappingProxyType

from runtime.builder.engine_options import FLAG_ALIASES

# Another program's name, or our earlier name -> our name, after underscores have become hyphens.
_ALIASES = {
    **FLAG_ALIASES,
    "test-trt-llm": "test-engine",
    "prompt-lookup-config": "ngram-config",
    "tensorrt-llm-rouge1-threshold": "rouge1-threshold",
    "draft-len": "draft-len-mode",
    "spec-decode-nextn": "spec-decode-max-draft-len",
    "eagle-model-dir": "draft-model-dir",
    "prompt": "input-text",
    "max-tokens": "max-output-len",
    "max-new-tokens": "max-output-len",
    "truncate-prompt-tokens": "max-input-length",
    "num-draft-tokens": "spec-decode-max-draft-len",
    "draft-model": "draft-model-dir",
    "model": "model-dir",
    "awq-block-size": "group-size",
    "kv-cache-fraction": "kv-cache-free-gpu-memory-fraction",
    "model-path": "model-dir",
    "hf-repo": "model-dir",
    "n-predict": "max-output-len",
    "predict": "max-output-len",
    "max-num-batched-tokens": "max-num-tokens",
    "tokenizer": "tokenizer-dir",
    "tokenizer-path": "tokenizer-dir",
    "seed": "random-seed",
    "temp": "temperature",
    "repeat-penalty": "repetition-penalty",
    "stop": "stop-words",
    "reverse-prompt": "stop-words",
    "system-prompt": "system",
    "alias": "served-model-name",
    "grammar-file": "grammar",
    "model-draft": "draft-model-dir",
    "speculative-model": "draft-model-dir",
    "num-speculative-tokens": "spec-decode-max-draft-len",
    "draft-max": "spec-decode-max-draft-len",
    "reasoning-budget": "thinking-token-budget",
    "thinking-budget": "thinking-token-budget",
    "speculative-algorithm": "spec-decode-algo",
    "enable-prefix-caching": "kv-cache-enable-block-reuse",
    "no-enable-prefix-caching": "no-kv-cache-enable-block-reuse",
    "slot-save-path": "kv-cache-dir",
}

# Flags whose value may be an empty text, or that say themselves what is wrong with one.
OF_TEXT = frozenset({"input-text", "stop-words", "bad-words", "system"})

# Flags that a command calls by another name than the other commands.
_OF_COMMAND = {
    "summarize": {"max-output-len": "output-len"},
    "convert": {"tensor-parallel-size": "tp-size"},
}

# Flags of a command whose name is an alias in other commands: `--parallel` is llama.cpp's for `--max-batch-size`.
_NOT_RENAMED = {"train": ("parallel",)}


def normalize_name(name: str, command: str = "") -> str:
    """Our spelling of an option: hyphens, and our name if the word is another program's name for it."""
    name = name.replace("_", "-")
    if name not in _NOT_RENAMED.get(command, ()):
        of_switch = name.removeprefix("no-")
        name = _ALIASES.get(name, f"no-{_ALIASES[of_switch]}" if name != of_switch and of_switch in _ALIASES else name)
    return _OF_COMMAND.get(command, {"output-len": "max-output-len"}).get(name, name)


def spellings_of(name: str, command: str) -> list[str]:
    """Other names of a command's flag: `max-model-len`, `ctx-size` and so on for `max-seq-len`."""
    return [other for other in _spellings(command).get(name, ()) if other != name]


@cache
def _spellings(command: str) -> dict[str, list[str]]:
    """Names of a command's flags -> all names that stand for each."""
    found: dict[str, list[str]] = {}
    for other in {**_ALIASES, **_OF_COMMAND.get(command, {})}:
        if not is_of_one_command(other):
            found.setdefault(normalize_name(other, command), []).append(other)
    return found


def is_of_one_command(name: str) -> bool:
    """True for a flag that a single command has, and whose name is another spelling of a different flag in other
    commands.
    """
    return any(name in names for names in _NOT_RENAMED.values())


# Flags of a command that may stand without a value, and the value that they have then.
_USUAL_VALUES = {"chat": {"continue": "last"}}


def with_usual_values(arguments: list[str], command: str) -> list[str]:
    """The arguments with the usual value added: `--continue` without a name behind it becomes `--continue last`."""
    usual, filled = _USUAL_VALUES.get(command, {}), list[str]()
    for i, argument in enumerate(arguments):
        filled.append(argument)
        name = normalize_name(argument.removeprefix("--"), command) if argument.startswith("--") else ""
        if name in usual and (i + 1 == len(arguments) or arguments[i + 1].startswith("-")):
            filled.append(usual[name])
    return filled


def read_arguments(
    arguments: list[str], options_with_value: frozenset[str], command: str
) -> Iterator[tuple[str, str, str | None]]:
    """(word as it is written, our name of the flag, its value) for each argument before `--`, such as
    (`--max_model_len`, `max-seq-len`, `4096`). The value is None for a switch; a word that is no flag has the name "".
    """
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            return
        flag, equals, value = argument.partition("=")
        name = normalize_name(flag.removeprefix("--"), command) if flag.startswith("-") else ""
        if name in options_with_value:
            yield flag, name, value if equals else next(rest, None)
        else:
            yield argument, name, None


TYPED: ContextVar[Mapping[str, str]] = ContextVar("typed", default=MappingProxyType({}))
"""Our names of the flags that were typed in another spelling -> the spelling: `max-seq-len` and `--max-model-len`."""


def as_typed(text: str) -> str:
    """A message in which flags have the spelling that was typed: `--max-model-len` for `--max-seq-len`. A setting that
    is named without hyphens has the typed flag behind it: max_seq_len (`--max-model-len`).
    """
    for name, typed in TYPED.get().items():
        text = re.sub(rf"(?<![\w-])--{name}(?![\w-])", typed, text)
        text = re.sub(rf"(?<![\w`-]){name.replace('-', '_')}(?![\w`-])", rf"\g<0> (`{typed}`)", text, count=1)
    return text


def empty_value(arguments: list[str], options_with_value: frozenset[str], command: str) -> str | None:
    """The first flag whose value is empty, or "" for an empty argument. An empty path would mean the current directory.
    Arguments of `run` are exempt, since they are texts.
    """
    for word, name, value in read_arguments(arguments, options_with_value, command):
        if not word and command != "run":
            return ""
        if value == "" and name not in OF_TEXT:
            return word
    return None
