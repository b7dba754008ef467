"""`specdec doctor`: what is wrong with an engine, its drafter and the machine, with a number and a remedy for each."""

from commands.inputs.paths import check_models
from commands.inputs.prompts import read_prompts
from commands.options.doctor import DoctorInputs, DoctorOptions
from commands.options.drafting import DraftingOptions, choose_drafting, parse_drafter
from commands.options.expand import expand_groups
from commands.options.kv_cache import KVCacheOptions
from commands.output import Output


@expand_groups
def doctor(
    inputs: DoctorInputs, options: DoctorOptions, drafting: DraftingOptions, kv_cache: KVCacheOptions, output: Output
) -> None:
    """Look for what makes an engine slow or speculation useless, and say what to do about it.

    Answers a few prompts without the drafter, with it, and without it again, times steps beside those of the build, and
    looks at the draft model, the K/V cache, the weights and the machine. Exits with 1 if something is found. Greedy.
    """
    drafting.check_profile()
    named = parse_drafter(drafting)
    kv_cache.check(is_leader=options.mode == "leader", disable_reuse=False)
    chosen = choose_drafting(drafting, named, inputs.engine_dir, check_lossless=False)
    has_prompts = bool(inputs.input_text) or inputs.input_file is not None
    prompts = read_prompts(inputs.input_text or [], inputs.input_file) if has_prompts else None
    bundle = check_models(inputs.engine_dir, None, inputs.tokenizer_dir, chosen.named.drafter)
    assert bundle is not None  # for an engine is given, and no model

    from commands.diagnosing import diagnose

    diagnose(bundle, inputs, options, chosen, prompts, kv_cache.config(), output)
