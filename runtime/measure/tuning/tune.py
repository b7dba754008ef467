"""Tuning: from recorded outputs, or prompts, to a recommended drafter and draft length.

Lookups are replayed, and the best of them are timed. Drafters with a model cannot be replayed, so they are run.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace

from runtime.core.request import Request
from runtime.drafters.protocol import check_request
from runtime.drafters.spec import DrafterSpec
from runtime.drafters.specs import DRAFTERS
from runtime.drafters.speculation import NO_SPECULATION, Speculation
from runtime.llm import LLM
from runtime.loop.compatibility import check_corpora
from runtime.measure.tuning.live import Confirmation, LiveRun, Measured, confirm, spread
from runtime.measure.tuning.search import (
    DRAFT_LENS,
    NUM_LIVE,
    Advance,
    Cost,
    Replayer,
    Search,
    all_lengths,
    best_candidates,
    fixed,
    is_replayable,
)
from runtime.text.trace_lines import Trace
from runtime.util.errors import SpecDecError, SpecDecWarning, UsageError

_LARGEST_FACTOR = 1.25
"""Largest ratio between the machine's speeds now and at the build that gives no warning."""
_LONGEST_DRAFT = 1000
"""Longest draft that is tried without an engine: nothing else limits a replay's drafts."""

Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""Opens a display of progress with this name, for this number of items."""


@dataclass(frozen=True)
class Scope:
    """Candidates to try. `named` is the drafter to tune; without drafters in it, the grid is tried. `max_draft_len`
    None: up to 10.

    Together with the grid these are tried: the self-draft copy, if the engine has one, and a draft `model` or trained
    head, each alone and with the best lookup.
    """

    named: Speculation = NO_SPECULATION
    model: DrafterSpec | None = None
    tries_public: bool = False
    max_draft_len: int | None = None

    def longest_draft(self, engine_max_draft_len: int | None) -> int:
        """The longest draft to try. SpecDecError if the engine takes no draft of this length; without an engine
        (`engine_max_draft_len` None), UsageError beyond 1,000 tokens.
        """
        wanted = self.max_draft_len or self.named.max_draft_len or None
        if engine_max_draft_len is None:
            if wanted is not None and wanted > _LONGEST_DRAFT:
                raise UsageError(
                    f"drafts of more than {_LONGEST_DRAFT} tokens are not replayed: {wanted}", hint="lower it"
                )
            return wanted or DRAFT_LENS[-1]
        if engine_max_draft_len == 0:
            raise SpecDecError(
                "the engine was built without drafts, so there is nothing to tune",
                hint="build it with a max_draft_len of 10",
                code="no_drafts_to_tune",
            )
        if wanted is not None and wanted > engine_max_draft_len:
            raise SpecDecError(
                f"the engine takes drafts of at most {engine_max_draft_len} tokens, and this asks for: {wanted}",
                hint="lower it, or build with a larger max_draft_len",
                code="tune_draft_len",
            )
        return wanted or min(DRAFT_LENS[-1], engine_max_draft_len)


@dataclass(frozen=True)
class Answered:
    """Requests that fit an engine, and its answers, generated now or recorded."""

    requests: list[Request]
    traces: list[Trace]
    max_new_tokens: int | None
    """The budget of all requests; None if each request has its own, which is its output's length."""


def replay_alone(traces: Sequence[Trace], scope: Scope, progress: Progress) -> Search:
    """A finished search by counts alone, without an engine. Only for drafters that can be replayed."""
    assert is_replayable(scope.named)
    return _search(Replayer(traces), scope, scope.longest_draft(None), progress)


def check_tuning(llm: LLM, scope: Scope, batch_size: int) -> None:
    """SpecDecError for candidates that cannot be tuned on this engine."""
    scope.longest_draft(llm.engine.max_draft_len)
    if batch_size > llm.engine.max_batch_size:
        raise SpecDecError(
            f"the batch size exceeds the engine's max_batch_size {llm.engine.max_batch_size}: {batch_size}",
            hint="lower it, or raise `max_batch_size`",
            code="batch_size",
            max_batch_size=llm.engine.max_batch_size,
            batch_size=batch_size,
        )
    check_corpora(scope.named, llm.tokenizer, llm.engine.config.vocab_size)


def fitting_requests(llm: LLM, requests: Sequence[Request], scope: Scope) -> list[int]:
    """Indices of the requests that the engine and the drafter can take; a warning counts the others. SpecDecError, with
    the first one's reason, if there are no such requests.
    """
    with ExitStack() as stack:
        speculation = scope.named.in_mode("auto" if scope.named else "fixed")  # "auto" needs step costs
        session = llm.open_session(speculation, stack)
        drafter = session.opened.drafter if session.opened is not None else None
        kept, first_error = [], None
        for i, request in enumerate(requests):
            try:
                session.engine.check_lengths(request)
                check_request(drafter, request)
                kept.append(i)
            except SpecDecError as error:
                first_error = first_error or error
    if first_error and not kept:
        raise SpecDecError(
            f"none of the {len(requests)} requests fits the engine; the first: {first_error.message}",
            hint="give shorter prompts, or raise `max_seq_len`",
            code="none_fits",
        )
    if first_error:
        num_left_out = len(requests) - len(kept)
        _warn(f"left out, because they do not fit the engine: {num_left_out} of {len(requests)}")
    return kept


def answer(llm: LLM, requests: Sequence[Request], categories: Sequence[str | None], progress: Progress) -> list[Trace]:
    """Traces of the engine's own answers, without a drafter."""
    session = llm.session()
    session.check_requests(requests)
    traces = []
    with progress("answering", len(requests)) as advance:
        for request, category in zip(requests, categories, strict=True):
            (sequence,) = session.run([request]).sequences
            traces.append(Trace(request.prompt_tokens, tuple(sequence.output_tokens), category))
            advance()
    return traces


@dataclass(frozen=True)
class Timing:
    """Settings of the timing: the number of requests at a time, and the number of all requests."""

    batch_size: int = 1
    num_live_prompts: int = 8


@dataclass(frozen=True)
class Tuned:
    """Candidates that were replayed, candidates that were run once, and the results for the best."""

    search: Search
    tried: list[Measured]
    confirmation: Confirmation


def tune(llm: LLM, answered: Answered, scope: Scope, timing: Timing, progress: Progress) -> Tuned:
    """Tune: predict candidates by replay, or run them once; then time the best in turn, and recommend one."""
    llm.measure_costs()
    cost, end_ids = Cost.of(llm.engine), answered.requests[0].end_ids
    replayer = Replayer(answered.traces, timing.batch_size, cost, end_ids, answered.max_new_tokens)
    longest = scope.longest_draft(llm.engine.max_draft_len)
    search = _search(replayer, scope, longest, progress)
    chosen = spread(len(answered.requests), timing.num_live_prompts)
    live = LiveRun(llm, [replace(answered.requests[i], id=n) for n, i in enumerate(chosen)], timing.batch_size)
    best = best_candidates(search.replayed, NUM_LIVE)
    tried = _try_models(live, scope, longest, best, progress)
    sample = replace(replayer, traces=[answered.traces[i] for i in chosen])
    fastest = [one.candidate for one in sorted(tried, key=lambda one: one.seconds)[:NUM_LIVE]]
    return Tuned(search, tried, _confirm(live, sample, [NO_SPECULATION, *best], fastest, progress))


def _search(replayer: Replayer, scope: Scope, max_draft_len: int, progress: Progress) -> Search:
    search = Search(replayer, max_draft_len, scope.named, scope.tries_public)
    with progress("replaying", search.most) as advance:
        search.run(advance)
    return search


def _try_models(
    live: LiveRun, scope: Scope, max_draft_len: int, lookups: Sequence[Speculation], progress: Progress
) -> list[Measured]:
    """Run candidates that cannot be replayed, with drafts of each length: the named drafter, or the self-draft copy and
    the model.

    Copy and model also run together with the best lookup, once their own best draft length is known.
    """
    if scope.named:
        owns = [] if is_replayable(scope.named) else [scope.named]
    else:
        has_copy = live.llm.engine.config.build_config.self_draft is not None
        owns = [fixed(spec(max_draft_len)) for spec in DRAFTERS.values() if has_copy and spec.needs_copy]  # type: ignore[call-arg]
        owns += [fixed(scope.model).with_length(max_draft_len)] if scope.model else []
    tried: list[Measured] = []
    for own in owns:
        candidates = all_lengths(own, max_draft_len)
        with progress("trying", len(candidates)) as advance:
            runs = live.try_once(candidates, advance)
        tried += runs
        chains = [] if scope.named else _chains(lookups, min(runs, key=lambda one: one.seconds).candidate)
        with progress("trying", len(chains)) as advance:
            tried += live.try_once(chains, advance)
    return tried


def _chains(lookups: Sequence[Speculation], own: Speculation) -> list[Speculation]:
    """Candidates that join the best lookup and `own`, the copy or draft model; empty if there is no lookup."""
    best = next((one.lookup for one in lookups if one.lookup is not None), None)
    if best is None:
        return []
    chain = fixed(best, *own)
    return [chain, chain.in_mode("auto")]


def _confirm(
    live: LiveRun,
    sample: Replayer,
    replayable: Sequence[Speculation],
    others: Sequence[Speculation],
    progress: Progress,
) -> Confirmation:
    """The best candidates on some of the requests: run, and, if possible, replayed once more on the same requests."""
    replayed = [sample.replay(candidate) for candidate in replayable]
    with progress("timing", live.num_rounds) as advance:
        measured = live.measure([*replayable, *others], advance)
    answers = [tuple(sequence.output_tokens) for sequence in measured[0].generation.sequences]
    num_other = sum(one != trace.output_tokens for one, trace in zip(answers, sample.traces, strict=True))
    if num_other:  # the traces may come from another model
        _warn(f"the engine does not answer as in the traces, so predictions are off: {num_other} of {len(answers)}")
    confirmation, model = confirm(replayed, measured), live.llm.bundle.model
    anew = "build the engine again"
    if model is not None:
        anew = f"`specdec rm {model}` has the next run {anew}"
    for what, factor in (("prompts", confirmation.factors.prompts), ("steps", confirmation.factors.others)):
        if not 1 / _LARGEST_FACTOR <= factor <= _LARGEST_FACTOR:
            _warn(f"{what} take {factor:.2f} times as long as when they were measured; if this persists, {anew}")
    return confirmation


def _warn(message: str) -> None:
    warnings.warn(message, SpecDecWarning, stacklevel=3)
