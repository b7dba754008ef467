"""`specdec run`, its flags: generates with or without a drafter, and shows the figures."""

from dataclasses import replace

from commands.inputs.prompts import check_readable_by, read_prompts
from commands.options.engine_choice import EngineOptions, KVDiskOptions
from commands.options.expand import expand_groups, given_flags
from commands.output.output import Output
from commands.run.flags import RunGeneration, RunInputs, RunResults
from runtime.util.errors import UsageError


@expand_groups
def run(
    engine: EngineOptions,
    disk: KVDiskOptions,
    inputs: RunInputs,
    generation: RunGeneration,
    results: RunResults,
    output: Output,
) -> None:
    """Generate from prompts, speculating with a drafter if one is given.

    Runs in orchestrator mode (V1), or in leader mode (V2) if you give one of its flags: then requests join and leave a
    running batch. `--mode` chooses the mode; flags that choose a drafter work in both.

    Decoding is greedy unless you give a sampling flag. Greedy output is exactly the model's output without speculation,
    and so is sampled output with the same seed. With `use_logits`, sampled output has the same distribution.
    """
    engine, words = engine.named_before(inputs.prompt)
    inputs = replace(inputs, prompt=words)
    generation.common.check()
    results.check(output)
    results.check_files([*inputs.paths, *engine.paths])
    params = generation.params(results.logprobs)
    if params.n > 1 and params.config().is_greedy:
        output.warning(f"greedy outputs of one prompt are all the same: `--num-return-sequences {params.n}`")
    inputs = inputs.with_example()
    prompts = read_prompts(inputs.texts, inputs.input_file)
    choice = engine.choose(params, generation.common.max_num_tokens, check_lossless=results.check_lossless)
    choice = choice.with_disk(disk)
    # Later runs find keys and values on disk only with the same engine, which is to be the engine with kernels.
    choice = replace(choice, answers_first=params.config().is_greedy and disk.kv_cache_dir is None)
    if inputs.apply_chat_template:
        choice.check_chat_template()
    elif (asked := given_flags(inputs.conversation)) and not any(prompt.messages for prompt in prompts):
        raise UsageError(
            f"`{next(iter(asked))}` needs conversations, and the prompts have no `messages`",
            hint="give them in a .jsonl file with `--input-file`",
        )
    else:
        check_readable_by(choice, prompts)
    choice.check_output_len()

    from commands.options.sessions import open_setup_of_models
    from commands.run.work import answer

    with open_setup_of_models(choice, output) as setup:
        answer(setup, prompts, inputs, results, output)
