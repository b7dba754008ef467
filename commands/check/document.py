"""The JSON document of `specdec check`."""

from typing import Literal

from pydantic import Field

from commands.output.documents.records import MeasuredHead, Record
from commands.output.documents.settings import EngineRecord
from runtime.checkpoint.config import Count, Measure
from runtime.proof.records import Finding, Fingerprint, Relation, Verdict


class CheckTotal(Record):
    """Counts over all answers."""

    num_answers: Count
    num_tokens: Count = Field(description="output tokens of the answers that could be checked")
    verdicts: dict[Verdict, Count]
    relations: dict[Relation, Count] = Field(description="answers by how their engine stands to this one")
    wall_s: Measure = Field(description="time of the check, without opening the engine")
    tokens_per_second: Measure | None


class CheckDocument(MeasuredHead):
    """Document of `specdec check --json`."""

    command: Literal["check"]
    files: list[str]
    engine: EngineRecord
    fingerprint: Fingerprint = Field(description="this engine's")
    passed: bool = Field(description="the exit code is 1 if not")
    total: CheckTotal
    engine_differences: list[str] = Field(description="between the first other engine of a receipt and this one")
    findings: list[Finding] = Field(description="answers that are wrong, unlikely, or could not be checked")
    num_findings_left_out: Count = Field(description="beyond the first 10,000")
