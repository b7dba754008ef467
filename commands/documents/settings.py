"""What made the numbers of a document: the engines, the drafter, and how tokens were chosen."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.bundle import Bundle
from runtime.config import as_json
from runtime.drafters.specs import DRAFTERS
from runtime.llm import LLM
from runtime.params import SamplingParams
from runtime.session import Session

_ENGINE_KEYS = (
    *("dtype", "build_config", "environment", "logits_check", "compiler_note"),
    *("arithmetic", "batch_invariant", "quantization", "quality"),
)


@dataclass(frozen=True)
class Setup:
    """A session, and what it is told of every request. `profile`: the file that the drafter's settings are from."""

    llm: LLM
    session: Session
    params: SamplingParams
    profile: Path | None = None

    def engine_records(self) -> dict[str, Any]:
        draft_engine = self.session.draft_engine
        models = [one.draft_model for one in self.session.speculation if one.draft_model is not None]
        return {
            "engine": _engine_record(self.llm.bundle),
            "draft_engine": _engine_record(Bundle(Path(models[0]), draft_engine.config))
            if draft_engine and models
            else None,
        }

    def settings_record(self) -> dict[str, Any]:
        speculation = self.session.speculation
        records = {one.description.flag: one.record(self.llm.device_ids) for one in speculation}
        request = self.llm.request_of(self.params)
        return {
            "drafters": speculation.names,
            **{spec.description.flag: records.get(spec.description.flag) for spec in DRAFTERS.values()},
            "sampling": dataclasses.asdict(request.sampling) | {"bad_words": list(self.params.bad_words or ())},
            "end_ids": sorted(request.end_ids),
            "stop_words": list(self.params.stop_words),
            "draft_len_mode": speculation.draft_len_mode,
            "profile": None if self.profile is None else str(self.profile),
            "mode": self.session.mode,
            "block_reuse": self.llm.engine.block_reuse,
            "max_num_tokens": self.llm.engine.max_num_tokens,
        }


def _engine_record(bundle: Bundle) -> dict[str, Any]:
    record = as_json(bundle.config)
    return {
        "engine_dir": str(bundle.directory),
        "model_type": bundle.config.pretrained_config["model_type"],
        **{key: record[key] for key in _ENGINE_KEYS},
    }
