"""Records of the JSON document of `tune`."""

from typing import Annotated, Literal

from pydantic import Field

from commands.output.documents.records import Counts, MeasuredHead, Positive, Record, absent
from commands.output.documents.settings import DeviceIds, EngineRecord, TunedDrafter
from runtime.checkpoint.config import InEightBits, Measure, Size
from runtime.drafters.spec import DraftLenMode


class Candidate(Record):
    """A drafter with its settings, several drafters, or no drafter."""

    drafter: TunedDrafter = Field(description="null for no drafter")
    draft_len_mode: DraftLenMode
    flags: str = Field(description="flags for `run`; empty for no drafter")
    label: str = absent("in words, such as `suffix matching, drafts to 10`")


class Screened(Candidate):
    """A candidate that was replayed on some of the traces."""

    num_traces: Size
    total: Counts


class ReplayedCandidate(Candidate):
    """A candidate that was replayed on all traces."""

    total: Counts
    by_category: dict[str, Counts]
    num_iterations: Size = Field(description="steps of requests that are answered together count once")
    draft_time_s: Measure = Field(description="measured while replaying")
    predicted_s: Positive | None = Field(description="null without an engine; not scaled")


class Tried(Candidate):
    """A candidate that was run once."""

    num_requests: Size
    measured: Counts
    measured_s: Positive


class Factors(Record):
    """Ratios of measured to predicted time without a drafter. Predictions are multiplied by them."""

    prompts: Positive
    steps: Positive


class Timed(Candidate):
    """A candidate that was timed on the engine."""

    num_requests: Size
    replayed: Counts | None = Field(description="null if it cannot be replayed")
    measured: Counts
    batches_s: Annotated[list[Annotated[list[Positive], Field(min_length=1)]], Field(min_length=3)] = Field(
        description="of each round, the wall time of each batch"
    )
    measured_s: Positive = Field(description="sum over batches of the median over rounds")
    measured_speedup: Positive
    predicted_s: Positive | None = Field(description="scaled by factor; null if it cannot be replayed")
    predicted_speedup: Positive | None
    ratio: Positive | None = Field(description="predicted_s / measured_s")


class TuneSettings(Record):
    """Settings of the command."""

    engine_dir: str | None
    device_ids: DeviceIds | None = Field(description="the target's, one for each of its ranks")
    traces: str | None
    max_output_len: Size | None
    batch_size: Size
    num_live_prompts: Size | None
    profile: str | None = Field(description="where --output wrote the recommendation")


class TuneDocument(MeasuredHead):
    """Document of `specdec tune --json`."""

    command: Literal["tune"]
    num_traces: Size
    num_output_tokens: Size
    mean_prompt_len: Positive
    screened: list[Screened] = Field(description="the grid on some of the traces, where there are many; best first")
    candidates: list[ReplayedCandidate] = Field(
        min_length=1, description="on all traces, best first: by predicted_s, or without an engine by steps"
    )
    tried: list[Tried] = Field(
        description="candidates that cannot be replayed, run once: draft models, self-drafting, chains"
    )
    factors: Factors | None = Field(description="null without an engine")
    timed: Annotated[list[Timed], Field(min_length=2)] | None = Field(
        description="no drafter and the best candidates on the engine; null without one"
    )
    recommended: Candidate | None = Field(description="null without an engine")
    in_eight_bits: InEightBits | None = absent("activations of 8 bits, with --compare-activations")
    settings: TuneSettings
    engine: EngineRecord | None = absent("null without an engine")
