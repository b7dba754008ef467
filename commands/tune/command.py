"""`specdec tune`, its flags: finds the drafter and the draft length for an engine and its requests, if any drafter
pays.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from commands.inputs.prompts import check_readable_by, read_prompts
from commands.options.drafter_flags import TunedFlags, chooses_drafter
from commands.options.engine_choice import EngineChoice
from commands.options.expand import expand_groups, given_flags
from commands.options.speculation_flags import LeaderFlags, speculation_from_flags
from commands.output.output import Output, check_output_files, check_readable, check_report
from commands.tune.flags import TuneInputs, TuneOptions
from runtime.checkpoint.resolve import resolve_tokenizer
from runtime.drafters.lists import Devices
from runtime.drafters.spec import DrafterSpec
from runtime.drafters.speculation import Speculation, head_drafter, model_drafter
from runtime.text.trace_lines import check_trace_lines
from runtime.util.errors import UsageError


def model_to_try(inputs: TuneInputs, options: TuneOptions, flags: Any) -> DrafterSpec | None:
    """The draft model or trained head that is tried beside lookups: a model that is given without its drafter, or the
    target's own head.
    """
    if options.drafters is not None or chooses_drafter(flags):
        return None
    if options.draft_model_dir is not None:
        return model_drafter(options.draft_model_dir)
    model = flags.draft_engine_dir or inputs.model.model_dir
    return None if model is None else head_drafter(model)


def named_drafter(
    inputs: TuneInputs, options: TuneOptions, flags: Any, model: DrafterSpec | None
) -> tuple[Speculation, Devices]:
    """The drafters that flags name, and the target's devices. There are no drafters if only `--ngram-pool` and flags of
    the `model` are given: then all lookups are tried. UsageError for flags that do not fit together.
    """
    model_dir, drafters = inputs.model.model_dir, options.drafters
    if drafters is not None and "custom" in drafters:
        raise UsageError(
            f"`tune` cannot try a drafter of your own: {drafters}",
            hint="`specdec run --stats` shows a drafter's benefit",
        )
    if options.draft_model_dir is not None and flags.draft_engine_dir is not None:
        raise UsageError(
            f"`--draft-model-dir` and `--draft-engine-dir` cannot be given together: {options.draft_model_dir}",
            hint="choose one",
        )
    given = given_flags(flags)
    if drafters is None and not chooses_drafter(flags):
        given.pop("--ngram-pool", None)
        if model is not None:
            given.pop("--draft-engine-dir", None)
        return speculation_from_flags(given, None, None, None)
    models = {} if options.draft_model_dir is None else {"draft_model_dir": options.draft_model_dir}
    leader = LeaderFlags(models, model_dir=model_dir, has_algorithms=False) if models or model_dir else None
    return speculation_from_flags(given, drafters, None, leader)


def check_replay(named: Speculation, tokenizer_dir: Path | None) -> None:
    """SpecDecError for a drafter or tokenizer that cannot be opened without an engine."""
    if tokenizer_dir is not None:
        resolve_tokenizer(tokenizer_dir)
    named.check_fits(None)
    named.check_files()


@expand_groups
def tune(inputs: TuneInputs, options: TuneOptions, flags: TunedFlags, output: Output) -> None:
    """Find the drafter and the draft length that save most time, if any does.

    Replays recorded outputs through many lookups, which needs no model. With an engine, it predicts each lookup's time
    from the engine's step costs, times the best three and no drafter, and recommends the fastest. Decoding is greedy.

    Draft models, trained heads and self-drafting cannot be replayed, so they are run with drafts of each length. Name a
    drafter to tune only that drafter. With `--draft-model-dir` alone, that model is tried as well.
    """
    inputs = inputs.with_model()
    model = model_to_try(inputs, options, flags)
    named, device_ids = named_drafter(inputs, options, flags, model)
    opened = named if model is None else Speculation((model,))
    options.check(inputs, opened)
    prompts = read_prompts(inputs.input_text or [], inputs.input_file) if inputs.traces is None else []
    check_report(options.report)
    outputs = [path for path in (options.output, options.report) if path is not None]
    read = [value for value in given_flags(flags).values() if isinstance(value, Path)]
    check_output_files(outputs, [*inputs.paths, *read])
    if inputs.traces is not None:
        check_readable([inputs.traces])
        check_trace_lines(inputs.traces)
    choice = None
    if inputs.has_engine:
        engine_dir = inputs.engine_dir or Path()
        choice = EngineChoice(engine_dir, inputs.tokenizer_dir, opened, device_ids, models=inputs.model)
        choice = choice.checked(cuts_drafts=True)
        check_readable_by(choice, prompts)
    else:
        check_replay(opened, inputs.tokenizer_dir)

    from commands.tune.work import check_has_activations, tune_engine, tune_traces
    from runtime.measure.tuning.tune import Scope

    scope = Scope(named, model, flags.ngram_pool == "public", options.max_draft_len)
    if choice is None:
        tune_traces(inputs, options, scope, output)
        return

    from commands.options.sessions import engines_made

    if options.compare_activations:
        check_has_activations(choice)
    with engines_made(choice, output) as made:
        drafters = made.speculation.drafters
        scope = replace(scope, named=made.speculation) if model is None else replace(scope, model=drafters[0])
        tune_engine(made, replace(inputs, engine_dir=made.engine_dir), options, scope, prompts, output)
