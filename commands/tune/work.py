"""Work of `tune` once its flags are checked: measures candidates, and shows the results."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import mean
from typing import Any

from rich.table import Table

from commands.inputs.prompts import Prompt, without_padding
from commands.options.drafter_flags import written_flags
from commands.options.engine_choice import EngineChoice
from commands.options.sessions import engines_made, open_engine
from commands.options.shared import check_has_more_bits, end_id_params
from commands.output.documents.records import Counts, measured_head
from commands.output.documents.settings import EngineRecord
from commands.output.html.page import write_page
from commands.output.output import Output, number, percent
from commands.tune.document import (
    Candidate,
    Factors,
    ReplayedCandidate,
    Screened,
    Timed,
    Tried,
    TuneDocument,
    TuneSettings,
)
from commands.tune.flags import DEFAULT_LIVE_PROMPTS, DEFAULT_OUTPUT_LEN, TuneInputs, TuneOptions
from commands.tune.page import tune_page
from runtime.builder.convert import plan_conversion
from runtime.builder.engine_options import precision_of
from runtime.builder.profile import (
    Figures,
    Profile,
    ProfileEngine,
    ProfileModel,
    drafter_record,
    engine_digest,
    model_digest,
    save_profile,
    write_profile,
)
from runtime.checkpoint.bundle import read_bundle
from runtime.checkpoint.config import EngineConfig, InEightBits
from runtime.checkpoint.resolve import resolve_model
from runtime.core.params import greedy_params
from runtime.core.request import Request
from runtime.core.stats import RequestStats, sum_stats
from runtime.drafters.lists import Devices
from runtime.drafters.speculation import Speculation
from runtime.llm import LLM
from runtime.loop.compatibility import check_corpora
from runtime.measure.activations import compare_activations
from runtime.measure.tuning.live import Confirmation, Confirmed, Measured
from runtime.measure.tuning.search import Replayed, Search, labels_of
from runtime.measure.tuning.tune import (
    Answered,
    Scope,
    Timing,
    answer,
    check_tuning,
    fitting_requests,
    replay_alone,
    tune,
)
from runtime.text.text import open_tokenizer, tokenizer_vocab_size
from runtime.text.trace_lines import Trace
from runtime.text.traces import read_traces
from runtime.util.errors import SpecDecWarning


@dataclass(frozen=True)
class Tuning:
    """Results of a search: the replayed candidates, beginning with *no drafter*; and, with an engine, the candidates
    that were run once, and the candidates that were timed.
    """

    search: Search
    settings: TuneSettings
    tried: Sequence[Measured] = ()
    confirmation: Confirmation | None = None
    model_dir: str | None = None
    """Model whose engine was tuned; None for an engine that `build` made."""
    engine: EngineRecord | None = None
    in_eight_bits: InEightBits | None = None

    @property
    def device_ids(self) -> tuple[int, ...]:
        """The target's devices; if outputs were only replayed, the first device, as in all examples."""
        return tuple(self.settings.device_ids or (0,))

    @property
    def traces(self) -> Sequence[Trace]:
        return self.search.replayer.traces

    @property
    def replayed(self) -> Sequence[Replayed]:
        return self.search.replayed

    @property
    def ranked(self) -> list[Replayed]:
        """Candidates from best to worst; without an engine, by tokens per step."""
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
        **measured_head("tune"),
        num_traces=len(tuning.traces),
        num_output_tokens=sum(len(trace.output_tokens) for trace in tuning.traces),
        mean_prompt_len=mean(len(trace.prompt_tokens) for trace in tuning.traces),
        screened=[_screened(tuning, one) for one in sorted(tuning.search.screened, key=lambda one: one.rank)],
        candidates=[_replayed(tuning, one) for one in tuning.ranked],
        tried=[_tried(tuning, one) for one in tuning.tried],
        factors=factors,
        timed=timed,
        recommended=recommended,
        in_eight_bits=tuning.in_eight_bits,
        settings=tuning.settings,
        engine=tuning.engine,
    )
    return document.as_json()


def _candidate(tuning: Tuning, candidate: Speculation) -> dict[str, Any]:
    """The fields of `Candidate`."""
    return {
        "label": _name(candidate),
        "drafter": _with_device(drafter_record(candidate), tuning.device_ids[0]),
        "draft_len_mode": candidate.draft_len_mode,
        "flags": written_flags(candidate, tuning.device_ids),
    }


def _with_device(record: dict[str, Any] | None, device_id: int) -> dict[str, Any] | None:
    """The record with a device. Lookups and the self-draft copy run on the target's first device; a draft model has its
    own.
    """
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


_NUM_SHOWN = 12
_FEW_REQUESTS = 4


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
    recommended = confirmation.recommended
    candidate = recommended.candidate
    if not candidate:
        output.result(f"recommended: no drafter; none is faster by more than noise{_spread(confirmation)}")
    else:
        output.result(f"recommended: {_name(candidate)}, {recommended.measured_speedup:.2f}x as fast as no drafter")
    if (num := len(recommended.measured.generation.sequences)) < _FEW_REQUESTS:
        timed = "one request was timed" if num == 1 else f"{num} requests were timed"
        output.warning(
            f"{timed}, too few to tell small gains from noise, or to speak for other prompts; give more prompts"
        )
    output.result(f"to use it: {_use_of(tuning, confirmation)} …")
    if output.quiet:
        output.text(_flags_of(tuning, candidate))


def _spread(confirmation: Confirmation) -> str:
    """The gain of the fastest drafter, with its least and largest gain in a batch."""
    none, *others = confirmation.confirmed
    if not others:
        return ""
    best = max(others, key=lambda one: one.measured_speedup)
    pairs = zip(chain(*none.measured.batches), chain(*best.measured.batches), strict=True)
    gains = [without.total / drafted.total for without, drafted in pairs]
    return (
        f" ({_name(best.candidate)}: {best.measured_speedup:.2f}x, in single batches {min(gains):.2f}x to "
        f"{max(gains):.2f}x)"
    )


def _use_of(tuning: Tuning, confirmation: Confirmation) -> str:
    """The command that drafts as recommended."""
    where = tuning.model_dir or f"--engine-dir {tuning.settings.engine_dir}"
    return f"specdec run {where} {_flags_of(tuning, confirmation.recommended.candidate)}".rstrip()


def _flags_of(tuning: Tuning, candidate: Speculation) -> str:
    profile = tuning.settings.profile
    return f"--profile {profile}" if profile is not None else written_flags(candidate, tuning.device_ids)


def _tried_line(tuning: Tuning) -> str:
    """A line with the number of candidates that were replayed, and the number of candidates that were not."""
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
    """A table of the candidates that cannot be replayed from recorded outputs, and were run once instead."""
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
    num = len(none.generation.sequences)
    title = f"Timed on {num} request{'s' if num > 1 else ''}, {len(none.batches)} times in turn; medians"
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


def tune_traces(inputs: TuneInputs, options: TuneOptions, scope: Scope, output: Output) -> None:
    """Tune without an engine: show the counts that each candidate would have had."""
    assert inputs.traces is not None
    tokenizer = open_tokenizer(inputs.tokenizer_dir) if inputs.tokenizer_dir is not None else None
    vocab_size = tokenizer_vocab_size(tokenizer) if tokenizer is not None else None
    if tokenizer is not None and vocab_size is not None:
        check_corpora(scope.named, tokenizer, vocab_size)
    scope.longest_draft(None)
    search = replay_alone(read_traces(inputs.traces, tokenizer, vocab_size), scope, output.progress)
    _tell(Tuning(search, _settings(inputs, options, None)), options, output)


def tune_engine(
    choice: EngineChoice,
    inputs: TuneInputs,
    options: TuneOptions,
    scope: Scope,
    prompts: list[Prompt],
    output: Output,
) -> None:
    """Tune with an engine: predict, time the best, recommend."""
    bundle = choice.bundle or read_bundle(choice.engine_dir)
    named = scope.named.with_drafters(one.with_own_devices() for one in scope.named)  # for flags and a profile
    model = None if scope.model is None else scope.model.with_own_devices()
    scope = replace(scope, named=named, model=model)
    scope.longest_draft(bundle.config.build_config.max_draft_len)
    timing = Timing(options.batch_size or 1, options.num_live_prompts or DEFAULT_LIVE_PROMPTS)
    with open_engine(choice) as llm:
        check_tuning(llm, scope, timing.batch_size)
        answered = _answered(llm, inputs, options, scope, prompts, output)
        tuned = tune(llm, answered, scope, timing, output.progress)
        in_eight_bits = _in_eight_bits(choice, llm, answered, output) if options.compare_activations else None
    confirmation = tuned.confirmation
    settings = _settings(inputs, options, llm.device_ids)
    engine = EngineRecord.of(bundle)
    tuning = Tuning(tuned.search, settings, tuned.tried, confirmation, choice.model_dir, engine, in_eight_bits)
    if options.output is not None or options.save:
        profile = _profile(inputs, bundle.config, confirmation, timing.batch_size)
        if options.output is not None:
            write_profile(options.output, profile)
        if options.save and choice.model_dir is not None:
            save_profile(choice.model_dir, profile)
    _tell(tuning, options, output)
    if options.save:
        how = "drafts so from now on" if confirmation.recommended.candidate else "drafts nothing unless a flag says so"
        output.result(f"saved as the default of {choice.model_dir}: `specdec run {choice.model_dir}` {how}")


def check_has_activations(choice: EngineChoice) -> None:
    """UsageError for a model that `--compare-activations` cannot compare, before its engine is built."""
    assert choice.model_dir is not None
    with warnings.catch_warnings(action="ignore", category=SpecDecWarning):  # the build tells them
        planned = plan_conversion(resolve_model(choice.model_dir), None, precision_of(choice.built_for.options))
    check_has_more_bits(planned.config.quantization)


def _in_eight_bits(choice: EngineChoice, llm: LLM, answered: Answered, output: Output) -> InEightBits:
    """The same answers by a second engine of the model, whose activations have 8 bits, for comparison."""
    in_eight = replace(choice.models, engines=choice.built_for.changed(activations="int8"))
    with engines_made(replace(choice, models=in_eight), output) as made, open_engine(made) as eight:
        return compare_activations(llm, eight, answered.traces)


def _tell(tuning: Tuning, options: TuneOptions, output: Output) -> None:
    """Show the tables, and write the page and the document."""
    show(tuning, output)
    if tuning.in_eight_bits is not None:
        output.result(f"`--activations int8`: {tuning.in_eight_bits}")
    document = tune_document(tuning)
    if options.report is not None:
        use = None if tuning.confirmation is None else _use_of(tuning, tuning.confirmation)
        write_page(options.report, tune_page(document, use, tuning.in_eight_bits), output)
    output.document(document)


def _answered(
    llm: LLM, inputs: TuneInputs, options: TuneOptions, scope: Scope, prompts: list[Prompt], output: Output
) -> Answered:
    """The requests that fit the engine, and the engine's answers, generated now or recorded."""
    max_tokens = options.max_output_len or DEFAULT_OUTPUT_LEN
    template = llm.request_of(greedy_params(max_tokens, **end_id_params(options.end_id)))
    if inputs.traces is not None:
        recorded = read_traces(inputs.traces, llm.tokenizer, llm.engine.config.vocab_size)
        requests = [
            replace(template.with_prompt(i, t.prompt_tokens), max_new_tokens=len(t.output_tokens))
            for i, t in enumerate(recorded)
        ]
        kept = fitting_requests(llm, requests, scope)
        return Answered(_renumbered(requests, kept), [recorded[i] for i in kept], None)
    prompts = without_padding(prompts, inputs.input_file, template.end_ids)
    requests = [template.with_prompt(i, llm.encode(one.content_by(llm))[0]) for i, one in enumerate(prompts)]
    kept = fitting_requests(llm, requests, scope)
    requests = _renumbered(requests, kept)
    traces = answer(llm, requests, [prompts[i].category for i in kept], output.progress)
    return Answered(requests, traces, max_tokens)


def _renumbered(requests: list[Request], kept: list[int]) -> list[Request]:
    return [replace(requests[i], id=new_id) for new_id, i in enumerate(kept)]


def _profile(inputs: TuneInputs, config: EngineConfig, confirmation: Confirmation, batch_size: int) -> Profile:
    model_dir = inputs.model.model_dir
    return Profile(
        ProfileEngine(str(inputs.engine_dir), engine_digest(config)),
        confirmation.recommended.candidate,
        _figures(confirmation, batch_size),
        None if model_dir is None else ProfileModel(model_dir, model_digest(model_dir)),
    )


def _figures(confirmation: Confirmation, batch_size: int) -> Figures:
    recommended = confirmation.recommended
    counts = recommended.measured.counts
    return Figures(
        len(recommended.measured.generation.sequences),
        batch_size,
        counts["tokens_per_step"],
        counts["draft_acceptance_rate"],
        recommended.predicted_s,
        recommended.predicted_speedup,
        recommended.measured.seconds,
        recommended.measured_speedup,
    )


def _settings(inputs: TuneInputs, options: TuneOptions, device_ids: Devices) -> TuneSettings:
    has_engine, has_traces = inputs.engine_dir is not None, inputs.traces is not None
    return TuneSettings(
        engine_dir=str(inputs.engine_dir) if has_engine else None,
        device_ids=device_ids,
        traces=str(inputs.traces) if has_traces else None,
        max_output_len=None if has_traces else options.max_output_len or DEFAULT_OUTPUT_LEN,
        batch_size=options.batch_size or 1,
        num_live_prompts=(options.num_live_prompts or DEFAULT_LIVE_PROMPTS) if has_engine else None,
        profile=None if options.output is None else str(options.output),
    )
