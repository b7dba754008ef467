"""`specdec run`: generate, with or without speculation, and say how it went."""

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from commands.inputs.prompts import read_prompts
from commands.options.drafter_settings import DrafterSettings
from commands.options.drafting import Drafting, DraftingOptions, choose_drafting, parse_drafter
from commands.options.expand import expand_groups
from commands.options.kv_cache import KVCacheOptions
from commands.options.leader import LeaderOptions
from commands.options.run import RunGeneration, RunInputs, RunResults
from commands.output import Output
from commands.sessions import session_settings

if TYPE_CHECKING:
    from runtime.session import SessionSettings


@expand_groups
def run(
    inputs: RunInputs,
    generation: RunGeneration,
    drafting: DraftingOptions,
    kv_cache: KVCacheOptions,
    leader: LeaderOptions,
    results: RunResults,
    output: Output,
) -> None:
    """Generate from prompts, speculating with a drafter if one is given.

    In orchestrator mode (V1) unless flags of leader mode (V2) are given: then requests join and leave a running batch.

    Greedy unless sampling is asked for. Greedy output is exactly what the model generates without speculation, and so
    is sampled output with the same seed; with `use_logits` sampled output has the same distribution.
    """
    drafter = _named_drafter(inputs, drafting, leader)
    kv_cache.check(is_leader=leader.are_given, disable_reuse=leader.disable_kv_cache_reuse)
    generation.common.check()
    results.check(output)
    chosen = choose_drafting(drafting, drafter, inputs.engine, check_lossless=results.check_lossless)
    results.check_files([*inputs.paths, *drafting.paths, *leader.paths])

    from commands.answering import answer
    from runtime.drafters.opening import check_corpus_files
    from runtime.engine_cache import engines_of_models
    from runtime.session import open_session

    settings = _settings(inputs, generation, chosen, kv_cache, leader)
    num_return_sequences = generation.num_return_sequences
    if num_return_sequences > 1 and settings.sampling.is_greedy:
        output.warning(
            f"greedy outputs of one prompt are all the same: `--num-return-sequences {num_return_sequences}`"
        )
    prompts = read_prompts(inputs.input_text or [], inputs.input_file)
    check_corpus_files(chosen.drafter)  # before engines are built
    with ExitStack() as stack:
        engines = stack.enter_context(engines_of_models(leader.models(), inputs.engine, chosen.drafter, output))
        settings = replace(settings, engine_dir=engines.engine_dir, drafter=engines.drafter)
        answer(stack.enter_context(open_session(settings)), prompts, inputs, generation, results, output)


def _named_drafter(inputs: RunInputs, drafting: DraftingOptions, leader: LeaderOptions) -> DrafterSettings | None:
    """The drafter that the flags of the one mode or the other name."""
    drafting.check_profile(leader.drafting_flags, leader.model_dir)
    if not leader.are_given:
        return parse_drafter(drafting)
    leader.check(inputs.engine_dir, drafting)
    return leader.drafter_settings(drafting)


def _settings(
    inputs: RunInputs, generation: RunGeneration, drafting: Drafting, kv_cache: KVCacheOptions, leader: LeaderOptions
) -> "SessionSettings":
    from runtime.engine import DEFAULT_MAX_NUM_TOKENS

    settings = session_settings(
        inputs.engine,
        inputs.tokenizer_dir,
        drafting,
        generation.common,
        generation.random_seed,
        kv_cache.config(disable_reuse=leader.disable_kv_cache_reuse),
    )
    return replace(
        settings,
        mode="leader" if leader.are_given else "orchestrator",
        max_num_tokens=generation.max_num_tokens or DEFAULT_MAX_NUM_TOKENS,
    )
