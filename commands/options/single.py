"""Flags that several groups have as a field of their own, because each stands at another place of `--help`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from commands.options.panels import INPUT, OUTPUT, RUNTIME

TokenizerDir = Annotated[
    Path | None,
    typer.Option(
        help="Tokenizer to use instead of the engine's own: a directory or GGUF file.",
        rich_help_panel=INPUT,
        show_default="engine's",
    ),
]
EndId = Annotated[
    int | None,
    typer.Option(min=0, help="Token id that ends an output.", rich_help_panel=RUNTIME, show_default="the model's own"),
]
MaxNumTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokens of prompts computed at a time, so that a long one does not stall the others.",
        rich_help_panel=RUNTIME,
        show_default="512",
    ),
]
OutputTraces = Annotated[
    Path | None,
    typer.Option(
        help="Write prompt and output ids as JSON lines, which `corpus create` reads.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
CheckLossless = Annotated[
    bool,
    typer.Option(
        "--check-lossless",
        help="Compare with the same engine without a drafter; exit 1 if speculation changed the output.",
        rich_help_panel=OUTPUT,
    ),
]
Stats = Annotated[
    Literal["summary", "detailed", "none"],
    typer.Option(
        help="`summary` is the tables; `detailed` adds acceptance by draft length and position and tokens per step "
        "over time, and to `--json` the counts of each step; `none` leaves outputs and checks only.",
        rich_help_panel=OUTPUT,
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.html",
        help="Write a page with charts, tables, settings and marked outputs; it needs no other file.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Replace the output directory if specdec wrote it.", rich_help_panel=OUTPUT)
]


def end_id_params(end_id: int | None) -> dict[str, Any]:
    """What `--end-id` means to `SamplingParams`: this id alone ends an output, or the model's own do."""
    return {} if end_id is None else {"stop_token_ids": [end_id], "ignore_eos": True}
