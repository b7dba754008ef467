"""Grammars for outputs that call tools: text before a call is free; a call follows its format and its tool's schema.

The grammar covers the whole output, so a call may begin anywhere in a draft. With `auto`, text is free up to the tag
that opens a call; in a format without such a tag nothing is constrained. Arguments written as JSON are valid under the
tool's schema. In other notations the grammar fixes the names of arguments, which of them are required, and the type of
each value.

The grammar's text is in llguidance's dialect of Lark.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from runtime.core.forms import check_schema, parts_of
from runtime.core.params import MOST_GRAMMAR, grammar_name
from runtime.text.call_formats import (
    NO_FORMAT,
    BareCall,
    HarmonyCall,
    JsonCall,
    NamedCall,
    PythonCalls,
    ReasoningFormat,
    TaggedCall,
    Tool,
    ToolFormat,
    types_of,
)
from runtime.util.errors import UsageError

_META = re.compile(r"[\\.+*?()|\[\]{}^$/]")
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Style of Python's `json.dumps`, with which templates write calls."""
_FLEXIBLE = {"whitespace_flexible": True}
_NO_CALLS = ToolFormat(NO_FORMAT, JsonCall(), ())
_CLOSED = ("anyOf", "oneOf", "allOf", "$ref", "additionalProperties", "patternProperties", "unevaluatedProperties")


@dataclass(frozen=True)
class Calls:
    """Calls that an output may have. `auto`: calls, text, or both; `required`: only calls; `none`: only text."""

    tools: tuple[Tool, ...]
    choice: Literal["none", "auto", "required"]
    are_parallel: bool = True
    schema: Mapping[str, Any] | None = None
    """Schema for an output that has no call."""


@dataclass(frozen=True)
class SpecialIds:
    """Special tokens of a vocabulary: the ids of added tokens by name, and which of them end an output."""

    by_name: Mapping[str, int]
    end_ids: frozenset[int]


def call_grammar(
    calls: Calls, form: ToolFormat, reasoning: ReasoningFormat | None, special: SpecialIds, *, in_reasoning: bool
) -> str | None:
    """Grammar for a whole output: reasoning, if the model writes any, and then calls or text. With `in_reasoning` the
    prompt has opened the reasoning. None if nothing is constrained.
    """
    if calls.choice != "required" and form.starts_output and calls.schema is None:
        return None
    writer = _Writer(special, form, is_free=calls.choice == "auto")
    section = None if calls.choice == "none" else writer.section(calls)
    if isinstance(form.call, HarmonyCall):
        return writer.text(writer.harmony(section, calls))
    thought = writer.thought(reasoning, in_reasoning=in_reasoning)
    if section is None:
        answer = writer.without_calls()
    elif calls.choice == "required":
        answer = section.whole
    elif calls.schema is not None:
        answer = f"({section.whole} | {writer.json(calls.schema, _STYLE)})"
    else:
        answer = writer.around(section, calls)
    return writer.text(f"{thought} {answer}")


def schema_grammar(schema: str, reasoning: ReasoningFormat, special: SpecialIds) -> str:
    """Grammar for the rest of a reasoning that the prompt has opened, and JSON under a schema behind it."""
    writer = _Writer(special, _NO_CALLS, is_free=False)
    return writer.text(f"{writer.thought(reasoning, in_reasoning=True)} {writer.json(json.loads(schema), _STYLE)}")


def schema_of(tool: Tool) -> dict[str, Any]:
    """Schema of a tool's arguments: an object without further keys, unless the schema has a key such as `anyOf` or
    `additionalProperties`, which says more.
    """
    schema = dict(tool.parameters)
    schema.setdefault("type", "object")
    if not any(name in schema for name in _CLOSED):
        schema.setdefault("properties", {})
        schema["additionalProperties"] = False
    return schema


@dataclass(frozen=True)
class _Section:
    """Rules for the calls of an output: for all that follows the tag that opens them, and for the whole."""

    rest: str
    whole: str


class _Writer:
    """Writes the rules of a grammar."""

    def __init__(self, special: SpecialIds, form: ToolFormat, *, is_free: bool) -> None:
        self._special, self._form, self._is_free = special, form, is_free
        self._rules: dict[str, str] = {}
        self._num_characters = 0
        """Characters in the schemas so far."""
        names = sorted(special.by_name, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, names))) if names else None

    def text(self, start: str) -> str:
        rules = {"start": start} | self._rules
        return "%llguidance {}\n" + "\n".join(f"{name}: {body}" for name, body in rules.items()) + "\n"

    def _rule(self, name: str, body: str) -> str:
        """Add a rule, or replace it; returns its name. A rule `name[lazy]` ends as early as it can."""
        self._rules[name] = body
        return name.partition("[")[0]

    # Terminals

    def literal(self, text: str) -> str:
        """A rule for a text. Names of special tokens in it stand for these tokens."""
        parts, at = [], 0
        for match in self._split.finditer(text) if self._split is not None else ():
            parts += [_quoted(text[at : match.start()]), f"<[{self._special.by_name[match[0]]}]>"]
            at = match.end()
        return " ".join(part for part in [*parts, _quoted(text[at:])] if part)

    def _is_token(self, tag: str) -> bool:
        return tag in self._special.by_name

    def json(self, schema: Any, style: Mapping[str, Any]) -> str:
        """A rule for JSON under a schema. UsageError if it cannot be used, or makes the grammar too long."""
        try:
            check_schema(schema)
        except ValueError as error:
            raise UsageError(f"json_schema cannot be used: {error}", hint="correct it", field="lark") from None
        text = json.dumps({"x-guidance": style} | schema)
        self._num_characters += len(text)
        if self._num_characters > MOST_GRAMMAR:
            raise UsageError(
                f"{grammar_name('lark')} is longer than {MOST_GRAMMAR:,} characters",
                hint="shorten the schemas of the tools: what an argument refers to in `$defs` is repeated for it",
                field="lark",
            )
        return f"%json {text}"

    def _others(self, *tags: str) -> str | None:
        """A rule for any special token except `tags` and those that end the output; None if there is no other."""
        used = {self._special.by_name[tag] for tag in tags if self._is_token(tag)} | self._special.end_ids
        ids = sorted(set(self._special.by_name.values()) - used)
        return f"<[{','.join(map(str, ids))}]>" if ids else None

    def _through(self, name: str, tag: str) -> str:
        """A rule for any text up to and including the tag that ends it."""
        if not self._is_token(tag):
            return self._rule(f"{name}[lazy]", f"/(?s:.*){_pattern(tag)}/")
        others = self._others(tag)
        self._rule("FREE", "/(?s:.+)/")
        gaps = f"({others} FREE?)*" if others else ""
        return self._rule(name, f"FREE? {gaps} {self.literal(tag)}")

    # Text before calls

    def thought(self, reasoning: ReasoningFormat | None, *, in_reasoning: bool) -> str:
        if reasoning is None:
            return ""
        through = self._through("thought", reasoning.close)
        self._rule("GAP", r"/[ \n]{1,4}/")
        return f"{through} GAP?" if in_reasoning else f"({self.literal(reasoning.open)} {through} GAP?)?"

    def around(self, section: _Section, calls: Calls) -> str:
        """A rule for free text with calls: after the tag that opens a call, only a call may follow."""
        tag = self._form.begin or self._form.open
        others = self._others(tag)
        if self._is_token(tag):
            self._rule("FREE", "/(?s:.+)/")
            gap = f"{others} | " if others else ""
            if calls.are_parallel:
                return f"FREE? (({gap}{section.whole}) FREE?)*"
            return f"FREE? ({others} FREE?)* {section.whole}?" if others else f"FREE? {section.whole}?"
        opened = self._rule("opened[lazy]", f"/(?s:.*){_pattern(tag)}/")
        self._uncalled(tag)
        gap = f"UNCALLED? {others}" if others else ""
        if calls.are_parallel:
            return f"({f'{gap} | ' if gap else ''}{opened} {section.rest})* UNCALLED?"
        return f"{f'({gap})*' if gap else ''} (UNCALLED | {opened} {section.rest})?"

    def without_calls(self) -> str:
        """A rule for free text in which the tag that opens a call does not occur."""
        tag = self._form.begin or self._form.open
        others = self._others(tag)
        text = self._rule("FREE", "/(?s:.+)/") if self._is_token(tag) else self._uncalled(tag)
        return f"{text}? ({others} {text}?)*" if others else f"{text}?"

    def _uncalled(self, tag: str) -> str:
        """A rule for text in which the tag, written in ordinary characters, does not occur."""
        return self._rule("UNCALLED", f"/(?s:.+)/ & ~/(?s:.*){_pattern(tag)}(?s:.*)/")

    # Calls

    def section(self, calls: Calls) -> _Section:
        """The rules for all calls of an output."""
        form, call = self._form, self._form.call
        one = self._rule("call", " | ".join(self._call(i, tool) for i, tool in enumerate(calls.tools)))
        if isinstance(call, HarmonyCall):
            return _Section(one, one)
        if isinstance(call, PythonCalls) or (isinstance(call, JsonCall) and call.is_list):
            more = f'(", " {one})*' if calls.are_parallel else ""
            rest = f'"[" {one} {more} "]"'
            if isinstance(call, PythonCalls):
                return _Section(rest, self._rule("calls", rest))
            rest = self._rule("list", f"{rest} {self.literal(form.close)}")
            return _Section(rest, self._rule("calls", f"{self.literal(form.open)} list"))
        if form.starts_output:
            more = f"({_quoted(form.between)} {one})*" if calls.are_parallel else ""
            return _Section(one, self._rule("calls", f"{one} {more}"))
        rest = self._rule("rest", f"{_quoted(form.space)} {one} {self.literal(form.space + form.close)}")
        more = ""
        if calls.are_parallel:
            more = self._rule("again", f"{self.literal(form.between + form.open)} {rest}") + "*"
        after = f"{rest} {more}"
        if form.begin:
            after = f"{self.literal(form.open)} {after} {self.literal(form.end)}"
        return _Section(after, self._rule("calls", f"{self.literal(form.begin or form.open)} {after}"))

    def harmony(self, section: _Section | None, calls: Calls) -> str:
        """A rule for gpt-oss's messages. The last one is a call (`required`), or may be a call (`auto`); without a
        `section` there are no calls.
        """
        self._rule("FREE", "/(?s:.+)/")
        kinds = '"analysis"' if calls.choice == "required" else '("analysis" | "commentary")'
        channel, message = self.literal("<|channel|>"), self.literal("<|message|>")
        before = f"({channel} {kinds} {message} FREE? {self.literal('<|end|><|start|>assistant')})*"
        text = "FREE?" if calls.schema is None else self.json(calls.schema, _FLEXIBLE)
        final = f'{channel} "final" {message} {text}'
        if section is None:
            return f"{before} {final}"
        return f"{before} ({section.whole} | {final})" if calls.choice == "auto" else f"{before} {section.whole}"

    def _call(self, index: int, tool: Tool) -> str:
        name, is_free = tool.name, self._is_free and not tool.is_strict
        match self._form.call:
            case JsonCall(key):
                before = _quoted(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ')
                return f'{before} {self._arguments(tool, is_free=is_free)} "}}"'
            case NamedCall(mark, before, after):
                arguments = self._arguments(tool, is_free=is_free)
                return f"{self.literal(before)} {_quoted(name)} {self.literal(mark)} {arguments} {self.literal(after)}"
            case TaggedCall() as tags:
                opening = f"{self.literal(tags.name_open)} {_quoted(name)}"
                inner = self._tagged(tool, tags, is_free=is_free)
                return f"{opening} {inner} {self.literal(tags.end)}"
            case PythonCalls():
                return f'{_quoted(name + "(")} {self._pairs(index, tool, self._python_pair)} ")"'
            case BareCall(quote, before):
                opening = _quoted(before + name + "{")
                pair_of = partial(self._bare_pair, quote)
                pairs = self._bare_pairs(quote) if is_free else self._pairs(index, tool, pair_of, ",")
                return f'{opening} {pairs} "}}"'
            case HarmonyCall():
                arguments = self._arguments(tool, is_free=is_free, style=_FLEXIBLE)
                to, message = f"to=functions.{name}", f"{self.literal('<|message|>')} {arguments}"
                usual = f"{self.literal(f'<|channel|>commentary {to} <|constrain|>json')} {message}"
                other = (
                    f'{self.literal(f" {to}<|channel|>commentary ")} {self.literal("<|constrain|>")}? "json" {message}'
                )
                return f"{usual} | {other}"

    def _arguments(self, tool: Tool, *, is_free: bool, style: Mapping[str, Any] = _STYLE) -> str:
        """A rule for arguments as JSON."""
        if is_free:
            return self._rule("any_object", self.json({"type": "object"}, _FLEXIBLE))
        return self.json(schema_of(tool), style)

    # Notations of their own

    def _tagged(self, tool: Tool, tags: TaggedCall, *, is_free: bool) -> str:
        space = tags.value_space
        name_close = tags.name_close if tags.name_close == "\n" else tags.name_close + space
        between = "\n" if not tags.value_space else ""
        if is_free:
            self._rule("KEY", "/[^<>\\n]+/")
            value = self._text_value(tags)
            pair = (
                f"{self.literal(tags.key_open)} KEY {self.literal(tags.key_close + between + tags.value_open + space)}"
            )
            return f"{self.literal(name_close)} ({pair} {value})*"
        parts = [self.literal(name_close)]
        for key, schema in tool.properties().items():
            head = self.literal(f"{tags.key_open}{key}{tags.key_close}{between}{tags.value_open}{space}")
            tail = f"{space}{tags.value_close}\n"
            if types_of(schema) - {"string"} or not types_of(schema):
                body = f"{self.json(_with_definitions(schema, tool), _STYLE)} {self.literal(tail)}"
            elif choices := _text_choices(schema):
                body = f"({' | '.join(map(_quoted, choices))}) {self.literal(tail)}"
            else:
                body = self._text_value(tags)
            parts.append(f"({head} {body}){'' if key in tool.required() else '?'}")
        return " ".join(parts)

    def _text_value(self, tags: TaggedCall) -> str:
        """A rule for any text value and the tag that ends it."""
        if self._is_token(tags.value_close):
            return f"{self._through('value', tags.value_close)} {_quoted(chr(10))}"
        return self._rule("value[lazy]", f"/(?s:.*){_pattern(tags.value_space + tags.value_close)}\\n/")

    def _pairs(self, index: int, tool: Tool, pair_of: Callable[[str, Any], str], separator: str = ", ") -> str:
        """A rule for arguments in the order of the schema, with separators between the arguments that are present."""
        rest = {True: "", False: ""}
        for i, (key, schema) in reversed(list(enumerate(tool.properties().items()))):
            pair, after = pair_of(key, _with_definitions(schema, tool)), rest[False]
            new = {}
            for is_first in (True, False):
                body = f"{'' if is_first else _quoted(separator)} {pair} {after}"
                if key not in tool.required():
                    skipped = rest[is_first]
                    body = f"({body}) | {skipped}" if skipped else f"({body})?"
                new[is_first] = self._rule(f"pairs_{index}_{i}_{'first' if is_first else 'later'}", body)
            rest = new
        return rest[True]

    def _bare_pairs(self, quote: str) -> str:
        value = self._bare_value(quote)
        return self._rule("bare_pairs", f'(KEY ":" {value} ("," KEY ":" {value})*)?')

    def _bare_value(self, quote: str) -> str:
        """A rule for any value in the notation without quotes."""
        text = self._bare_text(quote)
        self._rule("KEY", "/[A-Za-z_][A-Za-z0-9_]*/")
        self._rule("bare_object", '"{" (KEY ":" bare_value ("," KEY ":" bare_value)*)? "}"')
        self._rule("bare_list", '"[" (bare_value ("," bare_value)*)? "]"')
        scalar = self.json({"type": ["number", "boolean", "null"]}, _STYLE)
        return self._rule("bare_value", f"{text} | {scalar} | bare_object | bare_list")

    def _bare_text(self, quote: str) -> str:
        return self._rule("bare_text", f"{self.literal(quote)} {self._through('bare_rest', quote)}")

    def _python_pair(self, key: str, schema: Any) -> str:
        types = types_of(schema)
        value = self.json(schema, _STYLE)
        if types == {"boolean"}:
            value = '("True" | "False")'
        elif types == {"null"}:
            value = '"None"'
        return f"{_quoted(key + '=')} {value}"

    def _bare_pair(self, quote: str, key: str, schema: Any) -> str:
        types = types_of(schema)
        if types == {"string"}:
            choices = " | ".join(map(_quoted, _text_choices(schema)))
            value = f"{self.literal(quote)} ({choices}) {self.literal(quote)}" if choices else self._bare_text(quote)
        elif types and types <= {"number", "integer", "boolean", "null"}:
            value = self.json(schema, _STYLE)
        else:
            value = self._bare_value(quote)
        return f"{_quoted(key + ':')} {value}"


def _with_definitions(schema: Any, tool: Tool) -> dict[str, Any]:
    """A part of a tool's schema that can stand alone: it carries the definitions that it refers to."""
    if not isinstance(schema, Mapping):
        return {}
    refers = any("$ref" in part or "$dynamicRef" in part for part in parts_of(dict(schema)))
    own = [name for name in ("$defs", "definitions") if refers and name in tool.parameters]
    return {name: tool.parameters[name] for name in own} | dict(schema)


def _text_choices(schema: Any) -> list[str]:
    found = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(schema, Mapping) and isinstance(const := schema.get("const"), str):
        found = [const]
    return found if isinstance(found, list) and all(isinstance(one, str) and one for one in found) else []


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _pattern(text: str) -> str:
    """A regular expression that matches exactly this text."""
    return _META.sub(lambda match: "\\" + match[0], text).replace("\n", "\\n")
