"""Flags of `specdec predict`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from commands.options.shared import TokenizerDir
from commands.output.help import INPUT, RUNTIME, option


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Recorded outputs, and the other machine's costs."""

    traces: Annotated[
        Path, option(INPUT, "Prompts with outputs, as written by `--output-traces`.", "--traces", metavar="FILE.jsonl")
    ]
    costs: Annotated[
        Path,
        option(
            INPUT,
            "Step costs of the other machine: the `config.json` of an engine that was built there.",
            "--costs",
            metavar="FILE.json",
        ),
    ]
    tokenizer_dir: TokenizerDir = None
    batch_size: Annotated[int, option(RUNTIME, "Requests answered together.", min=1)] = 1
    max_draft_len: Annotated[int, option(RUNTIME, "Longest draft to try.", min=1, max=64)] = 10
