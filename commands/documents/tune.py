"""The JSON document of `specdec tune`."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from commands.documents.head import document_head
from commands.options.drafters import written_flags
from runtime.drafters.specs import Speculation
from runtime.stats import RequestStats, sum_stats
from runtime.tuning.live import Confirmation, Confirmed, Measured
from runtime.tuning.prediction import LoopSeconds
from runtime.tuning.profile import drafter_record
from runtime.tuning.replay import Trace
from runtime.tuning.search import Replayed, Search


@dataclass(frozen=True)
class Tuning:
    """What was replayed, *no drafter* first, and with an engine what was run once, and what was timed."""

    search: Search
    settings: dict[str, Any]
    tried: Sequence[Measured] = ()
    confirmation: Confirmation | None = None

    @property
    def device_ids(self) -> tuple[int, ...]:
        """The target's; by replay alone the first, as in all examples."""
        return tuple(self.settings["device_ids"] or (0,))

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
    return {
        **document_head("tune"),
        "num_traces": len(tuning.traces),
        "num_output_tokens": sum(len(trace.output_tokens) for trace in tuning.traces),
        "mean_prompt_len": mean(len(trace.prompt_tokens) for trace in tuning.traces),
        "screened": [_screened_record(tuning, one) for one in sorted(tuning.search.screened, key=lambda one: one.rank)],
        "candidates": [_replayed_record(tuning, one) for one in tuning.ranked],
        "tried": [_tried_record(tuning, one) for one in tuning.tried],
        "factors": None if confirmation is None else _parts(confirmation.factors),
        "timed": None if confirmation is None else [_confirmed_record(tuning, one) for one in confirmation.confirmed],
        "recommended": None if confirmation is None else _candidate_record(tuning, confirmation.recommended.candidate),
        "settings": tuning.settings,
    }


def _parts(seconds: LoopSeconds) -> dict[str, float]:
    return {"prompts": seconds.prompts, "steps": seconds.others}


def _candidate_record(tuning: Tuning, candidate: Speculation) -> dict[str, Any]:
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


def _screened_record(tuning: Tuning, one: Replayed) -> dict[str, Any]:
    return {
        **_candidate_record(tuning, one.candidate),
        "num_traces": len(one.batches.stats),
        "total": one.total.counts(one.candidate.max_draft_len or 0),
    }


def _replayed_record(tuning: Tuning, one: Replayed) -> dict[str, Any]:
    max_draft_len = one.candidate.max_draft_len or 0
    return {
        **_candidate_record(tuning, one.candidate),
        "total": one.total.counts(max_draft_len),
        "by_category": {
            category: stats_of_category(tuning.traces, one, category).counts(max_draft_len)
            for category in categories_of(tuning.traces)
        },
        "num_iterations": len(one.batches.steps),
        "draft_time_s": one.batches.draft_time_s,
        "predicted_s": None if one.predicted is None else one.predicted.total,
    }


def _tried_record(tuning: Tuning, one: Measured) -> dict[str, Any]:
    return {
        **_candidate_record(tuning, one.candidate),
        "num_requests": len(one.generation.sequences),
        "measured": one.counts,
        "measured_s": one.seconds,
    }


def _confirmed_record(tuning: Tuning, one: Confirmed) -> dict[str, Any]:
    return {
        **_candidate_record(tuning, one.candidate),
        "num_requests": len(one.measured.generation.sequences),
        "replayed": None if one.replayed is None else one.replayed.total.counts(one.candidate.max_draft_len or 0),
        "measured": one.measured.counts,
        "batches_s": [[seconds.total for seconds in batches] for batches in one.measured.batches],
        "measured_s": one.measured.seconds,
        "measured_speedup": one.measured_speedup,
        "predicted_s": one.predicted_s,
        "predicted_speedup": one.predicted_speedup,
        "ratio": one.ratio,
    }
