"""The JSON document of `specdec doctor`."""

from collections.abc import Mapping
from typing import Any

from commands.documents.head import document_head
from commands.options.doctor import DoctorOptions
from commands.options.remedies import REMEDIES
from commands.options.speculation import Chosen
from runtime.bundle import Bundle
from runtime.diagnosis.judging import Judgement


def doctor_document(
    bundle: Bundle,
    chosen: Chosen,
    options: DoctorOptions,
    num_prompts: int,
    judgements: Mapping[str, Judgement | None],
) -> dict[str, Any]:
    return {
        **document_head("doctor"),
        "engine_dir": str(bundle.directory),
        "settings": {
            "drafters": chosen.speculation.names,
            "draft_len_mode": chosen.speculation.draft_len_mode,
            "profile": None if chosen.profile is None else str(chosen.profile),
            "mode": options.mode,
            "max_output_len": options.max_output_len,
        },
        "num_prompts": num_prompts,
        "is_healthy": not any(judgement and judgement.is_fault for judgement in judgements.values()),
        "diagnoses": [_record(name, judgement) for name, judgement in judgements.items()],
    }


def _record(name: str, judgement: Judgement | None) -> dict[str, Any]:
    if judgement is None:
        nothing = {"number": None, "limit": None, "message": None, "remedy": None}
        return {"name": name, "status": "not_judged", **nothing}
    return {
        "name": name,
        "status": "found" if judgement.is_fault else "ok",
        "number": judgement.number,
        "limit": judgement.limit,
        "message": judgement.message,
        "remedy": REMEDIES[name] if judgement.is_fault else None,
    }
