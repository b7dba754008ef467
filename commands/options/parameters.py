"""Parameters of commands as Typer has them: all flags, and their variables."""

from collections.abc import Iterator
from typing import Any

PREFIX = "SPECDEC"
NOT_IN_FILES = frozenset({"config", "help", "help_all"})
"""Flags, by their Python names, that no file can set."""
SECRET = "api_key"
"""Flag whose value is not shown."""


def commands_of(context: Any) -> dict[str, Any]:
    """All commands by their names, such as `run` and `cache list`."""
    return dict(commands_in(context.find_root().command))


def commands_in(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in getattr(group, "commands", {}).items():
        if hasattr(command, "commands"):
            yield from commands_in(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def options_of(command: Any) -> dict[str, Any]:
    """Flags of a command by their names without hyphens in front, and by their Python names with hyphens."""
    flags = [param for param in command.params if param.param_type_name == "option" and param.name not in NOT_IN_FILES]
    by_python_name = {flag.name.replace("_", "-"): flag for flag in flags}
    return by_python_name | {
        name.removeprefix("--"): flag for flag in flags for name in flag.opts if name.startswith("--")
    }


def variables_of(param: Any) -> list[str]:
    """Variables of a flag; the first that is set holds."""
    own = [param.envvar] if isinstance(param.envvar, str) else [*(param.envvar or ())]
    is_flag = param.param_type_name == "option" and param.allow_from_autoenv
    return list(dict.fromkeys([*own, *([f"{PREFIX}_{param.name.upper()}"] if is_flag else [])]))
