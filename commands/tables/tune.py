"""What `tune` shows: everything it tried, the best by category, what the engine made of the best, and what to type."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from rich.table import Table

from commands.documents.head import document_head
from commands.output import Output, number, percent
from runtime.stats import RequestStats, sum_stats
from runtime.tuning.candidates import Candidate, drafters_of
from runtime.tuning.prediction import LoopSeconds
from runtime.tuning.profile import drafter_record
from runtime.tuning.replay import Trace
from runtime.tuning.search import Confirmation, Confirmed, Replayed, Search

_NUM_SHOWN = 12


@dataclass(frozen=True)
class Tuning:
    """What was replayed, *no drafter* first, and with an engine what was timed."""

    search: Search
    settings: dict[str, Any]
    confirmation: Confirmation | None = None

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


def show(tuning: Tuning, output: Output) -> None:
    best = tuning.ranked[0]
    output.result(_tried_line(tuning))
    output.result(_replay_table(tuning))
    if categories := _categories(tuning.traces):
        output.result(_category_table(tuning.traces, best, categories))
    if histogram := best.total.acceptance_histogram:
        counts = ", ".join(f"{i}: {num:,}" for i, num in enumerate(histogram))
        output.result(f"drafts by tokens accepted, {_name(best.candidate)}: {counts}")
    confirmation = tuning.confirmation
    if confirmation is not None:
        output.result(_live_table(confirmation))
        output.result(
            f"ratio: predicted ÷ measured, after scaling by what no drafter took to what was predicted for it: "
            f"prompts x {confirmation.factors.prompts:.2f}, steps x {confirmation.factors.others:.2f}"
        )
        _show_recommendation(tuning, confirmation, output)
    elif output.quiet:
        output.text(best.candidate.flags)


def _show_recommendation(tuning: Tuning, confirmation: Confirmation, output: Output) -> None:
    recommended, profile = confirmation.recommended, tuning.settings["profile"]
    candidate = recommended.replayed.candidate
    if candidate.drafter is None:
        output.result("recommended: no drafter; none is faster by more than noise")
    else:
        output.result(f"recommended: {_name(candidate)}, {recommended.measured_speedup:.2f}x as fast as no drafter")
    flags = f"--profile {profile}" if profile is not None else candidate.flags
    command = f"specdec run --engine-dir {tuning.settings['engine_dir']} {flags}".rstrip()
    output.result(f"to use it: {command} …")
    if output.quiet:
        output.text(flags)


def _tried_line(tuning: Tuning) -> str:
    """What was replayed, and what was not."""
    candidates = [one.candidate for one in tuning.replayed]
    lengths = sorted({candidate.max_draft_len for candidate in candidates if candidate.drafter})
    num_tokens = sum(len(trace.output_tokens) for trace in tuning.traces)
    lines = [f"outputs: {len(tuning.traces):,}, of {num_tokens:,} tokens"]
    if screened := tuning.search.screened:
        names = drafters_of([one.candidate for one in screened])
        lines.append(f"replayed on {len(screened[0].batches.stats):,} of them, to choose the best: {'; '.join(names)}")
    lines.append(f"replayed with drafts of up to {lengths[-1]}: {'; '.join(drafters_of(candidates))}")
    if lengths[:-1]:
        lines.append(f"the best also with drafts of up to {', '.join(map(str, lengths[:-1]))}")
    return "\n".join(lines)


def _replay_table(tuning: Tuning) -> Table:
    has_costs = tuning.confirmation is not None
    ranked = tuning.ranked
    shown = ranked[:_NUM_SHOWN]
    none = tuning.replayed[0]
    if none not in shown:
        shown.append(none)
    table = Table(title=f"Replayed: the best {len(shown)} of {len(ranked)}", title_justify="left")
    for column in ("drafter", "draft", "tokens/step", "accepted/drafted", "rate", "drafting, per step"):
        table.add_column(column, justify="left" if column == "drafter" else "right", no_wrap=column != "drafter")
    if has_costs:
        table.add_column("predicted", justify="right")
        table.add_column("speedup", justify="right")
    for one in shown:
        table.add_row(
            *_counts_cells(one.candidate, one.total), _drafting(one), *(_predicted(one, none) if has_costs else ())
        )
    return table


def _counts_cells(candidate: Candidate, total: RequestStats) -> list[str]:
    counts = total.counts(candidate.max_draft_len)
    return [
        candidate.drafter_name,
        candidate.draft_name,
        number(counts["tokens_per_step"], 3),
        f"{total.num_accepted_draft_tokens:,}/{total.num_draft_tokens:,}",
        percent(counts["draft_acceptance_rate"]),
    ]


def _drafting(one: Replayed) -> str:
    if one.candidate.drafter is None:
        return "-"
    return f"{one.batches.draft_time_s / len(one.batches.steps) * 1e6:,.0f} µs"


def _predicted(one: Replayed, none: Replayed) -> list[str]:
    assert one.predicted is not None and none.predicted is not None
    return [_seconds(one.predicted.total), f"{none.predicted.total / one.predicted.total:.2f}x"]


def _seconds(seconds: float) -> str:
    return f"{number(seconds, 2 if seconds < 100 else 0)} s"


def _categories(traces: Sequence[Trace]) -> list[str]:
    return sorted({trace.category for trace in traces if trace.category is not None})


def _of_category(traces: Sequence[Trace], one: Replayed, category: str) -> RequestStats:
    pairs = zip(traces, one.batches.stats, strict=True)
    return sum_stats(stats for trace, stats in pairs if trace.category == category)


def _category_table(traces: Sequence[Trace], one: Replayed, categories: Sequence[str]) -> Table:
    table = Table(title=f"By category, {_name(one.candidate)}", title_justify="left")
    for column in ("category", "outputs", "tokens/step", "accepted/drafted", "rate"):
        table.add_column(column, justify="left" if column == "category" else "right", no_wrap=True)
    for category in categories:
        num_outputs = sum(trace.category == category for trace in traces)
        cells = _counts_cells(one.candidate, _of_category(traces, one, category))
        table.add_row(category, str(num_outputs), *cells[2:])
    return table


def _live_table(confirmation: Confirmation) -> Table:
    none = confirmation.confirmed[0].measured
    title = f"Timed on {len(none.generation.sequences)} requests, {len(none.batches)} times in turn; medians"
    table = Table(title=title, title_justify="left")
    columns = ("drafter", "draft", "tokens/step", "rate", "predicted", "speedup", "measured", "speedup", "ratio")
    for column in columns:
        table.add_column(column, justify="left" if column == "drafter" else "right", no_wrap=True)
    for one in confirmation.confirmed:
        counts, candidate = one.measured.counts, one.replayed.candidate
        table.add_row(
            candidate.drafter_name,
            candidate.draft_name,
            number(counts["tokens_per_step"], 3),
            percent(counts["draft_acceptance_rate"]),
            _seconds(one.predicted_s),
            f"{one.predicted_speedup:.2f}x",
            _seconds(one.measured.seconds),
            f"{one.measured_speedup:.2f}x",
            number(one.ratio, 2),
        )
    return table


def _name(candidate: Candidate) -> str:
    if candidate.drafter is None:
        return "no drafter"
    return f"{candidate.drafter_name}, drafts {candidate.draft_name}"


def make_document(tuning: Tuning) -> dict[str, Any]:
    confirmation = tuning.confirmation
    return {
        **document_head("tune"),
        "num_traces": len(tuning.traces),
        "num_output_tokens": sum(len(trace.output_tokens) for trace in tuning.traces),
        "mean_prompt_len": mean(len(trace.prompt_tokens) for trace in tuning.traces),
        "screened": [_screened_record(one) for one in sorted(tuning.search.screened, key=lambda one: one.rank)],
        "candidates": [_replayed_record(tuning, one) for one in tuning.ranked],
        "factors": None if confirmation is None else _parts(confirmation.factors),
        "timed": None if confirmation is None else [_confirmed_record(one) for one in confirmation.confirmed],
        "recommended": None if confirmation is None else _candidate_record(confirmation.recommended.replayed.candidate),
        "settings": tuning.settings,
    }


def _parts(seconds: LoopSeconds) -> dict[str, float]:
    return {"prompts": seconds.prompts, "steps": seconds.others}


def _candidate_record(candidate: Candidate) -> dict[str, Any]:
    return {
        "drafter": drafter_record(candidate.drafter),
        "draft_len_mode": candidate.draft_len_mode,
        "flags": candidate.flags,
    }


def _screened_record(one: Replayed) -> dict[str, Any]:
    return {
        **_candidate_record(one.candidate),
        "num_traces": len(one.batches.stats),
        "total": one.total.counts(one.candidate.max_draft_len),
    }


def _replayed_record(tuning: Tuning, one: Replayed) -> dict[str, Any]:
    max_draft_len = one.candidate.max_draft_len
    return {
        **_candidate_record(one.candidate),
        "total": one.total.counts(max_draft_len),
        "by_category": {
            category: _of_category(tuning.traces, one, category).counts(max_draft_len)
            for category in _categories(tuning.traces)
        },
        "num_iterations": len(one.batches.steps),
        "draft_time_s": one.batches.draft_time_s,
        "predicted_s": None if one.predicted is None else one.predicted.total,
    }


def _confirmed_record(one: Confirmed) -> dict[str, Any]:
    return {
        **_candidate_record(one.replayed.candidate),
        "num_requests": len(one.measured.generation.sequences),
        "replayed": one.replayed.total.counts(one.replayed.candidate.max_draft_len),
        "measured": one.measured.counts,
        "batches_s": [[seconds.total for seconds in batches] for batches in one.measured.batches],
        "measured_s": one.measured.seconds,
        "measured_speedup": one.measured_speedup,
        "predicted_s": one.predicted_s,
        "predicted_speedup": one.predicted_speedup,
        "ratio": one.ratio,
    }
