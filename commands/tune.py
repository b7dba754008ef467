"""`specdec tune`: find the drafter and the draft length for an engine and its requests, or say that none pays."""

from dataclasses import replace
from pathlib import Path

from commands.inputs.paths import check_readable
from commands.inputs.prompts import read_prompts
from commands.options.drafters import TunedFlags
from commands.options.engine import EngineChoice
from commands.options.expand import expand_groups, given_flags
from commands.options.tune import TuneInputs, TuneOptions, named_drafter
from commands.output import Output, check_output_files
from runtime.bundle import read_bundle
from runtime.models import read_model_config, resolve_model, resolve_tokenizer
from runtime.parallel.devices import check_device_ids


@expand_groups
def tune(inputs: TuneInputs, options: TuneOptions, flags: TunedFlags, output: Output) -> None:
    """Find the drafter and the draft length that pay.

    Replays what was generated through many drafters, which needs no model. With an engine it predicts from what its
    steps cost how long each would take, times the best three and no drafter, and recommends the fastest. Greedy.
    What a draft model or the model's own copy drafts no record tells: those are run with drafts of each length. Flags
    that name a drafter, or several, tune that only.
    """
    named, device_ids = named_drafter(flags, options.drafters)
    options.check(inputs, named)
    prompts = read_prompts(inputs.input_text or [], inputs.input_file) if inputs.traces is None else []
    if options.output is not None:
        read = [value for value in given_flags(flags).values() if isinstance(value, Path)]
        check_output_files([options.output], [*inputs.paths, *read])
    if inputs.traces is not None:
        check_readable([inputs.traces])
    if inputs.engine_dir is not None:
        config = read_bundle(inputs.engine_dir).config
        named.check_has_copy(has_copy=config.build_config.self_draft is not None)
        check_device_ids(device_ids, config.mapping.tp_size)
    if inputs.model.model_dir is not None:
        read_model_config(resolve_model(inputs.model.model_dir))
    if inputs.tokenizer_dir is not None:
        resolve_tokenizer(inputs.tokenizer_dir)
    named.check_fits(None)
    named.check_files()

    from commands.tuning import tune_engine, tune_traces
    from runtime.tuning.job import Scope

    scope = Scope(named, flags.ngram_pool == "public", options.max_draft_len)
    if not inputs.has_engine:
        tune_traces(inputs, options, scope, output)
        return

    from commands.sessions import engines_made

    choice = EngineChoice(
        inputs.engine_dir or Path(),
        speculation=named,
        model_dir=inputs.model.model_dir,
        built_for=inputs.model.engines,
    )
    with engines_made(choice, output) as made:
        inputs, scope = replace(inputs, engine_dir=made.engine_dir), replace(scope, named=made.speculation)
        tune_engine(inputs, options, scope, device_ids, prompts, output)
