"""`specdec predict`, its flags: would speculation pay on another machine?"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from commands.options.expand import expand_groups
from commands.options.shared import TokenizerDir
from commands.output.help import INPUT, RUNTIME, option
from commands.output.output import Output, check_readable


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


@expand_groups
def predict(options: PredictOptions, output: Output) -> None:
    """Predict the speed of drafters on another machine, from recorded outputs and that machine's step costs.

    Needs neither the machine nor the model. Outputs are replayed through lookups of every kind, and each step is given
    the time that it would take there. Drafts of a model or a head cannot be replayed.
    """
    check_readable([options.traces, *([] if options.costs.is_dir() else [options.costs])])

    from commands.predict.report import predict_speeds

    predict_speeds(options, output)
