"""Tables of `tune`: every candidate, the best by category, its timing on the engine, and the command to use it."""

from collections.abc import Sequence

from rich.table import Table

from commands.options.drafter_flags import written_flags
from commands.output import Output, number, percent
from commands.tune.document import Tuning, categories_of, stats_of_category
from runtime.drafters.speculation import Speculation
from runtime.stats import RequestStats, sum_stats
from runtime.tuning.live import Confirmation, Measured
from runtime.tuning.replay import Trace
from runtime.tuning.search import Replayed, labels_of

_NUM_SHOWN = 12


def show(tuning: Tuning, output: Output) -> None:
    best = tuning.ranked[0]
    output.result(_tried_line(tuning))
    if len(tuning.replayed) > 1:
        output.result(_replay_table(tuning))
        if categories := categories_of(tuning.traces):
            output.result(_category_table(tuning.traces, best, categories))
    if histogram := best.total.acceptance_histogram:
        counts = ", ".join(f"{i}: {num:,}" for i, num in enumerate(histogram))
        output.result(f"drafts by tokens accepted, {_name(best.candidate)}: {counts}")
    if tuning.tried:
        output.result(_once_table(tuning.tried))
    confirmation = tuning.confirmation
    if confirmation is not None:
        output.result(_live_table(confirmation))
        output.result(
            f"ratio: predicted ÷ measured, after scaling by measured ÷ predicted without a drafter: "
            f"prompts x {confirmation.factors.prompts:.2f}, steps x {confirmation.factors.others:.2f}"
        )
        _show_recommendation(tuning, confirmation, output)
    elif output.quiet:
        output.text(written_flags(best.candidate, tuning.device_ids))


def _show_recommendation(tuning: Tuning, confirmation: Confirmation, output: Output) -> None:
    recommended, profile = confirmation.recommended, tuning.settings.profile
    candidate = recommended.candidate
    if not candidate:
        output.result("recommended: no drafter; none is faster by more than noise")
    else:
        output.result(f"recommended: {_name(candidate)}, {recommended.measured_speedup:.2f}x as fast as no drafter")
    flags = f"--profile {profile}" if profile is not None else written_flags(candidate, tuning.device_ids)
    command = f"specdec run --engine-dir {tuning.settings.engine_dir} {flags}".rstrip()
    output.result(f"to use it: {command} …")
    if output.quiet:
        output.text(flags)


def _tried_line(tuning: Tuning) -> str:
    """Line on the candidates that were replayed, and those that were not."""
    candidates = [one.candidate for one in tuning.replayed]
    lengths = sorted({candidate.max_draft_len or 0 for candidate in candidates if candidate})
    num_tokens = sum(len(trace.output_tokens) for trace in tuning.traces)
    lines = [f"outputs: {len(tuning.traces):,}, of {num_tokens:,} tokens"]
    if screened := tuning.search.screened:
        names = labels_of([one.candidate for one in screened])
        lines.append(f"replayed on {len(screened[0].batches.stats):,} of them, to choose the best: {'; '.join(names)}")
    if lengths:
        lines.append(f"replayed with drafts of up to {lengths[-1]}: {'; '.join(labels_of(candidates))}")
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


def _counts_cells(candidate: Speculation, total: RequestStats) -> list[str]:
    counts = total.counts(candidate.max_draft_len or 0)
    return [
        candidate.label,
        candidate.lengths_label,
        number(counts["tokens_per_step"], 3),
        f"{total.num_accepted_draft_tokens:,}/{total.num_draft_tokens:,}",
        percent(counts["draft_acceptance_rate"]),
    ]


def _once_table(tried: Sequence[Measured]) -> Table:
    """Candidates that cannot be replayed from recorded outputs, and so were run once."""
    title = f"Run once on {len(tried[0].generation.sequences)} requests"
    table = Table(title=title, title_justify="left")
    for column in ("drafter", "draft", "tokens/step", "accepted/drafted", "rate", "measured"):
        table.add_column(column, justify="left" if column == "drafter" else "right", no_wrap=column != "drafter")
    for one in sorted(tried, key=lambda one: one.seconds):
        total = sum_stats(sequence.stats for sequence in one.generation.sequences)
        table.add_row(*_counts_cells(one.candidate, total), _seconds(one.seconds))
    return table


def _drafting(one: Replayed) -> str:
    if not one.candidate:
        return "-"
    return f"{one.batches.draft_time_s / len(one.batches.steps) * 1e6:,.0f} µs"


def _predicted(one: Replayed, none: Replayed) -> list[str]:
    assert one.predicted is not None and none.predicted is not None
    return [_seconds(one.predicted.total), f"{none.predicted.total / one.predicted.total:.2f}x"]


def _seconds(seconds: float) -> str:
    return f"{number(seconds, 2 if seconds < 100 else 0)} s"


def _category_table(traces: Sequence[Trace], one: Replayed, categories: Sequence[str]) -> Table:
    table = Table(title=f"By category, {_name(one.candidate)}", title_justify="left")
    for column in ("category", "outputs", "tokens/step", "accepted/drafted", "rate"):
        table.add_column(column, justify="left" if column == "category" else "right", no_wrap=True)
    for category in categories:
        num_outputs = sum(trace.category == category for trace in traces)
        cells = _counts_cells(one.candidate, stats_of_category(traces, one, category))
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
        counts, candidate = one.measured.counts, one.candidate
        table.add_row(
            candidate.label,
            candidate.lengths_label,
            number(counts["tokens_per_step"], 3),
            percent(counts["draft_acceptance_rate"]),
            "-" if one.predicted_s is None else _seconds(one.predicted_s),
            "-" if one.predicted_speedup is None else f"{one.predicted_speedup:.2f}x",
            _seconds(one.measured.seconds),
            f"{one.measured_speedup:.2f}x",
            number(one.ratio, 2),
        )
    return table


def _name(candidate: Speculation) -> str:
    if not candidate:
        return "no drafter"
    return f"{candidate.label}, drafts {candidate.lengths_label}"
