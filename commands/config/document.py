"""Output of `config show`: the values of flags, and where they come from."""

import os
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field
from rich.table import Table

from commands.options.expand import filled
from commands.options.leader_flags import LeaderOptions, check_has_drafter
from commands.options.parameters import NOT_IN_FILES, SECRET, commands_of
from commands.options.settings import ORIGINS, VARIABLES, Held, home_file, settings_of, told_origin
from commands.options.speculation_flags import SpeculationOptions
from commands.options.spellings import normalize_name
from commands.output.documents.records import Head, Record, document_head
from commands.output.output import Output, warn
from runtime.util.errors import UsageError
from runtime.util.words import nearest, word_among


class SettingRecord(Record):
    """The value of a flag or a variable, and its origin."""

    name: str = Field(description="a flag such as `--max-seq-len`, or a variable such as `SPECDEC_CACHE_DIR`")
    value: str
    origin: str = Field(description="such as `the variable SPECDEC_PORT`, `prod.yaml, line 3`, or `default`")


class ConfigShowDocument(Head):
    """Document of `specdec config show --json`."""

    command: Literal["config show"]
    home_file: str = Field(description="the file of settings for all commands, which need not be there")
    settings: list[SettingRecord] = Field(description="with a command all of its flags, else those that have a value")


def settings_of_one(context: Any, name: str) -> list[SettingRecord]:
    """All flags of a command, with their values or defaults. UsageError if there is no such command."""
    commands = commands_of(context)
    known = word_among(name, commands)
    if known is None:
        near = nearest(name, commands)
        hint = f"perhaps `{near}`" if near else "`specdec --help` lists the commands"
        raise UsageError(f"there is no command of this name: {name}", hint=hint)
    shown, held = settings_of(context, known, commands[known])
    if "spec_decode_algo" in shown.params:
        _tell_lack_of_drafter(known, shown.params, held)
    return [*_records(commands[known], shown, held, with_defaults=True), *_variables()]


def _tell_lack_of_drafter(command: str, values: Mapping[str, Any], held: Mapping[str, Held]) -> None:
    """Warn of settings for a drafter, such as a draft length, if no setting chooses a drafter: the command with no
    other flags would refuse them.
    """
    token = ORIGINS.set(held)
    try:
        check_has_drafter(filled(SpeculationOptions, values), filled(LeaderOptions, values))
    except UsageError as error:
        warn(f"`specdec {command}` by these settings alone: {told_origin(error.message)}; {error.hint}")
    finally:
        ORIGINS.reset(token)


def settings_of_all(context: Any) -> list[SettingRecord]:
    """Settings that variables and files hold for any command."""
    found: dict[tuple[str, str, str], SettingRecord] = {}
    for name, command in commands_of(context).items():
        for one in _records(command, *settings_of(context, name, command), with_defaults=False):
            flag = normalize_name(one.name.removeprefix("--"))  # one row, also of `summarize --output-len`
            key = (flag, one.value, one.origin)
            if key not in found or one.name == f"--{flag}":
                found[key] = one
    return [*found.values(), *_variables()]


def _records(command: Any, context: Any, held: Mapping[str, Held], *, with_defaults: bool) -> list[SettingRecord]:
    options = [one for one in command.params if one.param_type_name == "option" and one.name not in NOT_IN_FILES]
    return [
        _record(param, context.params[param.name], held.get(param.name))
        for param in options
        if param.name in held or with_defaults
    ]


def _record(param: Any, value: Any, held: Held | None) -> SettingRecord:
    """A flag with its value; a default is written as in `--help-all`."""
    if held is None:
        shown = param.show_default if isinstance(param.show_default, str) else _shown(value)
    else:
        shown = "(set)" if param.name == SECRET else _shown(value)
    return SettingRecord(name=param.opts[0], value=shown, origin="default" if held is None else held.origin.text)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or value == [] or value == ():
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _variables() -> list[SettingRecord]:
    """Variables of specdec that set no flag."""
    given = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    return [SettingRecord(name=name, value=value, origin="the variable itself") for name, value in given.items()]


def config_document(settings: list[SettingRecord]) -> dict[str, Any]:
    head = document_head("config show")
    return ConfigShowDocument(**head, home_file=str(home_file()), settings=settings).as_json()


def show_settings(settings: list[SettingRecord], output: Output) -> None:
    if settings:
        table = Table("name", "value", "from")
        for one in settings:
            table.add_row(one.name, one.value, one.origin)
        output.result(table)
    is_there = "" if home_file().is_file() else ", which is not there"
    output.result(
        f"Settings for all commands: {home_file()}{is_there}; any flag is a variable too: SPECDEC_MAX_SEQ_LEN"
    )
