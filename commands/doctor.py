"""`specdec doctor`: what is wrong with an engine, its drafter and the machine, with a number and a remedy for each."""

from commands.inputs.paths import check_models
from commands.inputs.prompts import read_prompts
from commands.options.doctor import DoctorInputs, DoctorOptions
from commands.options.expand import expand_groups
from commands.options.kv_cache import KVCacheOptions
from commands.options.speculation import SpeculationOptions
from commands.output import Output


@expand_groups
def doctor(
    inputs: DoctorInputs,
    options: DoctorOptions,
    speculation: SpeculationOptions,
    kv_cache: KVCacheOptions,
    output: Output,
) -> None:
    """Look for what makes an engine slow or speculation useless, and say what to do about it.

    Answers a few prompts without the drafter, with it, and without it again, times steps beside those of the build, and
    looks at the draft model, the K/V cache, the weights and the machine. Exits with 1 if something is found. Greedy.
    """
    speculation.check_profile((), inputs.model.model_dir)
    chosen = speculation.resolve()
    kv_cache.check(is_leader=options.mode == "leader", disable_reuse=False)
    inputs.model.check(inputs.engine_dir)
    chosen = chosen.or_profile(speculation.profile, inputs.engine).check()
    has_prompts = bool(inputs.input_text) or inputs.input_file is not None
    prompts = read_prompts(inputs.input_text or [], inputs.input_file) if has_prompts else None
    check_models(inputs.engine, inputs.model.model_dir, inputs.tokenizer_dir, chosen.speculation)

    from commands.diagnosing import diagnose
    from commands.engines import engines_of_models
    from runtime.bundle import read_bundle

    with engines_of_models(inputs.model.models(), inputs.engine, chosen.speculation, output) as engines:
        chosen = chosen.with_speculation(engines.speculation)
        diagnose(read_bundle(engines.engine_dir), inputs, options, chosen, prompts, kv_cache.config(), output)
