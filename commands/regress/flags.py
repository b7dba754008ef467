"""Flags of `specdec regress`."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from commands.options.model_word import ModelWord
from commands.options.shared import Report
from commands.output.help import INPUT, OUTPUT, option
from commands.output.output import check_output_files, check_readable, check_report
from runtime.util.errors import SpecDecError, UsageError
from runtime.util.reading import has_lines

_SHARE = re.compile(r"(\d+(?:\.\d+)?) ?(%?)")


def _share(text: str) -> float:
    """0.02 for `2%`. UsageError unless the text is a share, from 0 to 1 or from 0% to 100%."""
    found = _SHARE.fullmatch(text.strip())
    share = float(found[1]) / (100 if found[2] else 1) if found else -1.0
    if not 0 <= share <= 1:
        raise UsageError(f"`--max-diverged` is no share of the answers: {text}", hint="`2%` is one")
    return share


@dataclass(frozen=True, kw_only=True)
class RegressOptions:
    """File of the old answers, and what to report about the new engine's answers."""

    model: ModelWord = None
    traces: Annotated[
        Path,
        option(
            INPUT,
            "Old answers: traces, receipts, or a batch's results with token ids or receipts.",
            "--traces",
            metavar="FILE.jsonl",
        ),
    ]
    against: Annotated[
        Path | None, option(INPUT, "Old engine, for the divergence of probabilities (KL).", metavar="ENGINE_DIR")
    ] = None
    until_change: Annotated[
        bool,
        option(
            INPUT,
            "Compare each answer up to its first change alone: the same answers change, found in less time, and no "
            "agreement is told.",
            "--until-change",
        ),
    ] = False
    new_answers: Annotated[
        bool, option(OUTPUT, "Generate the new answers too, drafted by the old ones, with ROUGE.", "--new-answers")
    ] = False
    max_diverged: Annotated[
        str | None,
        option(
            OUTPUT,
            "Exit 1 if more of the answers diverge, such as `2%` or `0.02`.",
            shown="any share",
            check=_share,
            metavar="SHARE",
        ),
    ] = None
    report: Report = None

    def check(self) -> None:
        """SpecDecError for files, a share of answers, or flags together that cannot be used."""
        check_report(self.report)
        check_readable([self.traces])
        if not has_lines(self.traces):
            raise SpecDecError(
                f"this is no file of answers, but of other data: {self.traces}",
                hint="`specdec run --output-traces FILE` writes one",
            )
        check_output_files([] if self.report is None else [self.report], [self.traces])
        if self.until_change and self.against is not None:
            raise UsageError(
                f"the divergence from an old engine is measured at all tokens, not up to a change: {self.against}",
                hint="leave `--against` or `--until-change` out",
            )
        self.most_diverged  # noqa: B018  # or what is wrong with it

    @property
    def most_diverged(self) -> float | None:
        """The share of answers that may diverge; None if any may."""
        return None if self.max_diverged is None else _share(self.max_diverged)
