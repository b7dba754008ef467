"""The group of options that only `chat` has."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from commands.options.panels import INPUT, OUTPUT
from commands.options.single import TokenizerDir


@dataclass(frozen=True)
class ChatOptions:
    """With what model, what it is told first, and what is shown."""

    engine_dir: Annotated[
        Path | None,
        typer.Option(help="Engine directory made by `build`.", rich_help_panel=INPUT, show_default="engine_outputs"),
    ] = None
    system: Annotated[
        str | None, typer.Option(help="What the model is told first.", rich_help_panel=INPUT, show_default=False)
    ] = None
    tokenizer_dir: TokenizerDir = None
    show_tokens: Annotated[
        bool,
        typer.Option(
            "--show-tokens", help="Mark accepted, recovered and bonus tokens in the answers.", rich_help_panel=OUTPUT
        ),
    ] = False

    @property
    def engine(self) -> Path:
        """The engine's directory, the usual one where none is named."""
        return self.engine_dir or Path("engine_outputs")
