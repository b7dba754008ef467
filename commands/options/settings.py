"""Settings: values of flags from variables and files, which hold for flags that the command line does not give.

The flag `--max-seq-len` is also the variable SPECDEC_MAX_SEQ_LEN, and the key `max_seq_len` of a YAML file: of the file
that `--config` names, or of `~/.config/specdec/config.yaml`. The order is: flag, variable, named file, home file. Typer
asks for the values (`Defaults` is a context's `default_map`), and converts and checks them as it does those of flags.
`commands.options.settings_file` reads the files.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from commands.options.drafter_flags import DrafterFlags, LeaderDrafterFlags
from commands.options.parameters import NOT_IN_FILES, PREFIX, commands_in, commands_of, variables_of
from commands.options.spellings import is_of_one_command, normalize_name, spellings_of
from commands.output.output import warn
from runtime.drafters.specs import DRAFTERS
from runtime.util.errors import UsageError
from runtime.util.words import nearest

VARIABLES = {
    "SPECDEC_CACHE_DIR": "directory of engines, kernels and digests; `~/.cache/specdec`",
    "SPECDEC_CACHE_SIZE": "most bytes that engines may take: 50G",
    "SPECDEC_DEBUG": "1 shows tracebacks, as `specdec --debug`",
}
"""Variables of specdec that set no flag, with their meaning."""
_OF_SCRIPTS = re.compile(r"SPECDEC_(TEST_\w+|WALK_DIR|REAL_DIR|REPLICAS|\w+_PYTHON)")
_OF_KUBERNETES = re.compile(r"SPECDEC_(SERVICE_\w+|PORT_\d+_\w+)")
"""Variables that Kubernetes sets for a service of the name `specdec`."""
_WORDS = frozenset({"true", "false", "auto", "none", "off"})
"""Values that do not show which flag they belong to, such as `true`."""
_MODELS = frozenset({"model_dir", "engine_dir"})
_LISTS = frozenset(spec.description.flag for spec in DRAFTERS.values())
_CHOOSERS = frozenset({"spec_decode_algo", "speculative_config", "profile", "drafters"}) | _LISTS
_GROUPS: tuple[Any, ...] = (DrafterFlags, LeaderDrafterFlags)
_OF_DRAFTERS = frozenset(field.name for group in _GROUPS for field in fields(group))
_DRAFTING = _CHOOSERS | _OF_DRAFTERS | {"draft_len_mode"}


@dataclass(frozen=True)
class Origin:
    """Place that a flag's value comes from: a variable, or a line of a file."""

    text: str
    """Such as `the variable SPECDEC_PORT`, or `prod.yaml, line 3`."""
    level: int
    """Rank of the origin: 1 for a variable, 2 for a file that is named, 3 for the home file. The lower rank holds."""

    @property
    def is_ambient(self) -> bool:
        """True for a variable or the home file, which hold for all commands and were not given for this
        command alone.
        """
        return self.level != _NAMED


_ON_LINE, _IN_VARIABLE, _NAMED, _AT_HOME = range(4)


@dataclass(frozen=True)
class Held:
    """Value that a variable or a file gives to a flag."""

    value: Any
    origin: Origin


ORIGINS: ContextVar[Mapping[str, Held] | None] = ContextVar("origins", default=None)
"""Origins of the flags of the current command whose values come from a variable or a file, by the flags' Python names.
"""


def is_setting(name: str) -> bool:
    """True if the flag's value comes from a variable or a file."""
    return name in (ORIGINS.get() or {})


def without_ambient(group: Any) -> Any:
    """A group of options without the values from variables and the home file, which hold for other commands too."""
    held = ORIGINS.get() or {}
    named = [field for field in fields(group) if field.name in held and held[field.name].origin.is_ambient]
    return replace(group, **{field.name: field.default for field in named}) if named else group


def told_origin(message: str) -> str:
    """The message of an error, and in parentheses behind it the origins of its values from variables and files."""
    held = ORIGINS.get() or {}
    about = [one for name, one in held.items() if _names(message, name)]
    about = about or [one for one in held.values() if _quotes(message, one.value)]
    places = dict.fromkeys(one.origin.text for one in about)
    return f"{message} ({' and '.join(places)})" if places else message


def _names(message: str, name: str) -> bool:
    names = [f"--{name.replace('_', '-')}", *([name] if "_" in name else [])]  # `system` is a word too
    return re.search(rf"(?<![\w-])({'|'.join(names)})(?![\w-])", message) is not None


def _quotes(message: str, value: Any) -> bool:
    is_telling = isinstance(value, str) and re.search(r"[a-z/]", value) is not None and value not in _WORDS
    return is_telling and re.search(rf"(?<![\w./-]){re.escape(value)}(?![\w/-])", message) is not None


def home_file() -> Path:
    """Path of the user's own file of settings, which may be missing."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")) / "specdec" / "config.yaml"


class Defaults(dict[str, Any]):
    """A context's `default_map`: values from files, and from variables in other spellings. They are read when Typer
    first asks for a flag that was not given.
    """

    def __init__(self, context: Any) -> None:
        super().__init__()
        self.context = context
        self._held: dict[str, Held] | None = None

    @property
    def held(self) -> dict[str, Held]:
        """Settings from files, and from variables in other spellings, by the flags' Python names. Raises the errors of
        `read_settings`.
        """
        if self._held is None:
            self._held = {}
            named = self.context.params.get("config")
            files = [(home_file(), _AT_HOME)] if home_file().exists() else []
            for path, level in [*files, *([(Path(named), _NAMED)] if named is not None else [])]:
                from commands.options.settings_file import read_settings  # not where there is no file

                found = read_settings(path, self.context.command, commands_of(self.context))
                self._held |= {name: Held(one.value, Origin(one.place, level)) for name, one in found.items()}
            self._held |= dict(self._in_other_spellings())
        return self._held

    def _in_other_spellings(self) -> Iterator[tuple[str, Held]]:
        """Values of variables that are named by another spelling of a flag, such as SPECDEC_MAX_MODEL_LEN."""
        for param in self.context.command.params:
            for variable in _other_variables(param, self.context.info_name):
                if text := os.environ.get(variable):
                    value = text.split(param.envvar_list_splitter) if param.multiple else text
                    yield param.name, Held(value, Origin(f"the variable {variable}", _IN_VARIABLE))

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a flag; `default` if neither a file nor a variable in another spelling sets it."""
        held = None if name in NOT_IN_FILES else self.held.get(name)
        return default if held is None else held.value


def begin(context: Any) -> None:
    """Let variables and files supply the values that the command line does not give."""
    ORIGINS.set(None)
    context.default_map = Defaults(context)
    for param in context.command.params:
        param.envvar_list_splitter = "\n"  # a text for a repeatable flag may have spaces


def origin_of(context: Any, name: str) -> Held | None:
    """Origin of a flag's value; None if it is from the command line or the default."""
    source = _source(context, name)
    if source == "DEFAULT_MAP":
        return context.default_map.held[name]  # type: ignore[no-any-return]
    if source == "ENVIRONMENT":
        (param,) = (param for param in context.command.params if param.name == name)
        variable = next(one for one in variables_of(param) if os.environ.get(one))
        return Held(os.environ[variable], Origin(f"the variable {variable}", _IN_VARIABLE))
    return None


def trace(context: Any) -> None:
    """Keep the origins of the values that were read so far, for the message of an error about one of them."""
    read = [param.name for param in context.command.params if context.get_parameter_source(param.name) is not None]
    ORIGINS.set({name: one for name in read if (one := origin_of(context, name)) is not None})


def settle(context: Any) -> None:
    """Settle the values once all are known. Models and drafting are taken from the strongest place that sets them
    (flag, variable, named file, home file), and values of weaker places are dropped. Origins of values are kept for
    messages.
    """
    held = {name: one for name in context.params if (one := origin_of(context, name)) is not None}
    given = {name for name in context.params if _source(context, name) == "COMMANDLINE"}
    levels = dict.fromkeys(given, _ON_LINE) | {name: one.origin.level for name, one in held.items()}
    for name in [*_weaker(levels, _MODELS, _MODELS), *_weaker(levels, _CHOOSERS, _DRAFTING), *_weaker_profile(levels)]:
        _reset(context, name)
        held.pop(name, None)
    for name, one in held.items():
        if context.params[name] is False and f"no_{name}" in context.params:
            context.params[f"no_{name}"] = True  # `kv_cache_enable_block_reuse: false`
            held = held | {f"no_{name}": one}
    ORIGINS.set(held)
    _tell_unknown_variables(context)


def settings_of(parent: Any, name: str, command: Any) -> tuple[Any, Mapping[str, Held]]:
    """(context, settings) of a command as if it were called without flags. `settings` are the values that variables and
    the files of the context `parent` give it; the context holds the values of its flags, by their Python names.
    """
    own = ORIGINS.get()
    context = command.context_class(
        command, info_name=name.rpartition(" ")[2], parent=parent.find_root(), **command.context_settings
    )
    begin(context)
    context.params["config"] = parent.params.get("config")
    for param in command.params:
        if param.param_type_name == "option" and param.name not in NOT_IN_FILES:
            value, source = param.consume_value(context, {})
            if source.name == "DEFAULT":  # which may be missing
                context.params[param.name] = value
            else:
                _read(param, context)
    settle(context)
    held = ORIGINS.get() or {}
    ORIGINS.set(own)
    return context, held


def _read(param: Any, context: Any) -> None:
    try:
        param.handle_parse_result(context, {}, [])
    except UsageError:
        trace(context)
        raise


def _source(context: Any, name: str) -> str:
    return getattr(context.get_parameter_source(name), "name", "")


def _weaker(levels: Mapping[str, int], choosers: Collection[str], group: Collection[str]) -> list[str]:
    """The flags of the group whose values come from a weaker place than the strongest place that sets one of
    `choosers`.
    """
    strongest = min((level for name, level in levels.items() if name in choosers), default=_AT_HOME)
    return [name for name, level in levels.items() if name in group and level > strongest]


def _weaker_profile(levels: Mapping[str, int]) -> list[str]:
    """The profile, if a stronger place sets anything about drafting."""
    strongest = min((level for name, level in levels.items() if name in _DRAFTING), default=_AT_HOME)
    return ["profile"] if levels.get("profile", strongest) > strongest else []


def _reset(context: Any, name: str) -> None:
    (param,) = (param for param in context.command.params if param.name == name)
    context.params[name] = param.process_value(context, param.default)


def _tell_unknown_variables(context: Any) -> None:
    """Warn once of variables that match no flag of any command."""
    given = {name for name, value in os.environ.items() if name.startswith(f"{PREFIX}_") and value} - VARIABLES.keys()
    given = {name for name in given if not _OF_SCRIPTS.fullmatch(name) and not _OF_KUBERNETES.fullmatch(name)}
    _check_spelled_once(given)
    _tell(frozenset(given), context.find_root().command)


def _check_spelled_once(given: Collection[str]) -> None:
    """UsageError for variables that are two spellings of one flag: SPECDEC_MAX_MODEL_LEN and SPECDEC_MAX_SEQ_LEN."""
    spelled: dict[str, list[str]] = {}
    for name in sorted(given):
        spelled.setdefault(_flag_of(name), []).append(name)
    for flag, names in spelled.items():
        if len(names) > 1:
            other = next(name for name in names if name != _variable_of(flag))
            raise UsageError(f"two variables give one setting: {' and '.join(names)}", hint=f"unset {other}")


def _flag_of(variable: str) -> str:
    """The flag's name, in our spelling: `max-seq-len` for SPECDEC_MAX_MODEL_LEN."""
    name = variable.removeprefix(f"{PREFIX}_").lower().replace("_", "-")
    return name if is_of_one_command(name) else normalize_name(name)


def _other_variables(param: Any, command: str) -> list[str]:
    if param.param_type_name != "option" or not param.allow_from_autoenv:
        return []
    return [_variable_of(other) for other in spellings_of(param.name.replace("_", "-"), command)]


def _variable_of(flag: str) -> str:
    return f"{PREFIX}_{flag.replace('-', '_').upper()}"


@cache
def _tell(given: frozenset[str], group: Any) -> None:
    if not given:
        return
    known = {
        variable
        for name, command in commands_in(group)
        for param in command.params
        for variable in (*variables_of(param), *_other_variables(param, name))
    }
    known |= VARIABLES.keys()
    for name in sorted(given - known):
        near = nearest(_flag_of(name), map(_flag_of, known))
        hint = (
            f"perhaps {_variable_of(near)}" if near else "`specdec config show COMMAND` lists the flags that have one"
        )
        warn(f"no flag has the variable {name}: {hint}")
