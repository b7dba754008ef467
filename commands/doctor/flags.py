"""Flags of `specdec doctor`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from commands.options.shared import InputFile, Report
from commands.output.help import INPUT, RUNTIME, option


@dataclass(frozen=True)
class DoctorInputs:
    """Prompts for the engine."""

    input_text: Annotated[
        list[str] | None,
        option(
            INPUT,
            "Prompt; repeatable. Real prompts are the most informative.",
            shown="4 shipped articles, cut to what fits",
        ),
    ] = None
    input_file: InputFile = None

    @property
    def paths(self) -> list[Path]:
        """Paths to read."""
        return [] if self.input_file is None else [self.input_file]


@dataclass(frozen=True)
class DoctorOptions:
    """Settings for answering the prompts."""

    max_output_len: Annotated[int, option(RUNTIME, "Tokens to generate from a prompt.", min=1)] = 64
    explain: Annotated[
        bool,
        option(
            RUNTIME,
            "Instead of looking for faults, answer one prompt and say of each step what each drafter offered, what it "
            "cost, and why it was sent or cut.",
            "--explain",
        ),
    ] = False
    report: Report = None
