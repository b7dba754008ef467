"""Groups of options: frozen dataclasses whose annotated fields are flags.

A command takes groups, Typer wants each flag as a parameter. `expand_groups` stands between them: Typer reads the
signature it makes, and the command gets its groups filled. A group may hold groups.

    @dataclass(frozen=True)
    class Cache:
        max_tokens: Annotated[int, typer.Option(help="Tokens in it.")] = 512

    @expand_groups
    def run(cache: Cache) -> None: ...  # `--max-tokens 8` calls run(Cache(max_tokens=8))
"""

import dataclasses
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from inspect import Parameter, Signature
from typing import Any, TypeVar, get_type_hints

from typer.models import OptionInfo

Group = TypeVar("Group")


@dataclasses.dataclass(frozen=True)
class Command:
    """A command and its flags, without the hyphens in front."""

    name: str
    flags: frozenset[str]


CURRENT_COMMAND: ContextVar[Command | None] = ContextVar("current_command", default=None)
"""The command that was called last: hints name its flags."""
MODEL_AT_HAND: ContextVar[str | None] = ContextVar("model_at_hand", default=None)
"""The model from which the command made its engine, if it did. Its user builds no engine, so hints name the model."""


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command as Typer wants it: a keyword parameter for each flag of its groups, and for each parameter that is
    no group. TypeError if two flags have one name.
    """
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    flags = [flag for parameter in parameters for flag in _flags_of(parameter)]
    twice = [name for name, count in Counter(flag.name for flag in flags).items() if count > 1]
    if twice:
        raise TypeError(f"options of {command.__name__} have the same name: {', '.join(twice)}")
    signature = Signature(flags, return_annotation=None)
    current = Command(command.__name__, frozenset(name for flag in flags for name in _spellings(flag)))

    def groups(given: Mapping[str, Any]) -> dict[str, Any]:
        CURRENT_COMMAND.set(current)
        MODEL_AT_HAND.set(None)
        return {parameter.name: _value_of(parameter, given) for parameter in parameters}

    @functools.wraps(command)
    def expanded(**given: Any) -> None:
        values = signature.bind(**given)
        values.apply_defaults()
        command(**groups(values.arguments))

    expanded.groups = groups  # type: ignore[attr-defined]
    expanded.__signature__ = signature  # type: ignore[attr-defined]
    expanded.__annotations__ = {flag.name: flag.annotation for flag in flags}
    return expanded


def filled(group: type[Group], values: Mapping[str, Any]) -> Group:
    """A group of options with these values of its flags, by their Python names."""
    made: Group = _value_of(Parameter("group", Parameter.KEYWORD_ONLY, annotation=group), values)
    return made


def groups_of(command: Callable[..., None], given: Mapping[str, Any]) -> dict[str, Any]:
    """The groups of a command of `expand_groups`, filled with the values of all its flags, for checks without running
    it. From now on it is the current command: hints name its flags.
    """
    found: dict[str, Any] = command.groups(given)  # type: ignore[attr-defined]
    return found


def given_flags(group: Any) -> dict[str, Any]:
    """Flags of a group, and of the groups in it, with their values; flags that are None or False are left out."""
    given: dict[str, Any] = {}
    for field in dataclasses.fields(group):
        value = getattr(group, field.name)
        if dataclasses.is_dataclass(value):
            given |= given_flags(value)
        elif value is not None and value is not False:
            given[f"--{field.name.replace('_', '-')}"] = value
    return given


def _spellings(flag: Parameter) -> list[str]:
    """Names of an option without hyphens, such as `seed`, but none of one letter; empty for an argument."""
    options = [one for one in getattr(flag.annotation, "__metadata__", ()) if isinstance(one, OptionInfo)]
    words = [word for option in options for word in (option.default, *(option.param_decls or ()))]
    given = [word.removeprefix("--") for word in words if isinstance(word, str) and word.startswith("--")]
    return given or [flag.name.replace("_", "-") for _ in options]


def _flags_of(parameter: Parameter) -> Iterable[Parameter]:
    """The parameters that Typer gets for this parameter: a parameter for each field of a group, or else the parameter
    itself.
    """
    if not _is_group(parameter.annotation):
        return [parameter.replace(kind=Parameter.KEYWORD_ONLY)]
    return [flag for field in _fields_of(parameter.annotation) for flag in _flags_of(field)]


def _value_of(parameter: Parameter, values: Mapping[str, Any]) -> Any:
    """Value of the parameter for the command: a filled group, or the value itself."""
    if not _is_group(parameter.annotation):
        return values[parameter.name]
    return parameter.annotation(**{f.name: _value_of(f, values) for f in _fields_of(parameter.annotation)})


def _fields_of(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(group)
    ]


def _is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)
