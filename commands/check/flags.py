"""Flags of `specdec check`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from commands.options.engine_choice import TargetOptions
from commands.options.model_word import model_among
from commands.options.settings import is_setting
from commands.options.shared import Report
from commands.output.help import INPUT, option
from commands.output.output import check_output_files, check_readable, check_report
from runtime.proof.records import Rule
from runtime.util.errors import SpecDecError, UsageError
from runtime.util.reading import has_lines


@dataclass(frozen=True)
class CheckOptions:
    """Receipts to check, and how strictly."""

    receipts: Annotated[
        list[Path],
        typer.Argument(
            metavar="RECEIPTS",
            help="Files that `--receipts` wrote, a batch's results, or a server's answers with receipts; and perhaps "
            "the model or engine to check them against, as `run` has it.",
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

    def without_model(self, target: TargetOptions) -> "tuple[CheckOptions, TargetOptions]":
        """Receipts, and the target that may be named among their paths. UsageError for a model without receipts."""
        given = {"model_dir": target.model_dir, "engine_dir": target.engine_dir}
        has_flag = any(value is not None and not is_setting(name) for name, value in given.items())
        model, files = model_among(list(map(str, self.receipts)), has_flag=has_flag)
        if not files:
            raise UsageError(
                f"no receipts are given: {model}",
                hint=f"`specdec check receipts.jsonl {model}`; `specdec run {model} --receipts receipts.jsonl` writes "
                "receipts",
            )
        return replace(self, receipts=[Path(file) for file in files]), target.named(model)

    def check(self) -> None:
        """SpecDecError for files that cannot be read or written."""
        check_report(self.report)
        inputs = [*self.receipts, *([] if self.answers is None else [self.answers])]
        check_readable(inputs)
        for path in self.receipts:
            if not has_lines(path):
                raise SpecDecError(
                    f"this is no file of receipts, but of other data: {path}",
                    hint="`specdec run --receipts FILE` writes one",
                )
        check_output_files([] if self.report is None else [self.report], inputs)
