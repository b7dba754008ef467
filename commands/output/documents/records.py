"""Building blocks of JSON documents: the base class of records, whose fields describe their keys, and the records that
several documents share.

`specdec schema` makes JSON schemas from them (`commands/schema/schemas.py`). Nothing here, nor any document's own
module, imports torch: `compare` and `schema` run without it.
"""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from runtime import specdec_version
from runtime.checkpoint.config import Count, Measure, Share
from runtime.loop.lossless.results import DistributionCheck, TokenCheck
from runtime.util.machine import machine_name

SchemaVersion = Literal[2]
SCHEMA_VERSION: SchemaVersion = get_args(SchemaVersion)[0]
"""The version of all commands' documents. It changes when a key changes its meaning or is removed."""

Positive = Annotated[float, Field(gt=0)]
Token = Count
Tokens = Annotated[list[Token], Field(min_length=1)]
Lossless = Annotated[TokenCheck | DistributionCheck, Field(discriminator="rule")]


class Record(BaseModel):
    """A part of a document: it has these keys and no others. Keys that may be left out have a default."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True, protected_namespaces=())

    def as_json(self) -> dict[str, Any]:
        """JSON form; a key that was not given is left out."""
        return self.model_dump(mode="json", exclude_unset=True)


def absent(description: str | None = None) -> Any:
    """A field whose key is left out of the document if it has no value."""
    return Field(default=None, description=description)


class Head(Record):
    """First keys of a document, by which a program (and `compare`) recognizes it."""

    command: str
    schema_version: SchemaVersion
    specdec_version: str | None = Field(
        description="null where specdec runs from its directory without being installed"
    )


class MeasuredHead(Head):
    """First keys of a document of measurements, including the time and the machine."""

    date: str = Field(
        default="",
        pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$",
        description="when the document was made, in UTC, such as 2026-11-29T10:15:00+00:00",
    )
    machine: str = absent("processor, and cores that the process may use")


def measured_head(command: str) -> dict[str, Any]:
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return document_head(command) | {"date": date, "machine": machine_name()}


def document_head(command: str) -> dict[str, Any]:
    return {"command": command, "schema_version": SCHEMA_VERSION, "specdec_version": specdec_version()}


class Counts(Record):
    """Counts, and the rates derived from them."""

    num_generated_tokens: Count = Field(description="tokens generated")
    num_steps: Count = Field(description="target steps that produced tokens, the context step included")
    num_spec_steps: Count = Field(description="target steps that carried a non-empty draft")
    num_draft_tokens: Count = Field(description="draft tokens sent to the target")
    num_accepted_draft_tokens: Count = Field(
        description="accepted draft tokens that the output kept, after its cut at an end id, a stop word or its budget"
    )
    draft_acceptance_rate: Share | None = Field(description="accepted / drafted; null where nothing was drafted")
    mean_acceptance_length: Annotated[float, Field(ge=1)] | None = Field(
        description="1 + accepted / num_spec_steps; null where nothing was drafted"
    )
    tokens_per_step: Measure | None = Field(description="num_generated_tokens / num_steps, empty drafts included")
    acceptance_histogram: list[Count] = Field(
        description="entry i: steps with exactly i draft tokens accepted, i = 0..max_draft_len; over num_spec_steps"
    )
    acceptance_histogram_by_draft_length: dict[str, list[Count]] = absent(
        "the same for the drafts of each length that was sent, by that length: k + 1 entries for k tokens"
    )
    num_spec_tokens: Count = absent("most tokens of a draft, max_draft_len")
    num_drafts_per_position: list[Count] = Field(description="entry i: drafts with at least i + 1 tokens")
    acceptance_rate_per_position: list[Share | None] = Field(
        description="entry i: of those drafts, the share whose token i was accepted; null where there are none"
    )
    num_reused_tokens: Count = Field(description="prompt or history tokens whose K/V came from block reuse")


class RequestCounts(Counts):
    """One request's counts, the rates derived from them, and times in seconds."""

    ttft_s: Measure | None = Field(description="submit to first token")
    tpot_s: Measure | None = Field(description="(end - first token) / (generated - 1); null for one token")
    latency_s: Measure | None = Field(description="submit to end")
    per_step_drafted: list[Count] = absent("draft tokens sent to the target in each step; with --stats detailed")
    per_step_accepted: list[Count] = absent("draft tokens kept of each step; with --stats detailed")


class _NumRequests(Record):
    num_requests: Count


class _Pace(Record):
    wall_s: Measure = Field(description="wall time of the whole run; loading and warm-up excluded")
    output_tokens_per_second: Measure | None = Field(description="num_generated_tokens / wall_s")


class _LoopTimes(_Pace):
    draft_time_s: Measure = Field(description="time proposing")
    draft_model_time_s: Measure = Field(description="the part of draft_time_s in a draft model's compiled step")
    target_time_s: Measure = Field(description="time in the compiled step")
    host_time_s: float = Field(description="time in everything else")
    num_iterations: Count = Field(description="target forwards, each for a batch")
    draft_time_per_step_s: float | None = Field(description="draft_time_s / num_iterations")
    draft_model_time_per_step_s: float | None = Field(description="draft_model_time_s / num_iterations")
    target_time_per_step_s: float | None = Field(description="target_time_s / num_iterations")
    host_time_per_step_s: float | None = Field(description="host_time_s / num_iterations")


class Total(_LoopTimes, Counts, _NumRequests):
    """Counts over all requests, the rates derived from them, and times in seconds."""


class _NumTokens(_NumRequests):
    num_generated_tokens: Count


class OthersTotal(_Pace, _NumTokens):
    """Counts for Hugging Face's transformers, whose steps cannot be counted as ours."""
