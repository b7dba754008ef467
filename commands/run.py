"""`specdec run`: generate, with or without speculation, and say how it went."""

from commands.inputs.paths import check_chat_template, check_models
from commands.inputs.prompts import read_prompts
from commands.options.expand import expand_groups
from commands.options.kv_cache import KVCacheOptions
from commands.options.leader import LeaderOptions
from commands.options.run import RunGeneration, RunInputs, RunResults
from commands.options.speculation import SpeculationOptions
from commands.output import Output
from runtime.params import SamplingParams


@expand_groups
def run(
    inputs: RunInputs,
    generation: RunGeneration,
    speculation: SpeculationOptions,
    kv_cache: KVCacheOptions,
    leader: LeaderOptions,
    results: RunResults,
    output: Output,
) -> None:
    """Generate from prompts, speculating with a drafter if one is given.

    In orchestrator mode (V1) unless flags of leader mode (V2) are given: then requests join and leave a running batch.
    `--mode` chooses, and the flags of either drafter work in both.

    Greedy unless sampling is asked for. Greedy output is exactly what the model generates without speculation, and so
    is sampled output with the same seed; with `use_logits` sampled output has the same distribution.
    """
    chosen = leader.chosen(inputs.engine_dir, speculation)
    kv_cache.check(is_leader=leader.loop == "leader", disable_reuse=leader.disable_kv_cache_reuse)
    generation.common.check()
    results.check(output)
    chosen = chosen.or_profile(speculation.profile, inputs.engine).check(check_lossless=results.check_lossless)
    results.check_files([*inputs.paths, *speculation.paths, *leader.paths])
    params = generation.params(results.logprobs)
    _warn_of_equal_outputs(params, output)
    prompts = read_prompts(inputs.texts, inputs.input_file)
    check_models(inputs.engine, leader.model_dir, inputs.tokenizer_dir, chosen.speculation)
    if inputs.apply_chat_template or any(prompt.messages for prompt in prompts):
        check_chat_template(leader.model_dir, inputs.tokenizer_dir)

    from commands.answering import answer
    from commands.sessions import SessionOptions, open_setup_of_models
    from runtime.engine import DEFAULT_MAX_NUM_TOKENS

    cache = kv_cache.config(disable_reuse=leader.disable_kv_cache_reuse)
    num_tokens = generation.common.max_num_tokens or DEFAULT_MAX_NUM_TOKENS
    options = SessionOptions(inputs.engine, inputs.tokenizer_dir, chosen, params, cache, leader.loop, num_tokens)
    with open_setup_of_models(leader.models(), options, output) as setup:
        answer(setup, prompts, inputs, results, output)


def _warn_of_equal_outputs(params: SamplingParams, output: Output) -> None:
    if params.n > 1 and params.config().is_greedy:
        output.warning(f"greedy outputs of one prompt are all the same: `--num-return-sequences {params.n}`")
