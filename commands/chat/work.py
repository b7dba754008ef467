"""Work of `chat` with a session: reads what the user says, streams the answers, remembers both."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace

from commands.documents.settings import Setup
from commands.options.hints import hint_of, message_of
from commands.output import Output, fail, milliseconds, number, warn
from commands.tables.drafts import Mark, mark_for_stdout, marked_text
from runtime.chat import Message
from runtime.errors import SpecDecError
from runtime.evaluation.steps import output_pieces
from runtime.request import Request, Sequence
from runtime.text import TextStream, stop_words_of

HELP = "/stats: the last answer's numbers; /reset: forget the conversation; /quit: leave; Ctrl-C: end an answer"


@dataclass
class Conversation:
    """The messages so far. K/V of what was said stays in the engine's cache, where the next turn finds it."""

    setup: Setup
    output: Output
    system: str | None
    show_tokens: bool
    messages: list[Message] = field(default_factory=list)
    last: Sequence | None = None
    num_unanswered: int = 0

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.last = None

    def hear(self, line: str) -> bool:
        """A line of the user's: a command, or something to answer. False to leave."""
        match line.strip():
            case "":
                pass
            case "/quit" | "/exit":
                return False
            case "/reset":
                self.reset()
            case "/stats":
                self.output.text(self._stats())
            case text if text.startswith("/"):
                self.output.text(HELP)
            case _:
                self._answer(line)
        return True

    def _answer(self, line: str) -> None:
        """Stream an answer and remember it; what cannot be answered is said, and forgotten."""
        self.messages.append({"role": "user", "content": line})
        try:
            request = self._request()
            pieces = self._pieces(request)
            said = "".join(pieces)
        except SpecDecError as error:
            self.messages.pop()
            self.num_unanswered += 1
            fail(message_of(error), hint_of(error))
            return
        self.messages.append({"role": "assistant", "content": said})

    def _request(self) -> Request:
        """Request for the conversation, with as many tokens as fit."""
        llm = self.setup.llm
        template = llm.request_of(self.setup.params)
        prompt = llm.chat_template.encode(self.messages)
        build = llm.bundle.config.build_config
        longest = min(build.max_input_len, build.max_request_len - 1)
        if len(prompt) > longest:
            said_before = len(self.messages) > 1 + (self.system is not None)
            raise SpecDecError(
                f"the conversation is longer than the engine takes ({longest} tokens): {len(prompt)}",
                hint="/reset begins another" if said_before else "say less, or build an engine with more room",
            )
        request = template.with_prompt(0, prompt, 0)
        return replace(request, max_new_tokens=min(request.max_new_tokens, build.max_request_len - len(prompt)))

    def _pieces(self, request: Request) -> list[str]:
        """The answer's text, printed as it comes; Ctrl-C ends it."""
        self.setup.session.check_requests([request])
        self.last, pieces = None, []
        try:
            show = self.output.styled if self.show_tokens else self.output.text
            for text in self._shown(request):
                show(text, end="")
                pieces.append(text)
        except KeyboardInterrupt:
            self.output.text(" …", end="")
        self.output.text("")
        return [self.last_text] if self.show_tokens else pieces

    @property
    def last_text(self) -> str:
        return "" if self.last is None else self.setup.llm.text(self.last) or ""

    def _shown(self, request: Request) -> Iterator[str]:
        tokenizer = self.setup.llm.tokenizer
        assert tokenizer is not None  # or there were no template
        marked = _MarkedStream(self.setup, mark_for_stdout()) if self.show_tokens else None
        text = TextStream(tokenizer, stop_words_of(request), request.prompt_tokens)
        with closing(self.setup.session.steps([request])) as steps:
            for sequence, _ in steps:
                self.last, finished = sequence, sequence.finish_reason is not None
                if marked is not None:
                    yield marked.next_piece(sequence, finished=finished)
                else:
                    yield text.next_piece(sequence.output_tokens, finished=finished)

    def _stats(self) -> str:
        if self.last is None or self.last.stats.ttft_s is None:
            return "nothing was answered yet"
        stats = self.last.stats
        return (
            f"{stats.num_generated_tokens} tokens in {stats.num_steps} steps, {number(stats.tokens_per_step)} a step; "
            f"{stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} draft tokens accepted; first token after "
            f"{milliseconds(stats.ttft_s)}, then {milliseconds(stats.tpot_s)} each; "
            f"{stats.num_reused_tokens} of {len(self.last.request.prompt_tokens)} prompt tokens found in the K/V cache"
        )


class _MarkedStream:
    """The growing answer with its tokens marked, without what may still change."""

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
        yield from sys.stdin
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
