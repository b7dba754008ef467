"""Flags of `specdec fingerprint`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from commands.options.model_word import ModelWord
from commands.output.help import INPUT, option


@dataclass(frozen=True)
class FingerprintOptions:
    """The engine, and a fingerprint to compare it with."""

    model: ModelWord = None
    expect: Annotated[
        Path | None,
        option(
            INPUT,
            "Another engine's fingerprint, as `fingerprint --json` printed it; exit 1 if the bits differ.",
            metavar="FILE.json",
        ),
    ] = None
