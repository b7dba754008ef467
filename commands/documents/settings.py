"""Settings behind the numbers of a document: the engines, the drafter, and sampling."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from commands.documents.drafters import ChosenDrafters
from commands.documents.records import Record, Token, absent
from commands.options.leader_flags import Mode
from runtime.bundle import Bundle
from runtime.config import (
    Arithmetic,
    BuildConfig,
    Count,
    Dtype,
    Environment,
    LogitsCheck,
    Measure,
    Quality,
    Quantization,
    Share,
    Size,
)
from runtime.drafters.specs import DRAFTERS, DraftLenMode
from runtime.params import SamplingParams

if TYPE_CHECKING:  # `compare` needs no torch
    from runtime.llm import LLM
    from runtime.session import Session

Word = Annotated[str, Field(min_length=1)]


class EngineRecord(Record):
    """The engine that made the numbers: of its config.json what they may depend on."""

    engine_dir: str
    model_type: str
    dtype: Dtype
    build_config: BuildConfig
    environment: Environment
    logits_check: LogitsCheck
    compiler_note: str | None = Field(description="why the compiler is not the one that was asked for")
    arithmetic: Arithmetic | None = Field(description="of the kernels for linear layers; null where they are not used")
    batch_invariant: bool = Field(description="whether a token's logits are the same bits whatever else is in its step")
    quantization: Quantization | None = absent("null where linear layers are not rounded")
    quality: Quality | None = absent("quantization error on a fixed text")

    @classmethod
    def of(cls, bundle: Bundle) -> "EngineRecord":
        config = bundle.config
        chosen = {name: getattr(config, name) for name in cls.model_fields if hasattr(config, name)}
        model_type = config.pretrained_config["model_type"]
        return cls(engine_dir=str(bundle.directory), model_type=model_type, **chosen)


class Sampling(Record):
    """Sampling settings; top_k 1 or temperature 0 is greedy."""

    temperature: Measure
    top_k: Count
    top_p: Share
    min_p: Share
    repetition_penalty: Annotated[float, Field(gt=0)]
    presence_penalty: Measure
    frequency_penalty: Measure
    no_repeat_ngram_size: Count
    bad_words: list[Word] = Field(description="as given")
    random_seed: int
    penalize_prompt: bool = True
    logit_bias: tuple[tuple[Token, float], ...] = ()


class SessionSettings(ChosenDrafters):
    """Settings common to `run` and `summarize`."""

    sampling: Sampling
    end_ids: list[Token]
    stop_words: list[Word]
    draft_len_mode: DraftLenMode = Field(description="--draft-len-mode")
    profile: str | None = Field(description="--profile, which the drafter's settings are from")
    mode: Mode
    block_reuse: bool
    max_num_tokens: Size


@dataclass(frozen=True)
class Setup:
    """A session, and what it is told of every request. `profile`: the file that the drafter's settings are from."""

    llm: "LLM"
    session: "Session"
    params: SamplingParams
    profile: Path | None = None

    @property
    def engine(self) -> EngineRecord:
        return EngineRecord.of(self.llm.bundle)

    @property
    def draft_engine(self) -> EngineRecord | None:
        draft_engine = self.session.draft_engine
        models = [one.draft_model for one in self.session.speculation if one.draft_model is not None]
        return EngineRecord.of(Bundle(Path(models[0]), draft_engine.config)) if draft_engine and models else None

    def settings(self) -> dict[str, Any]:
        """The fields of `SessionSettings`."""
        speculation = self.session.speculation
        records = {one.description.flag: one.record(self.llm.device_ids) for one in speculation}
        request = self.llm.request_of(self.params)
        sampling = dataclasses.asdict(request.sampling) | {"bad_words": list(self.params.bad_words or ())}
        return {
            "drafters": speculation.names,
            **{spec.description.flag: records.get(spec.description.flag) for spec in DRAFTERS.values()},
            "sampling": Sampling(**sampling),
            "end_ids": sorted(request.end_ids),
            "stop_words": list(self.params.stop_words),
            "draft_len_mode": speculation.draft_len_mode,
            "profile": None if self.profile is None else str(self.profile),
            "mode": self.session.mode,
            "block_reuse": self.llm.engine.block_reuse,
            "max_num_tokens": self.llm.engine.max_num_tokens,
        }
