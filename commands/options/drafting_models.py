"""The flags of drafters that are models: a draft model, and the target's own rounded copy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from commands.options.panels import SPECULATION


@dataclass(frozen=True)
class ModelDrafterOptions:
    """Two models that draft; None where nothing was given."""

    draft_target_model_config: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Draft by a draft model: [draft_len, draft_device_list, target_device_list, use_logits], such as "
            "[4,[0],[0],False]. use_logits chooses rejection sampling over comparing tokens.",
            rich_help_panel=SPECULATION,
            show_default="no drafter",
        ),
    ] = None
    draft_engine_dir: Annotated[
        Path | None,
        typer.Option(help="Engine directory of the draft model.", rich_help_panel=SPECULATION, show_default=False),
    ] = None
    self_draft_config: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Draft by the target's own copy with rounded weights, which `build --self-draft` makes: [draft_len, "
            "device_list, use_logits], such as [8,[0]].",
            rich_help_panel=SPECULATION,
            show_default="no drafter",
        ),
    ] = None
