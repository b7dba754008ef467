"""Work of `chat` with a session: reads what the user says, streams the answers, remembers both."""

import io
import json
import sys
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import typer
from rich.panel import Panel
from rich.text import Text

from commands.chat.kept import KeptMessages
from commands.chat.tools import Toolbox
from commands.options.hints import hint_of, message_of
from commands.output.documents.settings import Setup
from commands.output.output import Output, fail, milliseconds, note, number, visible, warn
from commands.output.tables.drafts import Mark, mark_for_stdout, marked_text
from commands.run.flags import DEFAULT_OUTPUT_LEN
from runtime.core.grammar import CompiledGrammar
from runtime.core.params import Grammar
from runtime.core.request import Request, Sequence
from runtime.measure.text_steps import output_pieces
from runtime.model.pretrained import num_positions, parse_pretrained_config
from runtime.text.call_formats import named_tool_format
from runtime.text.call_grammar import Calls, SpecialIds, call_grammar
from runtime.text.chat import Message, TemplateInputs
from runtime.text.parser import OutputForm, OutputParser, Said, joined
from runtime.text.prompt import with_tools_as_text
from runtime.text.text import TextStream
from runtime.text.thinking_tags import prompt_end
from runtime.text.token_text import special_token_ids
from runtime.util.errors import SpecDecError, UsageError

HELP = "/stats: the last answer's numbers; /reset: forget the conversation; /quit: leave; Ctrl-C: end an answer"


@dataclass
class Conversation:
    """The messages so far. The K/V of earlier messages stay in the engine's cache, where the next turn finds them."""

    setup: Setup
    output: Output
    system: str | None
    show_tokens: bool
    toolbox: Toolbox | None = None
    tool_call_parser: str | None = None
    messages: list[Message] = field(default_factory=list)
    last: Sequence | None = None
    num_unanswered: int = 0
    kept: KeptMessages | None = None

    def __post_init__(self) -> None:
        self.reset()

    @cached_property
    def _form(self) -> OutputForm:
        """The form of the model's tool calls, by which answers are parsed; SpecDecError if the model's chat template
        cannot describe tools.
        """
        llm = self.setup.llm
        assert llm.tokenizer is not None
        template = llm.chat_template
        calls = template.tool_format
        if self.tool_call_parser is not None:
            calls = named_tool_format(self.tool_call_parser)
        if self.toolbox is not None and (calls is None or (not template.knows_tools and self.tool_call_parser is None)):
            raise SpecDecError(
                "the model's chat template knows no tools, or calls them in a format that is not known",
                hint="take a model that was trained for tools, or name the format of its calls by "
                "`--tool-call-parser`, such as `hermes`",
                code="no_tools",
            )
        tools = () if self.toolbox is None else self.toolbox.tools
        return OutputForm.of(calls, template.reasoning_format, special_token_ids(llm.tokenizer), tools)

    def _prompt(self) -> list[int]:
        template, documents = self.setup.llm.chat_template, () if self.toolbox is None else self.toolbox.documents
        if self.toolbox is None or template.knows_tools or self._form.calls is None:
            return template.encode(self.messages, TemplateInputs(documents))
        return template.encode(with_tools_as_text(self.messages, documents, self._form.calls))

    def _grammar(self, request: Request) -> CompiledGrammar | None:
        """Grammar that holds tool calls to their form, unless the output has another grammar."""
        if self.toolbox is None or self._form.calls is None or request.grammar is not None:
            return request.grammar
        grammars = self.setup.llm.grammars
        special = SpecialIds(grammars.special_tokens(), request.end_ids)
        in_reasoning = self._is_in_reasoning(request)
        calls = Calls(self.toolbox.tools, "auto")
        text = call_grammar(calls, self._form.calls, self._form.reasoning, special, in_reasoning=in_reasoning)
        return None if text is None else grammars.compiled(Grammar("lark", text))

    def check_tools(self) -> None:
        """SpecDecError if there are tools and the model's chat template cannot describe tools."""
        self._form  # noqa: B018  # which finds it out

    def reset(self) -> None:
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.last = None

    def go_on(self, kept: KeptMessages) -> None:
        """Continue a kept conversation: its messages come first, and later messages are added to its file. UsageError
        if `--system` differs from the system message that the conversation began with.
        """
        messages = kept.read()
        self.kept = kept
        if not messages:
            return
        own = messages[0].get("content") if messages[0]["role"] == "system" else None
        if self.system is not None and self.system != own:
            raise UsageError(
                f"the conversation `{kept.name}` began with another system message, or with none: {own}",
                hint="leave `--system` out, or begin another: `--continue NAME`",
            )
        self.system, self.messages = own, cast("list[Message]", messages)
        said = [message for message in messages if message["role"] in ("user", "assistant")]
        note(f"goes on with `{kept.name}`, {len(said)} messages; /reset begins anew")

    def hear(self, line: str) -> bool:
        """Take a line that the user typed: a command such as `/reset`, or a message to answer. Returns False for
        `/quit`.
        """
        match line.strip():
            case "":
                pass
            case "/quit" | "/exit":
                return False
            case "/reset":
                self.reset()
            case "/stats":
                self.output.text(self._stats())
            case "/help":
                self.output.text(HELP)
            case text if text.startswith("/"):
                self.output.text(f"unknown command: {text.split()[0]}; {HELP}")
            case _:
                self._answer(line)
        return True

    def _answer(self, line: str) -> None:
        """Stream an answer and remember it. If the message cannot be answered, say why and forget the message."""
        num_before = len(self.messages)
        self.messages.append({"role": "user", "content": line})
        try:
            while self._turn():
                pass
            if self.kept is not None:
                self.kept.write(self.messages)
        except SpecDecError as error:
            del self.messages[num_before:]
            self.num_unanswered += 1
            fail(message_of(error), hint_of(error))

    def _turn(self) -> bool:
        """Run one answer of the model and the calls that the user allows; True to go on with the calls' results."""
        said = joined(self._said(self._request()))
        message: Message = {"role": "assistant", "content": "".join(one.text for one in said if one.kind == "content")}
        if thought := "".join(one.text for one in said if one.kind == "reasoning"):
            message["reasoning_content"] = thought
        calls = calls_in(said)
        if not calls or self.toolbox is None or self._is_cut:
            self.messages.append(message)
            return False
        message["tool_calls"] = [
            {"id": f"call{i}", "type": "function", "function": {"name": name, "arguments": _object(arguments)}}
            for i, (name, arguments) in enumerate(calls)
        ]
        self.messages.append(message)
        are_allowed = True
        for i, (name, arguments) in enumerate(calls):
            self.output.result(_box(name, arguments))
            are_allowed = are_allowed and is_allowed()
            gave = self.toolbox.call(name, arguments) if are_allowed else "error: the user did not allow this call"
            self.output.text(gave)
            self.messages.append({"role": "tool", "tool_call_id": f"call{i}", "name": name, "content": gave})
        return are_allowed

    def _request(self) -> Request:
        """Request for the conversation, with as many tokens as fit."""
        llm = self.setup.llm
        template = llm.request_of(self.setup.params)
        prompt = self._prompt()
        build = llm.bundle.config.build_config
        longest = min(build.max_input_len, build.max_request_len - 1)
        if len(prompt) > longest:
            said_before = len(self.messages) > 1 + (self.system is not None)
            config, needed = llm.bundle.config, len(prompt) + (self.setup.params.max_tokens or DEFAULT_OUTPUT_LEN)
            positions = num_positions(parse_pretrained_config(config.pretrained_config, "config.json")) or needed
            given = "build an engine with more room" if llm.bundle.model is None else "give more room"
            more_room = f", or {given}: `--max-seq-len {min(needed, positions)}`" if len(prompt) < positions else ""
            raise SpecDecError(
                f"the conversation is longer than the engine takes ({longest} tokens): {len(prompt)}",
                hint="/reset begins another" if said_before else f"say less{more_room}",
            )
        request = llm.after_thinking(template.with_prompt(0, prompt, 0))
        request = replace(request, grammar=self._grammar(request))
        return replace(request, max_new_tokens=min(request.max_new_tokens, build.max_request_len - len(prompt)))

    def _said(self, request: Request) -> list[Said]:
        """Print the answer as it comes; returns its parts. Ctrl-C ends the answer."""
        self.setup.session.check_requests([request])
        self.last, parts = None, list[Said]()
        try:
            for said in self._shown(request):
                if said.kind == "content" and not self.show_tokens:
                    self.output.text(said.text, end="")
                elif said.kind == "reasoning" and not self.show_tokens:
                    self.output.dimmed(said.text, end="")
                parts.append(said)
        except KeyboardInterrupt:
            self.output.text(" …", end="")
        self.output.text("")
        if self._is_cut:
            note(self._why_cut())
        return parts

    @property
    def _is_cut(self) -> bool:
        return self.last is not None and self.last.finish_reason == "length"

    def _why_cut(self) -> str:
        """Reason why an answer was cut before the model ended it."""
        asked, build = self.setup.params.max_tokens, self.setup.llm.bundle.config.build_config
        if asked is not None and self.last is not None and len(self.last.output_tokens) >= asked:
            return f"the answer was cut at the {asked} tokens of `--max-output-len`"
        return (
            f"the answer was cut: the conversation has all of the {build.max_request_len:,} tokens that the engine has "
            "room for; `/reset` begins another, a larger `--max-seq-len` has more room"
        )

    def _shown(self, request: Request) -> Iterator[Said]:
        tokenizer = self.setup.llm.tokenizer
        assert tokenizer is not None  # or there were no template
        marked = _MarkedStream(self.setup, mark_for_stdout()) if self.show_tokens else None
        text = TextStream.of_request(tokenizer, request, self._form.special.shown)
        parser = OutputParser(self._form, in_reasoning=self._is_in_reasoning(request))
        is_text, last = self._form.says_only_text, Said("content", "")
        with closing(self.setup.session.steps([request])) as steps:
            for sequence, _ in steps:
                self.last, finished = sequence, sequence.finish_reason is not None
                if marked is not None:
                    self.output.styled(marked.next_piece(sequence, finished=finished), end="")
                piece = text.next_piece(sequence.output_tokens, finished=finished)
                if is_text:
                    yield Said("content", piece)
                    continue
                is_cut = sequence.finish_reason == "length"
                for said in [*parser.feed(piece), *(parser.end(is_cut=is_cut) if finished else ())]:
                    if said.kind == "content" and last.kind == "reasoning":
                        self.output.text("\n")
                    last = said
                    yield said

    def _is_in_reasoning(self, request: Request) -> bool:
        """True if the prompt ends within the model's reasoning."""
        tokenizer = self.setup.llm.tokenizer
        assert tokenizer is not None
        return self._form.is_in_reasoning(prompt_end(tokenizer, request.prompt_tokens))

    def _stats(self) -> str:
        if self.last is None or self.last.stats.ttft_s is None:
            return "nothing was answered yet"
        stats = self.last.stats
        then = "" if stats.tpot_s is None else f", then {milliseconds(stats.tpot_s)} each"
        cut = f"; {self._why_cut()}" if self._is_cut else ""
        return (
            f"{stats.num_generated_tokens} tokens in {stats.num_steps} steps, {number(stats.tokens_per_step)} a step; "
            f"{stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} draft tokens accepted; first token after "
            f"{milliseconds(stats.ttft_s)}{then}{cut}; "
            f"{stats.num_reused_tokens} of {len(self.last.request.prompt_tokens)} prompt tokens found in the K/V cache"
        )


def calls_in(said: Seq[Said]) -> list[tuple[str, str]]:
    """Names and arguments of the calls in an answer."""
    calls: list[tuple[str, str]] = []
    for kind, text in said:
        if kind == "call":
            calls.append((text, ""))
        elif kind == "arguments":
            calls[-1] = (calls[-1][0], text)
    return calls


def _object(arguments: str) -> dict[str, Any]:
    """Arguments as an object for the template; empty if they are something else, which the function's answer
    reports.
    """
    try:
        found = json.loads(arguments)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _box(name: str, arguments: str) -> Panel:
    shown = json.dumps(_object(arguments), ensure_ascii=False, indent=2) if _object(arguments) else arguments
    return Panel(Text(visible(shown)), title=Text(visible(name)), title_align="left", expand=False)


def is_allowed() -> bool:
    """True if the user allows a call, by `y` or `yes`. On a terminal the user is asked; otherwise a line is read."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        try:
            return typer.confirm("call it?", default=False)
        except typer.Abort:
            return False
    return sys.stdin.readline().strip().lower() in ("y", "yes")


class _MarkedStream:
    """The growing answer with its tokens marked, up to the part that further tokens may still change."""

    def __init__(self, setup: Setup, mark: Mark) -> None:
        self._setup, self._mark, self._num_shown = setup, mark, 0

    def next_piece(self, sequence: Sequence, *, finished: bool) -> str:
        pieces = output_pieces(sequence, self._setup.llm.tokenizer)
        end = len(pieces)
        while not finished and end > self._num_shown and (not pieces[end - 1].text or "\ufffd" in pieces[end - 1].text):
            end -= 1
        new = pieces[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        return marked_text(new, self._mark)


def lines_of_user() -> Iterator[str]:
    """Lines typed by the user, with editing and history on a terminal; Ctrl-C discards the line, Ctrl-D ends."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="strict")  # the locale C would have bytes pass as halves of characters
        try:
            yield from sys.stdin
        except UnicodeDecodeError as error:
            raise SpecDecError(
                f"standard input is not {sys.stdin.encoding}: {error}", hint="convert it, or set PYTHONIOENCODING"
            ) from None
        return
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession("> ")
    while True:
        try:
            yield session.prompt()
        except KeyboardInterrupt:
            warn("Ctrl-D or /quit leaves")
        except EOFError:
            return


def values_line(values: Mapping[str, float]) -> str:
    """Names and values in words: `temperature 0.6, top_p 0.9`."""
    return ", ".join(f"{name} {value:g}" for name, value in values.items())
