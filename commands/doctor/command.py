"""`specdec doctor`, its flags: what is wrong with an engine, its drafter and the machine, and a remedy for each."""

from pathlib import Path

from commands.doctor.flags import DoctorInputs, DoctorOptions
from commands.inputs.prompts import read_prompts
from commands.options.engine_choice import USUAL_ENGINE, EngineChoice, KVCacheOptions
from commands.options.expand import expand_groups
from commands.options.speculation_flags import SpeculationOptions
from commands.output.output import Output


@expand_groups
def doctor(
    inputs: DoctorInputs,
    options: DoctorOptions,
    speculation: SpeculationOptions,
    kv_cache: KVCacheOptions,
    output: Output,
) -> None:
    """Look for what makes an engine slow or speculation useless, and say what to do about it.

    Answers a few prompts without the drafter, with it, and without it again. Compares step times with the build's.
    Checks the draft model, the K/V cache, the weights and the machine. Exits with 1 if it finds a fault. Decoding is
    greedy.
    """
    speculation.check_profile((), inputs.model.model_dir)
    named, device_ids = speculation.resolve()
    inputs.model.check(inputs.engine_dir)
    has_prompts = bool(inputs.input_text) or inputs.input_file is not None
    prompts = read_prompts(inputs.input_text or [], inputs.input_file) if has_prompts else None
    choice = EngineChoice(
        inputs.engine_dir or Path(USUAL_ENGINE),
        inputs.tokenizer_dir,
        named,
        device_ids,
        options.mode,
        kv_cache.fitting(is_leader=options.mode == "leader"),
        models=inputs.model,
        profile=speculation.profile,
    ).checked()
    if prompts is None or any(prompt.text is not None for prompt in prompts):
        choice.check_tokenizer()

    from commands.doctor.work import diagnose
    from commands.options.sessions import engines_made

    with engines_made(choice, output) as made:
        diagnose(made, inputs, options, prompts, output)
