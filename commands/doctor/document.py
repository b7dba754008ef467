"""Records of the JSON document of `doctor`."""

from typing import Literal

from pydantic import Field

from commands.output.documents.records import Counts, MeasuredHead, Positive, Record, absent
from commands.output.documents.settings import DrafterNames, EngineRecord
from runtime.checkpoint.config import Count, Measure, Size
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
    """A measured number, and the limit beyond which it is a fault."""

    name: str
    status: Literal["ok", "found", "not_judged"] = Field(
        description="not_judged: there was nothing to measure, or too little"
    )
    number: int | float | None = Field(description="what was measured")
    limit: int | float | None = Field(description="threshold of a fault")
    message: str | None = Field(description="what the number is of")
    remedy: str | None = Field(description="remedy; null unless it was found")


class OfferRecord(Record):
    """Draft that a drafter proposed."""

    drafter: str
    num_tokens: Count
    match_len: Count = Field(description="tokens of the text that were found again; 0 for a model's draft")


class StepRecord(Record):
    """A step of the target, and the reason for the length of its draft."""

    context_len: Count = Field(description="tokens before the step")
    offers: list[OfferRecord]
    promised: Measure | None = Field(
        description="tokens of the longest offer that should be accepted, by how earlier ones were; null for fixed "
        "lengths"
    )
    price: float | None = Field(
        description="tokens that must be accepted for the longest offer to pay; null if steps were not timed"
    )
    num_sent: Count = Field(description="draft tokens sent to the target")
    num_accepted: Count = Field(description="sent draft tokens that the target accepted")
    num_new_tokens: Count = Field(description="tokens of the output")
    reason: str


class ExplanationRecord(Record):
    """The steps of a request, and the counts of its answer, which are the sums over the steps."""

    steps: list[StepRecord]
    total: Counts


class TimedStep(Record):
    """A step's time when the engine was built, and its time now: the fastest of many runs."""

    batch_size: Size
    num_tokens: Size = Field(description="of each row")
    context_len: Count
    built_s: Positive
    now_s: Positive


class DoctorDocument(MeasuredHead):
    """Document of `specdec doctor --json`."""

    command: Literal["doctor"]
    engine_dir: str = Field(description="as given")
    settings: DoctorSettings
    num_prompts: Size
    is_healthy: bool = Field(description="whether nothing was found; the exit code is 1 if not")
    diagnoses: list[Diagnosis] = Field(description="none with --explain")
    explanation: ExplanationRecord | None = absent("with --explain")
    engine: EngineRecord = absent()
    steps: list[TimedStep] = absent("step times, when the engine was built and now")
