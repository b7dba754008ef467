"""The JSON document of `specdec tune`."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Annotated, Any, Literal

from pydantic import Field

from commands.documents.records import Counts, Head, Positive, Record, document_head
from commands.documents.settings import DeviceIds, TunedDrafter
from commands.options.drafter_flags import written_flags
from runtime.config import Measure, Size
from runtime.drafters.specs import DraftLenMode
from runtime.drafters.speculation import Speculation
from runtime.stats import RequestStats, sum_stats
from runtime.trace_lines import Trace
from runtime.tuning.live import Confirmation, Confirmed, Measured
from runtime.tuning.profile import drafter_record
from runtime.tuning.search import Replayed, Search


class Candidate(Record):
    """A way to draft."""

    drafter: TunedDrafter = Field(description="null for no drafter")
    draft_len_mode: DraftLenMode
    flags: str = Field(description="flags for `run`; empty for no drafter")


class Screened(Candidate):
    """A candidate on some of the traces."""

    num_traces: Size
    total: Counts


class ReplayedCandidate(Candidate):
    """A candidate on all traces."""

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
    """Ratios of the measured to the predicted time without a drafter, which scale predictions."""

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


class TuneDocument(Head):
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
    settings: TuneSettings


@dataclass(frozen=True)
class Tuning:
    """Replayed candidates, *no drafter* first, and with an engine those run once, and those timed."""

    search: Search
    settings: TuneSettings
    tried: Sequence[Measured] = ()
    confirmation: Confirmation | None = None

    @property
    def device_ids(self) -> tuple[int, ...]:
        """The target's; by replay alone the first, as in all examples."""
        return tuple(self.settings.device_ids or (0,))

    @property
    def traces(self) -> Sequence[Trace]:
        return self.search.replayer.traces

    @property
    def replayed(self) -> Sequence[Replayed]:
        return self.search.replayed

    @property
    def ranked(self) -> list[Replayed]:
        """The best first; without an engine the most tokens per step."""
        return sorted(self.replayed, key=lambda one: one.rank)


def categories_of(traces: Sequence[Trace]) -> list[str]:
    return sorted({trace.category for trace in traces if trace.category is not None})


def stats_of_category(traces: Sequence[Trace], one: Replayed, category: str) -> RequestStats:
    pairs = zip(traces, one.batches.stats, strict=True)
    return sum_stats(stats for trace, stats in pairs if trace.category == category)


def tune_document(tuning: Tuning) -> dict[str, Any]:
    confirmation = tuning.confirmation
    timed = factors = recommended = None
    if confirmation is not None:
        timed = [_timed(tuning, one) for one in confirmation.confirmed]
        factors = Factors(prompts=confirmation.factors.prompts, steps=confirmation.factors.others)
        recommended = Candidate(**_candidate(tuning, confirmation.recommended.candidate))
    document = TuneDocument(
        **document_head("tune"),
        num_traces=len(tuning.traces),
        num_output_tokens=sum(len(trace.output_tokens) for trace in tuning.traces),
        mean_prompt_len=mean(len(trace.prompt_tokens) for trace in tuning.traces),
        screened=[_screened(tuning, one) for one in sorted(tuning.search.screened, key=lambda one: one.rank)],
        candidates=[_replayed(tuning, one) for one in tuning.ranked],
        tried=[_tried(tuning, one) for one in tuning.tried],
        factors=factors,
        timed=timed,
        recommended=recommended,
        settings=tuning.settings,
    )
    return document.as_json()


def _candidate(tuning: Tuning, candidate: Speculation) -> dict[str, Any]:
    """The fields of `Candidate`."""
    return {
        "drafter": _with_device(drafter_record(candidate), tuning.device_ids[0]),
        "draft_len_mode": candidate.draft_len_mode,
        "flags": written_flags(candidate, tuning.device_ids),
    }


def _with_device(record: dict[str, Any] | None, device_id: int) -> dict[str, Any] | None:
    """Lookups' and the copy's, which `tune` has on the target's first device; a draft model has its own."""
    if record is None:
        return None
    if "device_ids" in record:
        return record | {"device_id": (record["device_ids"] or (0,))[0]}
    if "drafters" in record:
        return record | {"drafters": [_with_device(one, device_id) for one in record["drafters"]]}
    return record | {"device_id": device_id}


def _screened(tuning: Tuning, one: Replayed) -> Screened:
    total = one.total.counts(one.candidate.max_draft_len or 0)
    return Screened(**_candidate(tuning, one.candidate), num_traces=len(one.batches.stats), total=Counts(**total))


def _replayed(tuning: Tuning, one: Replayed) -> ReplayedCandidate:
    max_draft_len = one.candidate.max_draft_len or 0
    return ReplayedCandidate(
        **_candidate(tuning, one.candidate),
        total=Counts(**one.total.counts(max_draft_len)),
        by_category={
            category: Counts(**stats_of_category(tuning.traces, one, category).counts(max_draft_len))
            for category in categories_of(tuning.traces)
        },
        num_iterations=len(one.batches.steps),
        draft_time_s=one.batches.draft_time_s,
        predicted_s=None if one.predicted is None else one.predicted.total,
    )


def _tried(tuning: Tuning, one: Measured) -> Tried:
    return Tried(
        **_candidate(tuning, one.candidate),
        num_requests=len(one.generation.sequences),
        measured=Counts(**one.counts),
        measured_s=one.seconds,
    )


def _timed(tuning: Tuning, one: Confirmed) -> Timed:
    replayed = None if one.replayed is None else one.replayed.total.counts(one.candidate.max_draft_len or 0)
    return Timed(
        **_candidate(tuning, one.candidate),
        num_requests=len(one.measured.generation.sequences),
        replayed=None if replayed is None else Counts(**replayed),
        measured=Counts(**one.measured.counts),
        batches_s=[[seconds.total for seconds in batches] for batches in one.measured.batches],
        measured_s=one.measured.seconds,
        measured_speedup=one.measured_speedup,
        predicted_s=one.predicted_s,
        predicted_speedup=one.predicted_speedup,
        ratio=one.ratio,
    )
