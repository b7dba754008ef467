"""Work of `tune`, from traces or prompts to a recommendation: with an engine, or by replay alone."""

from dataclasses import replace
from pathlib import Path

from commands.inputs.prompts import Prompt, without_padding
from commands.inputs.traces import read_traces
from commands.options.shared import end_id_params
from commands.output import Output
from commands.tune.command import DEFAULT_LIVE_PROMPTS, DEFAULT_OUTPUT_LEN, TuneInputs, TuneOptions
from commands.tune.document import TuneSettings, Tuning, tune_document
from commands.tune.tables import show
from runtime.bundle import read_bundle
from runtime.drafters.compatibility import check_corpora
from runtime.drafters.spec import Devices, DrafterSpec
from runtime.drafters.specs import DraftTargetDrafter
from runtime.errors import draft_engine_errors
from runtime.llm import LLM
from runtime.parallel.devices import check_device_ids
from runtime.params import SamplingParams
from runtime.request import Request
from runtime.text import open_tokenizer, tokenizer_vocab_size
from runtime.tuning.live import Confirmation
from runtime.tuning.profile import Figures, Profile, ProfileEngine, engine_digest, write_profile
from runtime.tuning.tune import Answered, Scope, Timing, answer, check_tuning, fitting_requests, replay_alone, tune


def tune_traces(inputs: TuneInputs, options: TuneOptions, scope: Scope, output: Output) -> None:
    """Without an engine: what each candidate would have counted."""
    assert inputs.traces is not None
    tokenizer = open_tokenizer(inputs.tokenizer_dir) if inputs.tokenizer_dir is not None else None
    vocab_size = tokenizer_vocab_size(tokenizer) if tokenizer is not None else None
    if tokenizer is not None and vocab_size is not None:
        check_corpora(scope.named, tokenizer, vocab_size)
    scope.longest_draft(None)
    search = replay_alone(read_traces(inputs.traces, tokenizer, vocab_size), scope, output.progress)
    tuning = Tuning(search, _settings(inputs, options, None))
    show(tuning, output)
    output.document(tune_document(tuning))


def tune_engine(
    inputs: TuneInputs,
    options: TuneOptions,
    scope: Scope,
    device_ids: Devices,
    prompts: list[Prompt],
    output: Output,
) -> None:
    """Tune with an engine: predict, time the best, recommend."""
    assert inputs.engine_dir is not None
    bundle = read_bundle(inputs.engine_dir)
    scope = replace(scope, named=scope.named.with_drafters(map(_with_own_devices, scope.named)))
    scope.longest_draft(bundle.config.build_config.max_draft_len)
    timing = Timing(options.batch_size or 1, options.num_live_prompts or DEFAULT_LIVE_PROMPTS)
    with LLM(bundle, tokenizer=inputs.tokenizer_dir, mode="orchestrator", device_ids=device_ids) as llm:
        check_tuning(llm, scope, timing.batch_size)
        answered = _answered(llm, inputs, options, scope, prompts, output)
        tuned = tune(llm, answered, scope, timing, output.progress)
    confirmation = tuned.confirmation
    tuning = Tuning(tuned.search, _settings(inputs, options, llm.device_ids), tuned.tried, confirmation)
    if options.output is not None:
        identity = ProfileEngine(str(inputs.engine_dir), engine_digest(bundle.config))
        candidate = confirmation.recommended.candidate
        figures = _figures(confirmation, timing.batch_size)
        write_profile(options.output, Profile(identity, candidate, figures))
    show(tuning, output)
    output.document(tune_document(tuning))


def _answered(
    llm: LLM, inputs: TuneInputs, options: TuneOptions, scope: Scope, prompts: list[Prompt], output: Output
) -> Answered:
    """The requests that fit the engine, and what it answers, or was recorded to have answered."""
    max_tokens = options.max_output_len or DEFAULT_OUTPUT_LEN
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, **end_id_params(options.end_id))
    template = llm.request_of(params)
    if inputs.traces is not None:
        recorded = read_traces(inputs.traces, llm.tokenizer, llm.engine.config.vocab_size)
        requests = [
            replace(template.with_prompt(i, t.prompt_tokens), max_new_tokens=len(t.output_tokens))
            for i, t in enumerate(recorded)
        ]
        kept = fitting_requests(llm, requests, scope)
        return Answered(_renumbered(requests, kept), [recorded[i] for i in kept], None)
    prompts = without_padding(prompts, inputs.input_file, template.end_ids)
    requests = [template.with_prompt(i, llm.encode(prompt.content)[0]) for i, prompt in enumerate(prompts)]
    kept = fitting_requests(llm, requests, scope)
    requests = _renumbered(requests, kept)
    traces = answer(llm, requests, [prompts[i].category for i in kept], output.progress)
    return Answered(requests, traces, max_tokens)


def _renumbered(requests: list[Request], kept: list[int]) -> list[Request]:
    return [replace(requests[i], id=new_id) for new_id, i in enumerate(kept)]


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


def _with_own_devices(drafter: DrafterSpec) -> DrafterSpec:
    """Draft model with its default devices made explicit, for flags and a profile."""
    if not isinstance(drafter, DraftTargetDrafter):
        return drafter
    with draft_engine_errors():
        tp_size = read_bundle(Path(drafter.model)).config.mapping.tp_size
        return replace(drafter, device_ids=check_device_ids(drafter.device_ids, tp_size))


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
