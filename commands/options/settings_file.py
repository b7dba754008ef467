"""Reads a file of settings: YAML whose keys are flags' names, alone or in groups as `--help-all` has them.

    model: ./Llama-3.2-1B
    sampling:
      temperature: 0.7
    speculative_config: {method: ngram, num_speculative_tokens: 5}
    serve:
      port: 8001

A key may be written as any spelling of the flag. Keys in a command's section hold for that command alone, before the
others. A value is read like text on the command line: `no` stays the word "no", and `1e-3` is a number.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from commands.options.foreign import ANSWERS, WITHOUT_EFFECT, Flags, without_foreign
from commands.options.parameters import options_of
from commands.options.spellings import OF_TEXT, normalize_name
from commands.output.help import PANELS
from runtime.drafters.speculative_config import flags_of_config
from runtime.util.errors import SpecDecError, UsageError
from runtime.util.reading import read_utf8
from runtime.util.words import nearest

_CONFIG = "speculative-config"
_HINT = "write `max_seq_len: 8192`, a setting a line"
_OF_YAML = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class Setting:
    """Value of a flag in the form of the command line (a list for a repeatable flag), and its line in the file."""

    value: Any
    place: str
    key: str
    """Name of the flag as the file spells it."""


def read_settings(path: Path, command: Any, commands: Mapping[str, Any]) -> dict[str, Setting]:
    """The settings of a file for a command, by the Python names of its flags. UsageError, with the line, for text that
    is not YAML, a key that no command has, or a key that stands there twice.
    """
    if path.is_dir():
        raise UsageError(f"a file of settings is a directory: {path}", hint="name the file in it")
    if not path.is_file():
        raise UsageError(f"there is no file of settings: {path}", hint="check the path given to `--config`")
    try:
        text = read_utf8(path) if path.read_bytes().strip() else ""
    except SpecDecError as error:
        raise UsageError(error.message, hint=error.hint) from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        return {} if root is None else _Reader(path, command, commands, text.splitlines()).read(root)
    except RecursionError:
        raise UsageError(f"values are nested too deeply, or hold themselves: {path}", hint=_HINT) from None
    except yaml.YAMLError as error:
        _check_is_no_toml(path, text.splitlines())
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        what = getattr(error, "problem", None) or str(error)
        raise UsageError(f"this is not YAML, {what}: {path}{line}", hint=_HINT) from None


def _check_is_no_toml(path: Path, lines: Sequence[str], first: int = 0) -> None:
    """UsageError for the first line, from the line `first`, that is TOML or lacks the blank behind its colon."""
    for number, line in enumerate(lines[first:], first + 1):
        table, setting = _TABLE.fullmatch(line), _NO_COLON.fullmatch(line)
        if table or setting:
            right = f"{table[1]}:" if table else f"{setting[1]}: {setting[2]}" if setting else ""
            raise UsageError(
                f"settings are YAML, and `{line.strip()}` is not: {path}, line {number}", hint=f"write `{right}`"
            )


_TABLE = re.compile(r"\s*\[([\w-]+)\]\s*(?:#.*)?")
_NO_COLON = re.compile(r"\s*([A-Za-z][\w-]*)(?:\s*=\s*|:(?=\S))(\S.*)")


def _slug(name: str) -> str:
    """Title of a group as a key: `kv_cache` for `KV cache`."""
    return re.sub(r"\W*\(.*|\W+", "_", name).strip("_").lower()


_GROUPS = frozenset(_slug(panel) for panel in ("Model", *PANELS))


@dataclass
class _Reader:
    path: Path
    command: Any
    commands: Mapping[str, Any]
    lines: Sequence[str]
    own: dict[str, Setting] = field(default_factory=dict)
    """Settings in the command's own section."""
    merged: set[int] = field(default_factory=set)
    """Identities of the mappings that other mappings merge by `<<: *base`."""

    def read(self, root: yaml.Node) -> dict[str, Setting]:
        if not isinstance(root, yaml.MappingNode):
            _check_is_no_toml(self.path, self.lines)
            raise UsageError(f"these are no settings: {self.place(root)}", hint=_HINT)
        self.merged = {id(one) for mapping in _mappings_in(root) for one in self._taken_in(mapping)}
        return self._settings(root, self.command, is_own=False) | self.own

    def _has_meaning(self, name: str, command: Any) -> bool:
        return _slug(name) in _GROUPS or self._command_named(name) is not None or self._is_flag(name, command)

    def _taken_in(self, mapping: yaml.MappingNode) -> Iterator[yaml.MappingNode]:
        """The mappings that stand behind `<<`; where several have a key, the first one's value holds. UsageError for a
        value that is no mapping.
        """
        for key, value in mapping.value:
            if key.tag != f"{_OF_YAML}merge":
                continue
            for one in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if not isinstance(one, yaml.MappingNode):
                    raise UsageError(f"`<<` merges a value that is no mapping: {self.place(key)}", hint="`<<: *base`")
                yield one

    def place(self, node: yaml.Node) -> str:
        return f"{self.path}, line {node.start_mark.line + 1}"

    def _settings(self, mapping: yaml.MappingNode, command: Any, *, is_own: bool) -> dict[str, Setting]:
        """Settings in a mapping: at the top of the file, in a group or, if `is_own`, in the command's own section,
        where flags of other commands are not allowed.
        """
        found: dict[str, Setting] = {}
        for key, value in self._pairs(mapping):
            name = str(key.value)
            if id(value) in self.merged and not self._has_meaning(name, command):
                continue  # `base: &base {…}`, which is read where `<<: *base` stands
            is_section = _slug(name) in _GROUPS or self._command_named(name) is not None
            if is_section and _is_null(value):
                continue
            if isinstance(value, yaml.MappingNode) and _slug(name) in _GROUPS:
                found |= self._settings(value, command, is_own=is_own)
            elif isinstance(value, yaml.MappingNode) and (other := self._command_named(name)) is not None:
                settings = self._settings(value, other, is_own=True)
                if other is self.command:
                    self.own |= settings
            elif isinstance(value, yaml.MappingNode) and self._normalized(name, command) == _CONFIG:
                found |= self._speculative_config(value, command)
            elif is_section and name != "config" and not self._is_flag_of_any(name):
                _check_is_no_toml(self.path, self.lines, value.start_mark.line)
                raise UsageError(
                    f"`{name}` is a section, which holds settings and no value: {self.place(key)}",
                    hint="put its settings under it",
                )
            else:
                stands_here = any(one is key for one, _ in mapping.value)  # and is not taken in from elsewhere
                new = self._flag(key, value, command, is_own=is_own and stands_here)
                if again := found.keys() & new.keys():
                    (first,) = (found[one] for one in again)
                    what = "is there" if first.key == name else f"and `{first.key}` are one setting, which is there"
                    raise UsageError(f"`{name}` {what} twice: {self.place(key)}", hint=f"also in {first.place}")
                found |= new
        return found

    def _command_named(self, name: str) -> Any:
        """The command that a section of this name belongs to; None for another name."""
        return self.commands.get(_slug(name)) or self.commands.get(_slug(name).replace("_", " "))

    def _is_flag(self, name: str, command: Any) -> bool:
        return self._normalized(name, command) in options_of(command)

    def _is_flag_of_any(self, name: str) -> bool:
        """True for `drafters`, which is a command and a flag of others."""
        return any(self._is_flag(name, command) for command in self.commands.values())

    def _pairs(self, mapping: yaml.MappingNode) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
        places: dict[str, str] = {}
        for key, value in mapping.value:
            if key.tag == f"{_OF_YAML}merge":
                continue
            if not isinstance(key, yaml.ScalarNode):
                raise UsageError(f"a key is no name: {self.place(key)}", hint=_HINT)
            if key.value in places:
                raise UsageError(
                    f"`{key.value}` is there twice: {self.place(key)}", hint=f"also in {places[key.value]}"
                )
            places[key.value] = self.place(key)
            yield key, value
        for other in self._taken_in(mapping):
            for key, value in self._pairs(other):
                if key.value not in places:  # what stands here itself holds, then the first that has it
                    places[key.value] = self.place(key)
                    yield key, value

    def _normalized(self, name: str, command: Any) -> str:
        return normalize_name(name, command.name.replace("-", "_") if command.name else "")

    def _flag(self, key: yaml.ScalarNode, node: yaml.Node, command: Any, *, is_own: bool) -> dict[str, Setting]:
        """`{name: setting}` for a flag of this command; `{}` for another command's flag, for null, or for a flag
        without effect.
        """
        options = options_of(command)
        name = self._normalized(key.value, command)
        if name in options and _is_null(node):
            return {}
        if name in options:
            value = _value(options[name], node)
            if value in ("", [""]) and name not in OF_TEXT:
                raise UsageError(f"`{key.value}` has an empty value: {self.place(key)}", hint="leave the line out")
            return {options[name].name: Setting(value, self.place(key), key.value)}
        if is_own or not self._is_of_another(key.value, name):
            self._check_foreign(key, name, node, command)
        return {}

    def _is_of_another(self, key: str, name: str) -> bool:
        """True if the key is a flag of another command. Its name may mean something else in this command."""
        others = [(other, options_of(other)) for other in self.commands.values()]
        if name in ANSWERS or name in WITHOUT_EFFECT:
            return any(key.replace("_", "-") in options for _, options in others)
        return any(self._normalized(key, other) in options for other, options in others)

    def _check_foreign(self, key: yaml.ScalarNode, name: str, node: yaml.Node, command: Any) -> None:
        """UsageError for a key that no command has, unless it is a flag of another program that has no effect here."""
        options = options_of(command)
        if name == "config":
            raise UsageError(f"a file of settings cannot name another: {self.place(key)}", hint="leave the line out")
        if (name in ANSWERS or name in WITHOUT_EFFECT) and (_is_null(node) or _plain(node) is False):
            return  # a setting that is off needs no answer
        flags = Flags(command.name or "", frozenset(options), frozenset(), frozenset())
        try:
            kept = without_foreign([f"--{name}={_text(node)}"], flags)
        except UsageError as error:
            raise UsageError(f"{error.message} ({self.place(key)})", hint=error.hint) from None
        if kept and self._is_of_another(key.value, name):
            raise UsageError(
                f"`specdec {command.name}` has no flag of this name: {key.value} ({self.place(key)})",
                hint="leave the line out, or put it at the beginning of the file, for the commands that have it",
            )
        if kept:
            others = (flag for one in self.commands.values() for flag in options_of(one))
            sections = [re.sub("[_ ]", "-", one) for one in (*_GROUPS, *self.commands)]
            near = nearest(name, [*options, *(sections if isinstance(node, yaml.MappingNode) else ())])
            near = near or nearest(name, others)
            hint = f"perhaps `{near.replace('-', '_')}`" if near else "`specdec COMMAND --help-all` lists the names"
            raise UsageError(f"no flag has this name: {key.value} ({self.place(key)})", hint=hint)

    def _speculative_config(self, mapping: yaml.MappingNode, command: Any) -> dict[str, Setting]:
        """Flags of the drafter that vLLM's or TensorRT-LLM's object describes."""
        places = {key.value: self.place(key) for key, _ in self._pairs(mapping)}
        try:
            flags = flags_of_config(_plain(mapping))
        except UsageError as error:
            found = [place for key, place in places.items() if f": {key}: " in error.message]
            raise UsageError(f"{error.message} ({[*found, self.place(mapping)][0]})", hint=error.hint) from None
        names = {param.name for param in command.params}
        place, key = self.place(mapping), "speculative_config"
        return {name: Setting(str(value), place, key) for name, value in flags.items() if name in names}


def _mappings_in(root: yaml.Node) -> list[yaml.MappingNode]:
    """The mappings at and below a node, each once."""
    found: dict[int, yaml.Node] = {}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if id(node) not in found and isinstance(node, yaml.MappingNode | yaml.SequenceNode):
            found[id(node)] = node
            waiting += [entry[1] if isinstance(entry, tuple) else entry for entry in node.value]
    return [node for node in found.values() if isinstance(node, yaml.MappingNode)]


def _is_null(node: yaml.Node) -> bool:
    return bool(node.tag == f"{_OF_YAML}null")


def _value(param: Any, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return json.dumps(_plain(node), default=str)
    if param.multiple:
        return [_text(item) for item in node.value] if isinstance(node, yaml.SequenceNode) else [_text(node)]
    return _text(node)


def _text(node: yaml.Node) -> str:
    """A value as it is written on the command line: a list has commas, as in `10,2,[0]`, and truth values in a list are
    True or False.
    """
    if isinstance(node, yaml.SequenceNode):
        return ",".join(_item(item) for item in node.value)
    return json.dumps(_plain(node), default=str) if isinstance(node, yaml.MappingNode) else str(node.value)


def _item(node: yaml.Node) -> str:
    if isinstance(node, yaml.SequenceNode):
        return f"[{_text(node)}]"
    return str(_plain(node)) if node.tag == f"{_OF_YAML}bool" else _text(node)


def _plain(node: yaml.Node) -> Any:
    """The node as Python values. SpecDecError for a tag that YAML itself does not define."""
    try:
        return yaml.SafeLoader("").construct_document(node)
    except yaml.YAMLError as error:
        raise SpecDecError(f"a value cannot be read: {error}", hint="write it plainly") from None
