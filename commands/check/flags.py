"""Flags of `specdec check`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from commands.options.shared import Report
from commands.output.help import INPUT, option
from commands.output.output import Output, check_output_files, check_readable, check_report
from runtime.proof.records import Rule


@dataclass(frozen=True)
class CheckOptions:
    """Receipts to check, and how strictly."""

    receipts: Annotated[
        list[Path],
        typer.Argument(
            metavar="RECEIPTS",
            help="Files that `--receipts` wrote, a batch's results, or a server's answers with receipts.",
        ),
    ]
    answers: Annotated[
        Path | None, option(INPUT, "Traces with the token ids of receipts that have digests alone.", metavar="TRACES")
    ] = None
    rule: Annotated[
        Rule | None,
        option(
            INPUT,
            "Check by tokens, within rounding, or by likelihood.",
            shown="what each receipt and the engine allow",
            metavar="[tokens|rounding|likelihood]",
        ),
    ] = None
    allow_other_engine: Annotated[
        bool,
        option(
            INPUT,
            "Exit 0 for receipts of other weights or another precision whose answers are likely.",
            "--allow-other-engine",
        ),
    ] = False
    report: Report = None

    def check(self, output: Output) -> None:
        """SpecDecError for files that cannot be read or written."""
        check_report(self.report)
        inputs = [*self.receipts, *([] if self.answers is None else [self.answers])]
        check_readable(inputs)
        check_output_files([] if self.report is None else [self.report], inputs)
