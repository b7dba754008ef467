"""`specdec config show`, its flags."""

from dataclasses import dataclass
from typing import Annotated

import typer

from commands.options.expand import expand_groups
from commands.output.output import Output


@dataclass(frozen=True)
class ShowOptions:
    """The command whose settings are shown."""

    command: Annotated[
        str | None,
        typer.Argument(
            metavar="COMMAND",
            help="Command, such as `run`: all its flags, with their values and defaults.",
            show_default=False,
        ),
    ] = None


@expand_groups
def show(context: typer.Context, options: ShowOptions, output: Output) -> None:
    """Show the settings that variables and files hold, and where each comes from.

    With a COMMAND also the defaults of its other flags. A value holds from the first of: flag, variable, file of
    `--config`, `~/.config/specdec/config.yaml`.
    """
    from commands.config.document import config_document, settings_of_all, settings_of_one, show_settings

    found = settings_of_all(context) if options.command is None else settings_of_one(context, options.command)
    show_settings(found, output)
    output.document(config_document(found))
