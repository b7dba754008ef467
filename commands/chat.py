"""`specdec chat`: a conversation in the terminal."""

import sys
from dataclasses import replace

import typer

from commands.inputs.paths import check_chat_template, check_models
from commands.options.chat import ChatOptions
from commands.options.expand import expand_groups
from commands.options.kv_cache import KVCacheOptions
from commands.options.leader import LeaderOptions
from commands.options.run import RunGeneration
from commands.options.speculation import SpeculationOptions
from commands.output import Output
from runtime.errors import UsageError


@expand_groups
def chat(
    chat: ChatOptions,
    generation: RunGeneration,
    speculation: SpeculationOptions,
    kv_cache: KVCacheOptions,
    leader: LeaderOptions,
) -> None:
    """Talk with a model that was trained for conversations, and watch it speculate.

    `/stats` has the last answer's numbers, `/reset` forgets the conversation, `/quit` leaves; Ctrl-C ends an answer.
    What was said before is found in the K/V cache. Without flags of sampling answers are sampled as the model's
    generation_config.json says, and are greedy where it says nothing.
    """
    chosen = leader.chosen(chat.engine_dir, speculation, is_either=False)
    kv_cache.check(is_leader=leader.mode != "orchestrator", disable_reuse=leader.disable_kv_cache_reuse)
    generation.common.check()
    chosen = chosen.or_profile(speculation.profile, chat.engine).check()
    params = generation.params(None)
    if params.n > 1:
        raise UsageError(f"a chat has one answer: `--num-return-sequences {params.n}`", hint="leave the flag out")
    check_models(chat.engine, leader.model_dir, chat.tokenizer_dir, chosen.speculation)
    check_chat_template(leader.model_dir, chat.tokenizer_dir)

    from commands.conversing import HELP, Conversation, lines_of_user, values_line
    from commands.sessions import SessionOptions, open_setup_of_models
    from runtime.engine import DEFAULT_MAX_NUM_TOKENS

    output = Output()
    cache = kv_cache.config(disable_reuse=leader.disable_kv_cache_reuse)
    num_tokens = generation.common.max_num_tokens or DEFAULT_MAX_NUM_TOKENS
    options = SessionOptions(
        chat.engine, chat.tokenizer_dir, chosen, params, cache, leader.mode or "leader", num_tokens
    )
    with open_setup_of_models(leader.models(), options, output) as setup:
        own = setup.llm.model_defaults.sampling
        setup = replace(setup, params=generation.for_chat(own).params(None))
        if setup.params != params:
            output.result(f"sampled as the model's generation_config.json says: {values_line(own)}")
        conversation = Conversation(setup, output, chat.system, chat.show_tokens)
        setup.llm.chat_template  # noqa: B018  # that there is one is found before the first line
        output.result(HELP)
        for line in lines_of_user():
            if not conversation.hear(line.rstrip("\n")):
                break
    if conversation.num_unanswered and not sys.stdin.isatty():
        raise typer.Exit(1)
