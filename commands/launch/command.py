"""`specdec launch`: its flags, and the checks that need no torch."""

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from commands.launch.tools import KEY_VARIABLE, TOOLS, Tool
from commands.options.expand import expand_groups, groups_of
from commands.options.model_word import named_by
from commands.options.parameters import commands_of
from commands.options.settings import settings_of
from commands.output.help import INPUT, OUTPUT, SERVER, option
from runtime.util.errors import SpecDecError, UsageError
from runtime.util.words import word_among

ARGUMENTS_OF_TOOL = "specdec.arguments_of_tool"
"""Entry of the context's `meta`: the arguments after `--`."""


@dataclass(frozen=True)
class LaunchOptions:
    """Address, settings and key of the server, and flags that print or restore something and run no agent."""

    host: Annotated[str, option(SERVER, "Address of the server.")] = "127.0.0.1"
    port: Annotated[
        int,
        option(SERVER, "Port of the server: it is taken if one listens there, else started.", min=0, max=65535),
    ] = 8000
    config: Annotated[
        Path | None,
        option(
            INPUT,
            "Settings of the server, and of this command: flags in a YAML file.",
            shown="~/.config/specdec/config.yaml",
            metavar="FILE.yaml",
            is_eager=True,
        ),
    ] = None
    api_key: Annotated[
        str | None,
        option(SERVER, "Key of the server.", shown="none is asked for", envvar=KEY_VARIABLE),
    ] = None
    print_only: Annotated[
        bool,
        option(OUTPUT, "Print the settings and the commands, and change and run nothing.", "--print"),
    ] = False
    restore: Annotated[
        bool,
        option(
            OUTPUT, "Put back the agent's config file, where a launch that was killed has left its own.", "--restore"
        ),
    ] = False

    @property
    def keys(self) -> list[str]:
        return [key.strip() for key in (self.api_key or "").split(",") if key.strip()]


@expand_groups
def launch(
    context: typer.Context,
    tool: Annotated[str, typer.Argument(metavar="TOOL", help=f"The agent: {', '.join(TOOLS)}.", show_default=False)],
    options: LaunchOptions,
    flags: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [FLAGS OF SERVE] [-- ARGUMENTS]",
            help="Model to serve, and flags of `serve`; nothing: the server that runs at the address. After `--` come "
            "arguments of the agent.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run a coding agent with a model of this machine.

    Takes the server at the address, or starts `specdec serve` with as much context as fits and drafts by AUTO, and ends
    it with the agent. The agent learns the server's address from variables or from its config file. Changes of the file
    are shown before, and undone after.
    """
    found = _tool_named(tool)
    if options.restore:
        _restore(found)
        return
    from commands.launch.work import Launch, run

    _, held = settings_of(context, "serve", commands_of(context)["serve"])
    given = [*(flags or []), *([] if options.config is None else ["--config", str(options.config)])]
    settings = {name.replace("_", "-"): _first(one.value) for name, one in held.items()}
    if "port" in settings and getattr(context.get_parameter_source("port"), "name", "") == "DEFAULT":
        options = replace(options, port=int(settings["port"]))  # of the file's section `serve`
    arguments = context.meta.get(ARGUMENTS_OF_TOOL, [])
    check = partial(_check_opening if options.print_only else _parsed, context)
    asked = Launch(options.host, options.port, options.keys, given, arguments, settings, check)
    code = run(found, asked, options.print_only)
    if code:
        raise typer.Exit(code)


def _parsed(context: typer.Context, arguments: list[str]) -> dict[str, Any]:
    """Values of the flags of `serve`. UsageError for flags that it does not have, values that they do not take, or two
    models.
    """
    command: Any = commands_of(context)["serve"]
    params: dict[str, Any] = command.make_context("serve", list(arguments), parent=context.find_root()).params
    if params["model"] is not None:
        named_by(params["model"], params["model_dir"], params["engine_dir"])
    return params


def _check_opening(context: typer.Context, arguments: list[str]) -> None:
    """All errors of `serve` that show without torch, such as those for a model that cannot be opened: `--print` starts
    no server that would tell.
    """
    from commands.serve.command import choose, serve

    choose(**groups_of(serve, _parsed(context, arguments)))


def _first(value: Any) -> str:
    """A setting as text; of a repeatable flag, such as `served_model_name`, the first value."""
    return str(value[0] if isinstance(value, list | tuple) and value else value)


def _tool_named(name: str) -> Tool:
    if (known := word_among(name, TOOLS)) is None:
        *names, last = TOOLS
        raise UsageError(f"no agent of this name is known: {name}", hint=f"{', '.join(names)} and {last} are")
    return TOOLS[known]


def _restore(tool: Tool) -> None:
    from commands.launch.files import restore
    from commands.output.output import stderr

    if tool.file is None:
        raise SpecDecError(
            f"{tool.title} gets its settings from variables alone: there is no file to put back",
            hint=f"`specdec launch {tool.name}` runs it",
        )
    path = str(tool.file.path()).replace(os.path.expanduser("~"), "~", 1)
    done = f"put back: {path}" if restore(tool.file) else f"nothing was put aside, and nothing is changed: {path}"
    stderr().print(done, soft_wrap=True)
