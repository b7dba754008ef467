"""Work of `drafters`: tries every drafter for a model on a sample of requests, and shows what each promises."""

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from rich.table import Table

from commands.drafters.document import DraftersDocument, Fitting, NotTried, OnHub
from commands.drafters.flags import DraftersInputs, DraftersOptions
from commands.inputs.dataset import DEMO, load_samples
from commands.inputs.prompts import Prompt, without_padding
from commands.options.drafter_flags import written_flags
from commands.options.engine_choice import EngineChoice
from commands.options.leader_flags import ModelOptions
from commands.options.sessions import engines_made, open_engine
from commands.output.documents.records import document_head
from commands.output.output import Output, number
from runtime.checkpoint.config import IntFormat
from runtime.checkpoint.resolve import read_model_config, resolve_model
from runtime.core.params import greedy_params
from runtime.drafters.published import drafters_beside, published_for
from runtime.drafters.spec import DrafterSpec
from runtime.drafters.specs import SelfDrafter
from runtime.drafters.speculation import NO_SPECULATION, Speculation, head_drafter
from runtime.llm import LLM
from runtime.measure.tuning.live import LiveRun, spread
from runtime.measure.tuning.tune import Answered, answer
from runtime.measure.tuning.which import Rival, Sample, open_sample, rival_of_model, rivals_of_lookups
from runtime.text.traces import read_traces
from runtime.util.errors import SpecDecError

_NUM_OWN_PROMPTS = 4
_COPY: IntFormat = "int4"


@dataclass
class Found:
    """Drafters that were tried, each with the flags that choose it, and drafters that were not."""

    sample: Sample
    rivals: list[tuple[Rival, str, LLM]] = field(default_factory=list)
    not_tried: list[NotTried] = field(default_factory=list)

    def add(self, rival: Rival, flags: str, llm: LLM) -> None:
        self.rivals.append((rival, flags, llm))


def show_drafters(
    inputs: DraftersInputs, options: DraftersOptions, prompts: list[Prompt] | None, output: Output
) -> None:
    """Try every drafter, and show the results."""
    model = inputs.model_dir or ""
    own = head_drafter(model)
    with ExitStack() as stack:
        llm, drafters = _open(stack, inputs, () if own is None else (own,), output)
        answered = _answered(llm, inputs, options, prompts, output)
        found = Found(open_sample(llm, answered, output.progress))
        for rival in rivals_of_lookups(found.sample, output.progress):
            found.add(rival, written_flags(rival.candidate, (0,)), llm)
        for drafter in drafters:
            _try(found, llm, drafter, "--spec-decode-algo MTP", output)
        if inputs.engines.copy is not None:
            copy = f"--self-draft {inputs.engines.copy} --spec-decode-algo SELF"
            _try(found, llm, SelfDrafter(), copy, output)
        else:
            _leave_out_copy(found, model, llm)
        for name, spec in drafters_beside(resolve_model(model), options.draft_model_dir or []):
            try:
                other, (opened,) = _open(stack, inputs, (spec,), output)
                _try(found, other, opened, f"--draft-model-dir {shlex.quote(name)}", output)
            except SpecDecError as error:
                if name in (options.draft_model_dir or []):
                    raise
                found.not_tried.append(NotTried(drafter=name, reason=error.message, command=""))
        measured = _measured(found, options, output)
        document = _document(inputs, found, measured, own_sample=prompts is not None or inputs.traces is not None)
    show_document(document, output)
    output.document(document.as_json())


def _open(
    stack: ExitStack, inputs: DraftersInputs, drafters: Sequence[DrafterSpec], output: Output
) -> tuple[LLM, tuple[DrafterSpec, ...]]:
    """Open the model's engine, built for these drafters, and the engines of the drafters that have their own."""
    models = ModelOptions(inputs.model_dir, inputs.engines)
    choice = EngineChoice(speculation=Speculation(tuple(drafters)), mode="leader", models=models)
    made = stack.enter_context(engines_made(choice.checked(cuts_drafts=True), output))
    return stack.enter_context(open_engine(made)), made.speculation.drafters


def _answered(
    llm: LLM, inputs: DraftersInputs, options: DraftersOptions, prompts: list[Prompt] | None, output: Output
) -> Answered:
    """The sample's requests that fit the engine, and the model's answers to them."""
    params = greedy_params(options.max_output_len)
    template, build = llm.request_of(params), llm.engine.config.build_config
    room = min(build.max_input_len, build.max_request_len - options.max_output_len)
    if inputs.traces is not None:
        recorded = read_traces(inputs.traces, llm.tokenizer, llm.engine.config.vocab_size)
        texts = [list(trace.prompt_tokens) for trace in recorded]
    elif prompts is not None:
        kept = without_padding(prompts, inputs.input_file, template.end_ids)
        texts = [list(llm.encode(one.content_by(llm))[0]) for one in kept]
    else:
        samples = load_samples(
            DEMO, eval_task="summarize", dataset_dir=None, max_samples=_NUM_OWN_PROMPTS, seed=0, needs_reference=False
        )
        texts = [list(llm.encode(one.text, max(room, 1))[0]) for one in samples]
    fitting = [text for text in texts if len(text) <= room]
    if not fitting:
        raise SpecDecError(
            f"no request of the sample leaves room for {options.max_output_len} tokens: {len(texts)}",
            hint="give shorter prompts, or a larger `--max-seq-len`",
        )
    chosen = [fitting[i] for i in spread(len(fitting), options.num_prompts)]
    requests = [template.with_prompt(i, text) for i, text in enumerate(chosen)]
    traces = answer(llm, requests, [None] * len(requests), output.progress)
    long = [i for i, trace in enumerate(traces) if len(trace.output_tokens) > 1]
    if not long:
        raise SpecDecError(
            "the model answers the sample's requests with one token each, so that nothing can be drafted",
            hint="give prompts that it answers at length",
        )
    kept_requests = [replace(requests[i], id=n) for n, i in enumerate(long)]
    return Answered(kept_requests, [traces[i] for i in long], options.max_output_len)


def _try(found: Found, llm: LLM, drafter: DrafterSpec, flags: str, output: Output) -> None:
    rival = rival_of_model(found.sample, llm, drafter, output.progress)
    length = rival.candidate.max_draft_len
    found.add(rival, f"{flags} --spec-decode-max-draft-len {length} --draft-len-mode fixed", llm)


def _leave_out_copy(found: Found, model: str, llm: LLM) -> None:
    """List the self-draft copy as not tried: it is tried only if a flag asks for it, since it takes a build, and
    memory.
    """
    config = llm.engine.config
    reason = "it takes a build: the same command with `--self-draft int4` tries it"
    command = f"specdec drafters {shlex.quote(model)} --self-draft {_COPY}"
    if config.quantization is not None and config.quantization.bits in ("4", "4 and 8"):  # 8: its output layer
        reason, command = "the model's layers have 4 bits already, so that a copy is no cheaper", ""
    found.not_tried.append(NotTried(drafter=f"own copy, {_COPY}", reason=reason, command=command))


@dataclass(frozen=True)
class _Timed:
    """Seconds after the context phase, with the drafter and without, measured in turn on the same engine."""

    seconds: float
    without: float

    @property
    def speedup(self) -> float:
        return self.without / self.seconds


def _measured(found: Found, options: DraftersOptions, output: Output) -> dict[int, _Timed]:
    """Measured times of the candidates, by the candidates' numbers; empty unless a flag asks for measurements."""
    if not options.measure:
        return {}
    timed: dict[int, _Timed] = {}
    for llm in dict.fromkeys(llm for *_, llm in found.rivals):
        numbers = [i for i, (*_, one) in enumerate(found.rivals) if one is llm]
        candidates = [found.rivals[i][0].candidate for i in numbers]
        requests = [replace(one, id=i) for i, one in enumerate(found.sample.answered.requests)]
        live = LiveRun(llm, requests, 1)
        with output.progress("timing", live.num_rounds) as advance:
            without, *runs = (one.parts.others for one in live.measure([NO_SPECULATION, *candidates], advance))
        timed |= {i: _Timed(seconds, without) for i, seconds in zip(numbers, runs, strict=True)}
    return timed


def _document(
    inputs: DraftersInputs, found: Found, measured: dict[int, _Timed], *, own_sample: bool
) -> DraftersDocument:
    sample, model = found.sample, inputs.model_dir or ""
    none = found.rivals[0][0]
    tried = []
    for i, (rival, flags, _) in enumerate(found.rivals):
        speed = sample.num_tokens / rival.seconds
        timed, speedup = measured.get(i), rival.speedup_over(none)
        tried.append(
            Fitting(
                drafter=rival.candidate.label if rival.candidate else "no drafter",
                command=f"specdec run {shlex.quote(model)} {flags}".rstrip(),
                draft_len=rival.candidate.max_draft_len or 0,
                tokens_per_step=rival.tokens_per_step,
                draft_s=rival.draft_s,
                tokens_per_second=speed,
                speedup=speedup,
                measured_speedup=None if timed is None else timed.speedup,
                predicted_by_measured=None if timed is None else speedup / timed.speedup,
            )
        )
    published = published_for(read_model_config(resolve_model(model)), model.rstrip("/").rpartition("/")[2])
    return DraftersDocument(
        **document_head("drafters"),
        model=model,
        num_prompts=len(sample.answered.requests),
        num_tokens=sum(len(trace.output_tokens) for trace in sample.answered.traces),
        is_own_sample=own_sample,
        tried=sorted(tried, key=lambda one: -one.tokens_per_second),
        not_tried=found.not_tried,
        published=[
            OnHub(**vars(one), command=f"specdec run {shlex.quote(model)} --draft-model-dir {one.repo}")
            for one in published
        ],
    )


def show_document(document: DraftersDocument, output: Output) -> None:
    """Print the table of what was tried, with the command that chooses each, and what was not tried."""
    columns = ["drafter", "draft", "tokens/step", "a draft", "tokens/s", "speedup"]
    is_measured = any(one.measured_speedup is not None for one in document.tried)
    columns += ["measured", "ratio"] if is_measured else []
    table = Table(title=f"What drafts for {document.model}", title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == "drafter" else "right", no_wrap=column != "drafter")
    for one in document.tried:
        cells = [
            one.drafter,
            str(one.draft_len or "-"),
            number(one.tokens_per_step, 2),
            f"{one.draft_s * 1e3:.1f} ms" if one.draft_len else "-",
            number(one.tokens_per_second, 1),
            f"{one.speedup:.2f}x",
        ]
        if is_measured:
            cells += [f"{number(one.measured_speedup, 2)}x", number(one.predicted_by_measured, 2)]
        table.add_row(*cells)
    output.result(table)
    requests = "one request" if document.num_prompts == 1 else f"{document.num_prompts:,} requests"
    whose = "of yours" if document.is_own_sample else "of shipped articles: give your own with `--traces`"
    output.result(f"predicted from {requests}, {document.num_tokens:,} tokens {whose}")
    for left in document.not_tried:
        output.result(f"not tried: {left.drafter}: {left.reason}")
    for hub in document.published:
        output.result(f"published for {hub.family}: {hub.repo} ({hub.kind}; {hub.source}): {hub.command} …")
    best = document.tried[0]
    if not best.draft_len:
        output.result("no drafter is faster than none")
    output.result("the command of each, the fastest first:")
    for one in document.tried:
        if one.draft_len:
            output.result(f"  {one.drafter}: {one.command} …")
    if output.quiet:
        output.text(best.command)
