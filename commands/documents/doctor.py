"""The JSON document of `specdec doctor`."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from commands.documents.drafters import DrafterNames
from commands.documents.records import Head, Record, document_head
from commands.options.doctor import DoctorOptions
from commands.options.engine import EngineChoice
from commands.options.leader import Loop
from commands.options.remedies import REMEDIES
from runtime.config import Size
from runtime.diagnosis.judging import Judgement
from runtime.drafters.specs import DraftLenMode


class DoctorSettings(Record):
    """What the command was told."""

    drafters: DrafterNames
    draft_len_mode: DraftLenMode
    profile: str | None = Field(description="the file that the drafter's settings are from")
    mode: Loop
    max_output_len: Size


class Diagnosis(Record):
    """A number beside its limit."""

    name: str
    status: Literal["ok", "found", "not_judged"] = Field(
        description="not_judged: there was nothing to measure, or too little"
    )
    number: int | float | None = Field(description="what was measured")
    limit: int | float | None = Field(description="where it begins to be a fault")
    message: str | None = Field(description="what the number is of")
    remedy: str | None = Field(description="what to do; null unless it was found")


class DoctorDocument(Head):
    """What `specdec doctor --json` prints."""

    command: Literal["doctor"]
    engine_dir: str = Field(description="as given")
    settings: DoctorSettings
    num_prompts: Size
    is_healthy: bool = Field(description="whether nothing was found; the exit code is 1 if not")
    diagnoses: list[Diagnosis]


def doctor_document(
    choice: EngineChoice,
    options: DoctorOptions,
    num_prompts: int,
    judgements: Mapping[str, Judgement | None],
) -> dict[str, Any]:
    document = DoctorDocument(
        **document_head("doctor"),
        engine_dir=str(choice.engine_dir),
        settings=DoctorSettings(
            drafters=choice.speculation.names,
            draft_len_mode=choice.speculation.draft_len_mode or "fixed",
            profile=None if choice.profile is None else str(choice.profile),
            mode=options.mode,
            max_output_len=options.max_output_len,
        ),
        num_prompts=num_prompts,
        is_healthy=not any(judgement and judgement.is_fault for judgement in judgements.values()),
        diagnoses=[_diagnosis(name, judgement) for name, judgement in judgements.items()],
    )
    return document.as_json()


def _diagnosis(name: str, judgement: Judgement | None) -> Diagnosis:
    if judgement is None:
        return Diagnosis(name=name, status="not_judged", number=None, limit=None, message=None, remedy=None)
    return Diagnosis(
        name=name,
        status="found" if judgement.is_fault else "ok",
        number=judgement.number,
        limit=judgement.limit,
        message=judgement.message,
        remedy=REMEDIES[name] if judgement.is_fault else None,
    )
