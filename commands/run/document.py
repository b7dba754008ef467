"""The JSON document of `specdec run`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from commands.inputs.prompts import Prompt
from commands.output.documents.records import (
    Lossless,
    MeasuredHead,
    Record,
    RequestCounts,
    Tokens,
    Total,
    absent,
    measured_head,
)
from commands.output.documents.settings import EngineRecord, SessionSettings, Setup
from runtime.checkpoint.config import Count, Measure, Size
from runtime.core.stats import FinishReason, TokenLogprobs
from runtime.loop.lossless.results import LosslessCheck

if TYPE_CHECKING:  # `compare` needs no torch
    from runtime.core.generation import Generation
    from runtime.core.request import Sequence


class RunRequest(Record):
    """A request and its answer."""

    prompt: str | None = Field(description="null where the prompt was token ids")
    prompt_ids: Tokens
    return_index: Count = Field(description="which of --num-return-sequences")
    output_ids: Tokens
    output_text: str | None = Field(description="without end id and what follows a stop word; null without a tokenizer")
    finish_reason: FinishReason
    stats: RequestCounts
    logprobs: list[TokenLogprobs] = absent("with --logprobs: of each generated token, by the model's own logits")


class RunSettings(SessionSettings):
    """Settings of the command."""

    max_input_length: Size | None
    max_output_len: Size


class RunChecks(Record):
    """Results of the checks."""

    lossless: Lossless = absent("--check-lossless")


class RunDocument(MeasuredHead):
    """Document of `specdec run --json`."""

    command: Literal["run"]
    requests: list[RunRequest]
    total: Total
    settings: RunSettings
    engine: EngineRecord
    draft_engine: EngineRecord | None = Field(description="the draft model's")
    num_unfinished_requests: Count = Field(description="after Ctrl-C")
    speedup: Measure | None = Field(description="over no drafter, with --check-lossless")
    checks: RunChecks


@dataclass(frozen=True)
class Compared:
    """Figures for comparison with the engine without a drafter."""

    speedup: float
    check: LosslessCheck


def run_document(
    setup: Setup,
    prompts: list[Prompt],
    generation: "Generation",
    settings: dict[str, Any],
    compared: Compared | None,
    *,
    num_unfinished: int,
    per_step: bool,
) -> RunDocument:
    """The document. `prompts` has the prompt of each request; `settings` has the settings of the command alone."""
    return RunDocument(
        **measured_head("run"),
        requests=[
            _request(setup, prompts[sequence.request.id], sequence, per_step=per_step)
            for sequence in generation.sequences
        ],
        total=Total(**generation.total(setup.session.max_draft_len)),
        settings=RunSettings(**setup.settings(), **settings),
        engine=setup.engine,
        draft_engine=setup.draft_engine,
        num_unfinished_requests=num_unfinished,
        speedup=None if compared is None else compared.speedup,
        checks=RunChecks() if compared is None else RunChecks(lossless=compared.check),
    )


def _request(setup: Setup, prompt: Prompt, sequence: "Sequence", *, per_step: bool) -> RunRequest:
    found: dict[str, Any] = {"finish_reason": sequence.finish_reason}
    if sequence.request.num_logprobs is not None:
        found["logprobs"] = sequence.logprobs
    return RunRequest(
        prompt=prompt.text,
        prompt_ids=list(sequence.request.prompt_tokens),
        return_index=sequence.request.return_index,
        output_ids=sequence.output_tokens,
        output_text=setup.llm.text(sequence),
        stats=RequestCounts(**sequence.stats.as_dict(setup.session.max_draft_len, per_step=per_step)),
        **found,
    )
