"""The groups of options that only `doctor` has."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from commands.options.engine import EngineDir
from commands.options.leader import Loop, ModelOptions
from commands.options.panels import INPUT, RUNTIME
from commands.options.single import TokenizerDir


@dataclass(frozen=True)
class DoctorInputs:
    """The engine, and what it is asked."""

    engine_dir: EngineDir = None
    model: ModelOptions = field(default_factory=ModelOptions)
    input_text: Annotated[
        list[str] | None,
        typer.Option(
            help="Prompt; repeatable. Those that are asked in earnest tell most.",
            rich_help_panel=INPUT,
            show_default="4 shipped articles, cut to what fits",
        ),
    ] = None
    input_file: Annotated[
        Path | None,
        typer.Option(help="Prompts in a file, as `run` takes it.", rich_help_panel=INPUT, show_default=False),
    ] = None
    tokenizer_dir: TokenizerDir = None


@dataclass(frozen=True)
class DoctorOptions:
    """How the prompts are answered."""

    max_output_len: Annotated[
        int, typer.Option(min=1, help="Tokens to generate from a prompt.", rich_help_panel=RUNTIME)
    ] = 64
    mode: Annotated[
        Loop,
        typer.Option(
            metavar="NAME", help="The loop: orchestrator (V1) or leader (V2), as for `run`.", rich_help_panel=RUNTIME
        ),
    ] = "orchestrator"
