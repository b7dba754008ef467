"""What `tune` does, from traces or prompts to a recommendation: with an engine, or by replay alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from commands.inputs.prompts import Prompt, read_prompts
from commands.inputs.traces import read_traces
from commands.output import Output
from commands.tables.tune import Tuning, make_document, show
from runtime.bundle import read_engine_config
from runtime.costs import CostModel
from runtime.drafters.opening import check_corpora, check_corpus_files
from runtime.engine import KVCacheConfig
from runtime.errors import SpecDecError, UsageError
from runtime.request import Request
from runtime.sampling import GREEDY
from runtime.session import Session, SessionSettings, open_session
from runtime.text import encode, open_tokenizer, tokenizer_vocab_size
from runtime.tuning.candidates import DRAFT_LENS, Candidate, LookupSettings
from runtime.tuning.profile import Figures, Profile, ProfileEngine, engine_digest, write_profile
from runtime.tuning.replay import Trace
from runtime.tuning.search import (
    Confirmation,
    Cost,
    LiveRun,
    Measured,
    Replayer,
    Search,
    best_candidates,
    confirm,
    fitting,
    spread,
)

_LARGEST_FACTOR = 1.25
"""By which the machine may differ from when its steps were measured before it is worth a warning."""
_LONGEST_DRAFT = 1000
"""Without an engine nothing else bounds the drafts that a replay proposes at every position."""


@dataclass(frozen=True)
class Job:
    """The flags, checked. `named` is the one drafter to tune, None for the grid."""

    traces: Path | None
    prompts: list[Prompt]
    input_file: Path | None
    tokenizer_dir: Path | None
    max_output_len: int
    end_id: int | None
    batch_size: int
    num_live_prompts: int
    max_draft_len: int | None
    named: LookupSettings | None
    tries_public: bool
    profile: Path | None

    def longest_draft(self, engine_max_draft_len: int | None) -> int:
        """The longest draft to try; SpecDecError if the engine takes no such."""
        wanted = self.max_draft_len or (self.named.max_draft_len if self.named else None)
        if engine_max_draft_len is None:
            if wanted is not None and wanted > _LONGEST_DRAFT:
                raise UsageError(
                    f"drafts of more than {_LONGEST_DRAFT} tokens are not replayed: {wanted}", hint="lower it"
                )
            return wanted or DRAFT_LENS[-1]
        if engine_max_draft_len == 0:
            raise SpecDecError(
                "the engine was built without drafts, so there is nothing to tune",
                hint="build it with `--speculative-decoding-mode draft_tokens_external --use-paged-context-fmha enable "
                "--max-draft-len 10`",
            )
        if wanted is not None and wanted > engine_max_draft_len:
            raise SpecDecError(
                f"the engine takes drafts of at most {engine_max_draft_len} tokens, and this asks for: {wanted}",
                hint="lower it, or build with a larger `--max-draft-len`",
            )
        return wanted or min(DRAFT_LENS[-1], engine_max_draft_len)


def tune_traces(job: Job, output: Output) -> None:
    """Without an engine: what each candidate would have counted."""
    assert job.traces is not None
    check_corpus_files(job.named)
    tokenizer = open_tokenizer(job.tokenizer_dir) if job.tokenizer_dir is not None else None
    vocab_size = tokenizer_vocab_size(tokenizer) if tokenizer is not None else None
    if tokenizer is not None and vocab_size is not None:
        check_corpora(job.named, tokenizer, vocab_size)
    max_draft_len = job.longest_draft(None)
    traces = read_traces(job.traces, tokenizer, vocab_size)
    search = _search(Replayer(traces), job, max_draft_len, output)
    tuning = Tuning(search, _settings(job, None))
    show(tuning, output)
    output.document(make_document(tuning))


def tune_engine(engine_dir: Path, job: Job, output: Output) -> None:
    """With an engine: predict, time the best, recommend."""
    config = read_engine_config(engine_dir)
    max_draft_len = job.longest_draft(config.build_config.max_draft_len)
    costs = CostModel(config.step_costs, config.host_s)
    if job.batch_size > config.build_config.max_batch_size:
        raise SpecDecError(
            f"`--batch-size` exceeds the engine's max_batch_size {config.build_config.max_batch_size}: "
            f"{job.batch_size}",
            hint="lower it, or build with a larger `--max-batch-size`",
        )
    check_corpus_files(job.named)
    settings = SessionSettings(engine_dir, job.tokenizer_dir, None, GREEDY, KVCacheConfig(), job.end_id, [], [])
    with open_session(settings) as session:
        check_corpora(job.named, session.tokenizer, config.vocab_size)
        requests, traces = _requests(session, job, output)
        cost = Cost(costs, session.engine.max_num_tokens)
        max_new_tokens = None if job.traces is not None else job.max_output_len
        replayer = Replayer(traces, job.batch_size, cost, session.end_ids, max_new_tokens)
        search = _search(replayer, job, max_draft_len, output)
        confirmation = _confirm(session, requests, replayer, best_candidates(search.replayed), job, output)
        tuning = Tuning(search, _settings(job, engine_dir), confirmation)
        recommended = confirmation.recommended
        if job.profile is not None:
            identity = ProfileEngine(str(engine_dir), engine_digest(config))
            figures = _figures(tuning, job.batch_size)
            candidate = recommended.replayed.candidate
            write_profile(job.profile, Profile(identity, candidate.drafter, candidate.draft_len_mode, figures))
    show(tuning, output)
    output.document(make_document(tuning))


def _search(replayer: Replayer, job: Job, max_draft_len: int, output: Output) -> Search:
    search = Search(replayer, max_draft_len, job.named, job.tries_public)
    with output.progress("replaying", search.most) as advance:
        search.run(advance)
    return search


def _requests(session: Session, job: Job, output: Output) -> tuple[list[Request], list[Trace]]:
    """The requests that fit the engine, and what it answers, or was recorded to have answered."""
    if job.traces is not None:
        recorded = read_traces(job.traces, session.tokenizer, session.engine.config.vocab_size)
        requests = [session.request(i, t.prompt_tokens, len(t.output_tokens)) for i, t in enumerate(recorded)]
    else:
        prompts = job.prompts
        if job.input_file is not None and job.input_file.suffix.lower() == ".npy" and session.end_ids:
            prompts = read_prompts([], job.input_file, pad_id=min(session.end_ids))
        requests = [
            session.request(i, encode(prompt, session.tokenizer, None)[0], job.max_output_len)
            for i, prompt in enumerate(prompts)
        ]
    kept = fitting(session, requests)
    if len(kept) < len(requests):
        output.warning(f"left out, because they do not fit the engine: {len(requests) - len(kept)} of {len(requests)}")
    requests = [replace(requests[i], id=new_id) for new_id, i in enumerate(kept)]
    if job.traces is not None:
        return requests, [recorded[i] for i in kept]
    return requests, _answer(session, requests, [prompts[i].category for i in kept], output)


def _answer(
    session: Session, requests: Sequence[Request], categories: Sequence[str | None], output: Output
) -> list[Trace]:
    """Traces of the engine's own answers, without a drafter."""
    session.check_requests(requests)
    traces = []
    with output.progress("answering", len(requests)) as advance:
        for request, category in zip(requests, categories, strict=True):
            (sequence,) = session.run([request], speculate=False).sequences
            traces.append(Trace(request.prompt_tokens, tuple(sequence.output_tokens), category))
            advance()
    return traces


def _confirm(
    session: Session,
    requests: Sequence[Request],
    replayer: Replayer,
    candidates: Sequence[Candidate],
    job: Job,
    output: Output,
) -> Confirmation:
    """The candidates on some of the requests: replayed once more, and run."""
    chosen = spread(len(requests), job.num_live_prompts)
    sample = replace(replayer, traces=[replayer.traces[i] for i in chosen])
    replayed = [sample.replay(candidate) for candidate in candidates]
    live = LiveRun(
        session,
        [requests[i].prompt_tokens for i in chosen],
        [requests[i].max_new_tokens for i in chosen],
        job.batch_size,
    )
    with output.progress("timing", live.num_rounds) as advance:
        measured = live.measure(candidates, advance)
    _warn_of_other_outputs(sample.traces, measured[0], output)
    confirmation = confirm(replayed, measured)
    for what, factor in (("prompts", confirmation.factors.prompts), ("steps", confirmation.factors.others)):
        if not 1 / _LARGEST_FACTOR <= factor <= _LARGEST_FACTOR:
            output.warning(
                f"{what} take {factor:.2f} times as long as when they were measured; if that is to last, build the "
                "engine again"
            )
    return confirmation


def _warn_of_other_outputs(traces: Sequence[Trace], measured: Measured, output: Output) -> None:
    """Of traces that are another model's, whose predictions are not about what is run."""
    answers = [tuple(sequence.output_tokens) for sequence in measured.generation.sequences]
    num_other = sum(answer != t.output_tokens for answer, t in zip(answers, traces, strict=True))
    if num_other:
        output.warning(
            f"the engine does not answer as in the traces, so predictions are off: {num_other} of {len(traces)}"
        )


def _figures(tuning: Tuning, batch_size: int) -> Figures:
    assert tuning.confirmation is not None
    recommended = tuning.confirmation.recommended
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


def _settings(job: Job, engine_dir: Path | None) -> dict[str, object]:
    return {
        "engine_dir": None if engine_dir is None else str(engine_dir),
        "traces": None if job.traces is None else str(job.traces),
        "max_output_len": None if job.traces is not None else job.max_output_len,
        "batch_size": job.batch_size,
        "num_live_prompts": None if engine_dir is None else job.num_live_prompts,
        "profile": None if job.profile is None else str(job.profile),
    }
