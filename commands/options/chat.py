"""The group of options that only `chat` has."""

from dataclasses import dataclass
from typing import Annotated

import typer

from commands.options.panels import INPUT, OUTPUT


@dataclass(frozen=True)
class ChatOptions:
    """What the model is told first, and what is shown."""

    system: Annotated[
        str | None, typer.Option(help="What the model is told first.", rich_help_panel=INPUT, show_default=False)
    ] = None
    show_tokens: Annotated[
        bool,
        typer.Option(
            "--show-tokens", help="Mark accepted, recovered and bonus tokens in the answers.", rich_help_panel=OUTPUT
        ),
    ] = False
