"""Records of the JSON document of `doctor`."""

from typing import Literal

from pydantic import Field

from commands.output.documents.records import Head, Record
from commands.output.documents.settings import DrafterNames
from runtime.checkpoint.config import Size
from runtime.core.params import Mode
from runtime.drafters.spec import DraftLenMode


class DoctorSettings(Record):
    """Settings of the command."""

    drafters: DrafterNames
    draft_len_mode: DraftLenMode
    profile: str | None = Field(description="the file that the drafter's settings are from")
    mode: Mode
    max_output_len: Size


class Diagnosis(Record):
    """A number beside its limit."""

    name: str
    status: Literal["ok", "found", "not_judged"] = Field(
        description="not_judged: there was nothing to measure, or too little"
    )
    number: int | float | None = Field(description="what was measured")
    limit: int | float | None = Field(description="threshold of a fault")
    message: str | None = Field(description="what the number is of")
    remedy: str | None = Field(description="remedy; null unless it was found")


class DoctorDocument(Head):
    """Document of `specdec doctor --json`."""

    command: Literal["doctor"]
    engine_dir: str = Field(description="as given")
    settings: DoctorSettings
    num_prompts: Size
    is_healthy: bool = Field(description="whether nothing was found; the exit code is 1 if not")
    diagnoses: list[Diagnosis]
