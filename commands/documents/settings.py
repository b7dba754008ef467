"""What made the numbers of a document: the engines, the drafter, and how tokens were chosen."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from runtime.bundle import Bundle
from runtime.config import as_json
from runtime.drafters.settings import (
    CustomDrafter,
    DraftTargetDrafter,
    NgramDrafter,
    OneDrafter,
    SelfDrafter,
    SuffixDrafter,
    drafter_names,
    each_drafter,
)
from runtime.llm import LLM
from runtime.params import SamplingParams
from runtime.session import Session

Settings = TypeVar("Settings", NgramDrafter, SuffixDrafter, DraftTargetDrafter, SelfDrafter, CustomDrafter)

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
        draft = self._settings_of(DraftTargetDrafter)
        return {
            "engine": _engine_record(self.llm.bundle),
            "draft_engine": _engine_record(Bundle(Path(draft.model), draft_engine.config))
            if draft_engine and draft
            else None,
        }

    def settings_record(self) -> dict[str, Any]:
        custom, draft = self._settings_of(CustomDrafter), self._settings_of(DraftTargetDrafter)
        request = self.llm.request_of(self.params)
        return {
            "drafters": drafter_names(self.session.settings),
            "ngram_config": self._config_record(self._settings_of(NgramDrafter)),
            "suffix_config": self._config_record(self._settings_of(SuffixDrafter)),
            "draft_target_model_config": None if draft is None else self._draft_target_record(draft),
            "self_draft_config": self._config_record(self._settings_of(SelfDrafter)),
            "drafter": f"{custom.module}:{custom.factory}" if custom else None,
            "sampling": dataclasses.asdict(request.sampling) | {"bad_words": list(self.params.bad_words or ())},
            "end_ids": sorted(request.end_ids),
            "stop_words": list(self.params.stop_words),
            "draft_len_mode": self.session.draft_len_mode,
            "profile": None if self.profile is None else str(self.profile),
            "mode": self.session.mode,
            "block_reuse": self.llm.engine.block_reuse,
            "max_num_tokens": self.llm.engine.max_num_tokens,
        }

    def _config_record(self, settings: OneDrafter | None) -> dict[str, Any] | None:
        if settings is None:
            return None
        record = dataclasses.asdict(settings) | self._devices
        return {k: str(v) if isinstance(v, Path) else v for k, v in record.items()}

    def _draft_target_record(self, draft: DraftTargetDrafter) -> dict[str, Any]:
        return {
            "max_draft_len": draft.max_draft_len,
            "draft_device_id": (draft.device_ids or (0,))[0],
            "draft_device_ids": None if draft.device_ids is None else list(draft.device_ids),
            **self._devices,
            "use_logits": draft.use_logits,
            "draft_engine_dir": str(draft.model),
        }

    @property
    def _devices(self) -> dict[str, Any]:
        """The target's: the first rank's, and all."""
        return {"device_id": self.llm.device_ids[0], "device_ids": list(self.llm.device_ids)}

    def _settings_of(self, kind: type[Settings]) -> Settings | None:
        """The settings of the drafter of that kind, by itself or in a chain."""
        return next((s for s in each_drafter(self.session.settings) if isinstance(s, kind)), None)


def _engine_record(bundle: Bundle) -> dict[str, Any]:
    record = as_json(bundle.config)
    return {
        "engine_dir": str(bundle.directory),
        "model_type": bundle.config.pretrained_config["model_type"],
        **{key: record[key] for key in _ENGINE_KEYS},
    }
