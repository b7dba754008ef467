"""Reads a model's output as it grows: text, reasoning, and tool calls with their arguments.

The result does not depend on how the output is cut into pieces, so the parts of a stream add up to the whole answer. A
call is reported as soon as its name is known, and its arguments as they come, if the format writes them as JSON. Text
that looks like a call and is none is reported as text.

Special tokens of the vocabulary are represented in the text by half surrogate pairs, which no text of a model contains
(`SpecialTokens`). A word that only looks like a special token has no effect.
"""

import json
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from runtime.text.call_formats import (
    SPACE,
    BareCall,
    BareValues,
    HarmonyCall,
    JsonCall,
    Malformed,
    NamedCall,
    PythonCalls,
    ReasoningFormat,
    TaggedCall,
    Tool,
    ToolFormat,
    escaped,
    json_of,
    loaded,
    python_calls,
    types_of,
    unquoted,
)

_FIRST_MARK, _MOST_MARKS = 0xD800, 0x800
_MOST_NAME = 256
"""Most characters in a function's name, or in a header; a longer text is neither."""
_RECIPIENT = re.compile(r"to=(\S+)")
_BARE_OBJECT = '{"name"'
"""Beginning of a call that no tag opens."""


class Said(NamedTuple):
    """A part of an output: text, reasoning or a call. A `call` is its function's name; the `arguments` that follow are
    JSON.
    """

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str


class SpecialTokens:
    """The marks that stand for special tokens in the text that is parsed."""

    def __init__(self, ids: Mapping[str, int], tags: Iterable[str]) -> None:
        """`ids` are the vocabulary's special tokens by name; only those that occur in a text of `tags` are marked."""
        all_tags = list(tags)
        names = [name for name in ids if name and any(name in tag for tag in all_tags)][:_MOST_MARKS]
        self._marks = {name: chr(_FIRST_MARK + i) for i, name in enumerate(sorted(names, key=len, reverse=True))}
        self._names = {ord(mark): name for name, mark in self._marks.items()}
        self.shown = {ids[name]: mark for name, mark in self._marks.items()}
        """Marks in the text, by token."""

    def marked(self, tag: str) -> str:
        """A tag with the marks of its special tokens, as it occurs in the text."""
        for name, mark in self._marks.items():
            tag = tag.replace(name, mark)
        return tag

    def named(self, text: str) -> str:
        """The text with each mark replaced by its token's name."""
        return text.translate(self._names)


@dataclass(frozen=True)
class OutputForm:
    """Formats of outputs, and the `tools` that may be called. Without tools, no calls are looked for."""

    calls: ToolFormat | None
    reasoning: ReasoningFormat | None
    special: SpecialTokens
    tools: Mapping[str, Tool] = field(default_factory=dict)

    @classmethod
    def of(
        cls, calls: ToolFormat | None, reasoning: ReasoningFormat | None, ids: Mapping[str, int], tools: Iterable[Tool]
    ) -> "OutputForm":
        return cls(calls, reasoning, SpecialTokens(ids, tags_of(calls, reasoning)), {tool.name: tool for tool in tools})

    @property
    def says_only_text(self) -> bool:
        is_harmony = self.calls is not None and isinstance(self.calls.call, HarmonyCall)
        return self.reasoning is None and not self.tools and not is_harmony

    def is_in_reasoning(self, prompt: str) -> bool:
        """True if this text ends with the tag that opens reasoning. Special tokens are in it by name."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.open.strip())


HARMONY_MARKS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>", "<|return|>")


def tags_of(calls: ToolFormat | None, reasoning: ReasoningFormat | None) -> list[str]:
    """All tags of these formats that may be special tokens."""
    tags = [] if reasoning is None else [reasoning.open, reasoning.close]
    if calls is not None:
        tags += [*calls.opens, calls.close, calls.begin, calls.end]
        match calls.call:
            case NamedCall(mark, before, after):
                tags += [mark, before, after, "[CALL_ID]"]
            case TaggedCall():
                call = calls.call
                tags += [call.name_open, call.key_open, call.key_close, call.value_open, call.value_close, call.end]
            case BareCall(quote):
                tags.append(quote)
            case HarmonyCall():
                tags += HARMONY_MARKS
    return tags


class Parser(Protocol):
    """Reads an output as it grows."""

    def feed(self, text: str) -> list[Said]: ...

    def end(self, *, is_cut: bool = False) -> list[Said]:
        """Report the text that was held back, since no more output comes. `is_cut` is True if the output ended for lack
        of room.
        """
        ...


class _Unfinished(Exception):
    """Exception: the output ended within a call."""


Reading = Generator[None, None, None]
Say = Callable[[str], None]


class OutputParser:
    """Parser of an output that is still growing."""

    def __init__(self, form: OutputForm, *, in_reasoning: bool = False) -> None:
        self._form, self._special = form, form.special
        self._said: list[Said] = []
        self._text, self._at = "", 0
        self._is_whole = self._is_cut = False
        self._raw: int | None = None
        """Start of a call of which nothing was reported yet: it may turn out to be text."""
        self._space, self._drops_space = "", False
        self._num_calls = 0
        self._has_reasoned = False
        self._steps = self._read(in_reasoning=in_reasoning)
        self._advance()

    def feed(self, text: str) -> list[Said]:
        """Read more of the output."""
        kept = self._at if self._raw is None else min(self._raw, self._at)
        self._text = self._text[kept:] + text
        self._at -= kept
        self._raw = None if self._raw is None else self._raw - kept
        return self._advance()

    def end(self, *, is_cut: bool = False) -> list[Said]:
        """Report as `Parser.end` says; nothing of a call that was cut off before its name was complete."""
        self._is_whole, self._is_cut = True, is_cut
        return self._advance()

    def _advance(self) -> list[Said]:
        next(self._steps, None)
        said, self._said = joined(self._said), []
        return said

    # Reports

    def _say(self, kind: Literal["content", "reasoning", "call", "arguments"], text: str) -> None:
        if text or kind == "call":
            self._said.append(Said(kind, self._special.named(text)))

    def _say_content(self, text: str) -> None:
        """Report content. White space waits for the next text: around calls and after reasoning it is dropped."""
        text = self._space + text
        if self._drops_space:
            text = text.lstrip(SPACE)
        shown = text.rstrip(SPACE)
        self._space = text[len(shown) :]
        if shown:
            self._drops_space = False
            self._say("content", shown)

    def _drop_space(self) -> None:
        self._space, self._drops_space = "", True

    def _begin_reasoning(self) -> None:
        if self._has_reasoned:
            self._say_reasoning("\n")
        self._has_reasoned = True

    def _say_reasoning(self, text: str) -> None:
        self._say("reasoning", text)

    def _say_arguments(self, text: str) -> None:
        self._say("arguments", text)

    def _begin_call(self, name: str) -> None:
        name = self._special.named(name).strip()
        calls = self._form.calls
        if not name or len(name) > _MOST_NAME or (calls and calls.starts_output and name not in self._form.tools):
            raise Malformed
        self._raw = None
        self._num_calls += 1
        self._say("call", name)

    # Reading

    def _more(self) -> Generator[None, None, bool]:
        """Wait for more output; False if no more comes."""
        if self._is_whole:
            return False
        yield
        return True

    def _until(self, tags: tuple[str, ...], say: Say) -> Generator[None, None, str | None]:
        """Report the text up to the first of `tags`, which is consumed and returned; None if no tag comes."""
        tags = tuple(tag for tag in tags if tag)
        while True:
            found = [(i, -len(tag), tag) for tag in tags if (i := self._text.find(tag, self._at)) >= 0]
            if found:
                start, _, tag = min(found)
                say(self._text[self._at : start])
                self._at = start + len(tag)
                return tag
            end = len(self._text) - self._num_begun(tags)
            say(self._text[self._at : end])
            self._at = end
            if not (yield from self._more()):
                if not (self._is_cut and self._num_calls):  # else the rest begins the tag of a further call
                    say(self._text[self._at :])
                self._at = len(self._text)
                return None

    def _num_begun(self, tags: tuple[str, ...]) -> int:
        """Number of characters at the end that may be the beginning of a tag."""
        rest = self._text[max(self._at, len(self._text) - max(map(len, tags), default=0)) :]
        return max((n for tag in tags for n in range(1, len(tag)) if rest.endswith(tag[:n])), default=0)

    def _collect(self, tags: tuple[str, ...], most: int | None = None) -> Generator[None, None, tuple[str, str]]:
        """The text before the first of `tags`, and that tag. Raises `Malformed` if the text is longer than `most`."""
        parts: list[str] = []

        def add(text: str) -> None:
            parts.append(text)
            if most is not None and sum(map(len, parts)) > most:
                raise Malformed

        tag = yield from self._until(tags, add)
        if tag is None:
            raise _Unfinished
        return "".join(parts), tag

    def _peek(self) -> Generator[None, None, str]:
        """The next character that is not white space, without consuming it; empty at the end of the output."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in SPACE:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not (yield from self._more()):
                return ""

    def _has(self, text: str) -> Generator[None, None, bool]:
        """Consume this text if it comes next, after any white space."""
        if not text:
            return False
        yield from self._peek()
        while True:
            rest = self._text[self._at : self._at + len(text)]
            if rest == text:
                self._at += len(text)
                return True
            if not text.startswith(rest):
                return False
            if not (yield from self._more()):
                self._at = len(self._text) if self._is_cut else self._at  # the rest is a tag that was cut off
                return False

    def _expect(self, text: str) -> Reading:
        if not (yield from self._has(text)):
            raise _Unfinished if self._is_whole and self._at >= len(self._text) else Malformed

    def _read(self, *, in_reasoning: bool) -> Reading:
        if self._form.calls is not None and isinstance(self._form.calls.call, HarmonyCall):
            yield from self._read_harmony()
            return
        if in_reasoning:
            yield from self._read_reasoning()
        calls, marked = self._form.calls if self._form.tools else None, self._special.marked
        if calls is not None and calls.starts_output:
            yield from self._read_bare_output(calls)
        opens = () if calls is None else tuple(map(marked, (calls.begin,) if calls.begin else calls.opens))
        if calls is not None and calls.starts_output and isinstance(calls.call, JsonCall):
            opens = (*opens, _BARE_OBJECT)
        reasoning = self._form.reasoning
        think = () if reasoning is None else (marked(reasoning.open),)
        while True:
            tag = yield from self._until((*opens, *think), self._say_content)
            if tag is None:
                break
            if tag in think:
                self._drop_space()
                yield from self._read_reasoning()
            else:
                assert calls is not None
                yield from self._read_calls(calls, tag)
        self._say("content", self._space)

    def _read_reasoning(self) -> Reading:
        assert self._form.reasoning is not None
        self._begin_reasoning()
        yield from self._peek()
        yield from self._until((self._special.marked(self._form.reasoning.close),), _Trimmed(self._say_reasoning).add)
        self._drop_space()

    def _read_bare_output(self, calls: ToolFormat) -> Reading:
        """Read calls without an opening tag, if the output begins with a call."""
        self._raw = self._at
        first = yield from self._peek()
        if first == ("[" if isinstance(calls.call, PythonCalls) else "{"):
            yield from self._try(self._read_list(calls))
        else:
            self._at, self._raw = self._raw, None

    def _read_calls(self, calls: ToolFormat, tag: str) -> Reading:
        """Read the text after an opening tag: a call, a list of calls, or all calls."""
        self._raw = self._at - len(tag)
        before = self._space
        self._space = ""
        num_before = self._num_calls
        yield from self._try(self._read_section(calls, tag), before, has_tag=tag != _BARE_OBJECT)
        if self._num_calls > num_before:
            self._drop_space()

    def _try(self, reading: Reading, space: str = "", *, has_tag: bool = False) -> Reading:
        """Read text that should be a call.

        If it is not a call and nothing of it was reported yet, it is reported as text. Without an opening tag, a
        beginning that was cut off may be other JSON, so it is reported as text too.
        """
        try:
            yield from reading
        except Malformed:
            pass
        except _Unfinished:
            if self._is_cut and (has_tag or self._num_calls):
                self._raw = None
        if self._raw is not None:
            text, self._raw = self._text[self._raw : self._at], None
            self._space = space
            self._say_content(text)

    def _read_section(self, calls: ToolFormat, tag: str) -> Reading:
        marked = self._special.marked
        if not calls.begin:
            yield from self._read_one(calls, tag)
            return
        while True:
            _, found = yield from self._collect((*map(marked, calls.opens), marked(calls.end)))
            if found == marked(calls.end):
                return
            yield from self._read_one(calls, found)

    def _read_one(self, calls: ToolFormat, tag: str) -> Reading:
        """Read a call and its closing tag."""
        is_part = isinstance(calls.call, TaggedCall) and tag == self._special.marked(calls.call.name_open)
        if is_part or tag == _BARE_OBJECT:
            self._at -= len(tag)
        try:
            yield from self._read_list(calls)
        except Malformed:
            if self._raw is not None:
                raise
            yield from self._until((self._special.marked(calls.close),), _ignore)
            return
        if calls.close:
            yield from self._has(self._special.marked(calls.close))

    def _read_list(self, calls: ToolFormat) -> Reading:
        call = calls.call
        match call:
            case JsonCall() | NamedCall():
                first = yield from self._peek()
                if first == "[":
                    yield from self._expect("[")
                    while not (yield from self._has("]")):
                        yield from self._read_object()
                        yield from self._has(",")
                elif first == "{" or isinstance(call, JsonCall):
                    yield from self._read_object(needs_arguments=calls.starts_output)
                    while calls.between == "; " and (yield from self._has(";")):
                        yield from self._read_object(needs_arguments=calls.starts_output)
                else:
                    assert isinstance(call, NamedCall)
                    yield from self._read_named(call)
            case TaggedCall():
                yield from self._read_tagged(call, self._special.marked(calls.close))
            case PythonCalls():
                yield from self._read_python()
            case BareCall():
                yield from self._read_bare(call, self._special.marked(calls.close))

    # Calls in JSON

    def _read_object(self, *, needs_arguments: bool = False) -> Reading:
        """Read `{"name": …, "arguments": {…}}`, with its keys in any order and with other keys."""
        yield from self._expect("{")
        name, arguments, is_told = None, None, False
        while True:
            key = yield from self._read_string()
            yield from self._expect(":")
            if key == "name" and name is None:
                name = yield from self._read_string()
                if arguments is not None or not needs_arguments:
                    self._begin_call(name)
                if arguments is not None:
                    is_told = True
                    self._say_arguments(arguments)
            elif key in ("arguments", "parameters") and arguments is None and not is_told:
                if name is None:
                    arguments = yield from self._read_arguments(None)
                else:
                    is_told = True
                    if needs_arguments:
                        self._begin_call(name)
                    yield from self._read_arguments(self._say_arguments)
            else:
                yield from self._read_json(_ignore)
            if (yield from self._has("}")):
                break
            yield from self._expect(",")
        if name is None or (needs_arguments and not is_told):
            raise Malformed
        if not is_told:
            self._say_arguments("{}")

    def _read_arguments(self, say: Say | None) -> Generator[None, None, str]:
        """Read an object, or a JSON string that contains one, and report it; null is reported as `{}`."""
        parts: list[str] = []
        first = yield from self._peek()
        yield from self._read_json(say if say is not None and first == "{" else parts.append)
        text = "".join(parts)
        if first == '"':
            text = unquoted(text)
        elif first == "n":
            text = "{}"
        if say is not None and first != "{":
            say(text)
        return text

    def _read_string(self) -> Generator[None, None, str]:
        yield from self._expect('"')
        self._at -= 1
        parts: list[str] = []
        yield from self._read_json(parts.append)
        found = loaded("".join(parts))
        if not isinstance(found, str):
            raise Malformed
        return found

    def _read_json(self, say: Say) -> Reading:
        """Read a JSON value and report it unchanged."""
        first = yield from self._peek()
        if not first:
            raise _Unfinished
        if first not in '{["':
            yield from self._read_scalar(say)
            return
        yield from self._read_nested(say, "{}[]", '"')

    def _read_nested(self, say: Say, brackets: str, quotes: str) -> Reading:
        """Read from the first bracket or quote to the one that closes it; `brackets` lists the pairs."""
        depth, quote, is_escaped, i = 0, "", False, self._at
        while True:
            while i < len(self._text):
                character = self._text[i]
                i += 1
                if is_escaped:
                    is_escaped = False
                elif quote:
                    is_escaped, quote = character == "\\", "" if character == quote else quote
                elif character in quotes:
                    quote = character
                else:
                    depth += (character in brackets[::2]) - (character in brackets[1::2])
                if not depth and not quote:
                    say(self._text[self._at : i])
                    self._at = i
                    return
            say(self._text[self._at :])
            self._at = len(self._text)
            if not (yield from self._more()):
                raise _Unfinished
            i = self._at

    def _read_scalar(self, say: Say) -> Reading:
        start = self._text[self._at]
        if not (start.isalnum() or start == "-"):
            raise Malformed
        while True:
            end = self._at
            while end < len(self._text) and self._text[end] not in ",}]" + SPACE:
                end += 1
            say(self._text[self._at : end])
            self._at = end
            if end < len(self._text) or not (yield from self._more()):
                return

    def _read_named(self, call: NamedCall) -> Reading:
        """Read `name`, a mark, and the arguments. Mistral's calls may have an id between name and mark."""
        marked = self._special.marked
        if call.before:
            yield from self._expect(marked(call.before))
        marks = (marked(call.mark.strip()), marked("[CALL_ID]"), "{")
        name, mark = yield from self._collect(marks, _MOST_NAME)
        self._begin_call(name)
        if mark == marks[1]:
            _, mark = yield from self._collect((marks[0], "{"), _MOST_NAME)
        if mark == "{":
            self._at -= 1
        yield from self._read_arguments(self._say_arguments)
        if call.after:
            yield from self._has(marked(call.after.strip()))

    # Calls in tags

    def _read_tagged(self, call: TaggedCall, close: str) -> Reading:
        marked = self._special.marked
        if call.name_open:
            yield from self._expect(marked(call.name_open))
        else:
            yield from self._peek()
        key_open, end = marked(call.key_open), marked(call.end) or close
        name, tag = yield from self._collect((marked(call.name_close), key_open, close), _MOST_NAME)
        if tag != marked(call.name_close):
            self._at -= len(tag)
        self._begin_call(name)
        tool = self._form.tools.get(name.strip())
        properties = {} if tool is None else tool.properties()
        opening = "{"
        while True:
            _, tag = yield from self._collect(tuple(dict.fromkeys((key_open, end, close))))
            if tag != key_open:
                break
            key, _ = yield from self._collect((marked(call.key_close),), _MOST_NAME)
            key = self._special.named(key).strip()
            if call.value_open:
                yield from self._expect(marked(call.value_open))
            self._say_arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
            opening = ", "
            yield from self._read_value(call, marked(call.value_close), types_of(properties.get(key)))
        self._say_arguments("{}" if opening == "{" else "}")
        if tag == close and not call.end:
            self._at -= len(tag)

    def _read_value(self, call: TaggedCall, close: str, types: frozenset[str]) -> Reading:
        """Read a value: a text is reported as it comes, another value when it is complete."""
        if types != {"string"}:
            text, _ = yield from self._collect((close,))
            self._say_arguments(json_of(_without_frame(self._special.named(text), call.value_space), types))
            return
        self._say_arguments('"')
        inner = _Framed(lambda text: self._say_arguments(escaped(self._special.named(text))), call.value_space)
        if (yield from self._until((close,), inner.add)) is None:
            raise _Unfinished
        self._say_arguments('"')

    # Calls in notations of their own, reported when they are complete

    def _read_python(self) -> Reading:
        parts: list[str] = []
        if (yield from self._peek()) != "[":
            raise Malformed
        yield from self._read_nested(parts.append, "()[]{}", "\"'")
        for name, arguments in python_calls(self._special.named("".join(parts)), self._form.tools):
            self._begin_call(name)
            self._say_arguments(json.dumps(arguments, ensure_ascii=False))

    def _read_bare(self, call: BareCall, close: str) -> Reading:
        yield from self._expect(call.before)
        name, _ = yield from self._collect(("{",), _MOST_NAME)
        text, _ = yield from self._collect((close,))
        self._at -= len(close)
        arguments = BareValues("{" + text, self._special.marked(call.quote)).value()
        self._begin_call(name)
        self._say_arguments(json.dumps(arguments, ensure_ascii=False))

    # Messages

    def _read_harmony(self) -> Reading:
        """Read messages `header<|message|>text<|end|>`; the prompt has begun the first."""
        mark = dict(zip(HARMONY_MARKS, map(self._special.marked, HARMONY_MARKS), strict=True))
        ends = tuple(mark[name] for name in ("<|end|>", "<|start|>", "<|channel|>", "<|call|>", "<|return|>"))
        pending = ""
        while True:
            parts: list[str] = [pending]
            if (yield from self._until((mark["<|message|>"],), parts.append)) is None:
                text = "".join(parts)
                self._say("content", text if mark["<|channel|>"] not in text else "")
                return
            header = "".join(parts)
            say = self._sink_of(header, mark["<|channel|>"])
            ended = yield from self._until(ends, say)
            pending = ended if ended == mark["<|channel|>"] else ""
            if ended is None:
                return

    def _sink_of(self, header: str, channel: str) -> Say:
        words = self._special.named(header.replace(channel, " <|channel|>").replace("<|constrain|>", " "))
        recipient = _RECIPIENT.search(words.replace("<|", " <|"))
        if recipient is not None and recipient[1].startswith("functions."):
            self._begin_call(recipient[1].removeprefix("functions."))
            return self._say_arguments
        if recipient is not None or "<|channel|>analysis" in words:
            self._begin_reasoning()
            return self._say_reasoning
        return lambda text: self._say("content", text)


def _ignore(text: str) -> None:
    """Report function that reports nothing."""


class _Trimmed:
    """Reports a text without the white space at its end."""

    def __init__(self, say: Say) -> None:
        self._say, self._space = say, ""

    def add(self, text: str) -> None:
        text = self._space + text
        shown = text.rstrip(SPACE)
        self._space = text[len(shown) :]
        self._say(shown)


class _Framed:
    """Reports a text without one `frame`, such as a line break, at its start and one at its end."""

    def __init__(self, say: Say, frame: str) -> None:
        self._say, self._frame, self._held, self._has_begun = say, frame, "", not frame

    def add(self, text: str) -> None:
        if text and not self._has_begun:
            self._has_begun = True
            text = text.removeprefix(self._frame)
        text = self._held + text
        self._held = self._frame if self._frame and text.endswith(self._frame) else ""
        self._say(text.removesuffix(self._held))


def _without_frame(text: str, frame: str) -> str:
    return text.removeprefix(frame).removesuffix(frame) if frame else text


def joined(said: Iterable[Said]) -> list[Said]:
    """Join neighbouring parts of the same kind."""
    parts: list[Said] = []
    for kind, text in said:
        if parts and parts[-1].kind == kind != "call":
            parts[-1] = Said(kind, parts[-1].text + text)
        else:
            parts.append(Said(kind, text))
    return parts
