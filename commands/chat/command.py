"""`specdec chat`, its flags: a conversation in the terminal."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from commands.chat.kept import KeptMessages, check_name
from commands.options.engine_choice import EngineOptions, KVDiskOptions
from commands.options.expand import expand_groups
from commands.output.help import INPUT, OUTPUT, option
from commands.output.output import Output
from commands.run.flags import RunGeneration
from runtime.text.call_formats import named_tool_format
from runtime.util.cache import KV_CACHE, make_cache_dir
from runtime.util.errors import UsageError


@dataclass(frozen=True)
class ChatOptions:
    """System message and output of `chat`."""

    system: Annotated[str | None, option(INPUT, "System message.")] = None
    tools: Annotated[
        Path | None,
        option(
            INPUT, "Python file whose functions the model may call. You are asked before each call.", metavar="FILE.py"
        ),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        option(
            INPUT,
            "Format in which the model calls tools, as for `serve`.",
            shown="the chat template's",
            check=named_tool_format,
            metavar="FORMAT",
        ),
    ] = None
    continue_: Annotated[
        str | None,
        option(
            INPUT,
            "Go on with the conversation of this name, or begin it; without a name, with the last one that had none. "
            "Its messages, keys and values are kept on disk.",
            "--continue",
            shown="nothing is kept",
            metavar="[NAME]",
        ),
    ] = None
    show_tokens: Annotated[
        bool, option(OUTPUT, "Mark accepted, recovered and bonus tokens in the answers.", "--show-tokens")
    ] = False


@expand_groups
def chat(engine: EngineOptions, disk: KVDiskOptions, chat: ChatOptions, generation: RunGeneration) -> None:
    """Talk with a model that was trained for conversations, and watch it speculate.

    `/stats` shows the last answer's numbers, `/reset` forgets the conversation, `/quit` leaves; Ctrl-C ends an answer.
    Earlier messages are not computed again: their keys and values stay in the cache.

    Without sampling flags, answers are sampled as the model's generation_config.json says, or greedily if it says
    nothing. If an answer is cut before the model ends it, a note says why.
    """
    engine = engine.named()
    generation.common.check()
    params = generation.params(None, usual_len=None)
    if params.n > 1:
        raise UsageError(f"a chat has one answer: `--num-return-sequences {params.n}`", hint="leave the flag out")
    if chat.continue_ is not None:
        check_name(chat.continue_)
        disk = replace(disk, kv_cache_dir=disk.kv_cache_dir or make_cache_dir() / KV_CACHE)
    choice = engine.choose(params, generation.common.max_num_tokens, "leader").with_disk(disk)
    choice.check_chat_template()

    from commands.chat.tools import open_toolbox
    from commands.chat.work import HELP, Conversation, lines_of_user, values_line

    toolbox = None if chat.tools is None else open_toolbox(chat.tools)
    output = Output()
    from commands.options.sessions import open_setup_of_models

    with open_setup_of_models(choice, output) as setup:
        own = setup.llm.model_defaults.sampling
        setup = replace(setup, params=generation.for_chat(own).params(None, usual_len=None))
        if setup.params != params:
            output.result(f"sampled as the model's generation_config.json says: {values_line(own)}")
        conversation = Conversation(setup, output, chat.system, chat.show_tokens, toolbox, chat.tool_call_parser)
        if chat.continue_ is not None:
            assert disk.kv_cache_dir is not None
            conversation.go_on(KeptMessages(disk.kv_cache_dir, chat.continue_))
        setup.llm.chat_template  # noqa: B018  # that there is one is found before the first line
        conversation.check_tools()
        output.result(HELP)
        for line in lines_of_user():
            if not conversation.hear(line.rstrip("\n")):
                break
    if conversation.num_unanswered and not sys.stdin.isatty():
        raise typer.Exit(1)
