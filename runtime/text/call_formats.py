"""Formats in which models write tool calls and reasoning: one table, looked up by the text of a chat template.

A format describes the text around a call, and how the call's name and arguments are written. The parser
(`runtime.text.parser`) reads this form and ignores extra white space; the grammar (`runtime.text.call_grammar`) holds
an output to it, as models were trained to write it. The formats come from the chat templates that the models' makers
publish.

The functions at the end turn the arguments of a call, in each format's notation, into JSON.
"""

import ast
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from runtime.util.errors import UsageError
from runtime.util.words import word_among


@dataclass(frozen=True)
class JsonCall:
    """Calls as JSON: `{"name": …, "arguments": {…}}`, or a list of calls: `[{…}, {…}]`."""

    arguments: str = "arguments"
    is_list: bool = False


@dataclass(frozen=True)
class NamedCall:
    """Calls with a name, a mark, and arguments as JSON; `before` precedes the name, `after` follows the arguments."""

    mark: str
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class TaggedCall:
    """Calls with the name and each argument between tags. Text arguments stand as they are, others as JSON."""

    name_open: str
    name_close: str
    key_open: str
    key_close: str
    value_open: str
    value_close: str
    end: str
    value_space: str = ""
    """White space around a value, which is not part of it."""


@dataclass(frozen=True)
class PythonCalls:
    """Calls in Python's notation: `[name(key=value, …), …]`."""


@dataclass(frozen=True)
class BareCall:
    """Calls such as `call:name{key:value,…}`: keys have no quotes, and texts stand between marks of this format."""

    quote: str
    before: str = "call:"


@dataclass(frozen=True)
class HarmonyCall:
    """Calls as messages of gpt-oss: each message has a channel, and a message that is a call has a recipient."""


@dataclass(frozen=True)
class ToolFormat:
    """A format of calls. `opens` are the texts that begin a call or a list of calls; the first is the usual one."""

    name: str
    call: JsonCall | NamedCall | TaggedCall | PythonCalls | BareCall | HarmonyCall
    known_by: tuple[tuple[str, ...], ...]
    """Groups of texts. A chat template that has all texts of a group uses this format."""
    opens: tuple[str, ...] = ()
    close: str = ""
    space: str = ""
    """White space behind `open` and before `close`."""
    between: str = ""
    begin: str = ""
    """Text before all calls of an output."""
    end: str = ""
    starts_output: bool = False
    """True if calls need no mark: an output that begins like a call is a call."""

    @property
    def open(self) -> str:
        return self.opens[0] if self.opens else ""


@dataclass(frozen=True)
class ReasoningFormat:
    """Format of the reasoning that a model writes before its answer."""

    name: str
    known_by: str
    open: str
    close: str
    also_closed_by: tuple[str, ...] = ()
    end: str = ""
    """Text that is forced when a budget for thinking is spent, if it is more than `close`."""

    @property
    def closes(self) -> tuple[str, ...]:
        return (self.close, *self.also_closed_by)


TOOL_FORMATS = (
    ToolFormat("gpt_oss", HarmonyCall(), (("<|channel|>", "<|message|>"),)),
    ToolFormat(
        "qwen3_coder",
        TaggedCall("<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>", "\n"),
        (("<function=", "<parameter="),),
        ("<tool_call>", "<function="),
        "</tool_call>",
        space="\n",
        between="\n",
    ),
    ToolFormat(
        "glm",
        TaggedCall("", "\n", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", ""),
        (("<arg_key>",),),
        ("<tool_call>",),
        "</tool_call>",
        between="\n",
    ),
    ToolFormat(
        "deepseek_v3",
        NamedCall("\n```json\n", "function<｜tool▁sep｜>", "\n```"),
        (("<｜tool▁calls▁begin｜>", "```json"),),
        ("<｜tool▁call▁begin｜>",),
        "<｜tool▁call▁end｜>",
        between="\n",
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    ToolFormat(
        "deepseek_v31",
        NamedCall("<｜tool▁sep｜>"),
        (("<｜tool▁calls▁begin｜>",),),
        ("<｜tool▁call▁begin｜>",),
        "<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    ToolFormat("mistral_args", NamedCall("[ARGS]"), (("[TOOL_CALLS]", "[ARGS]"),), ("[TOOL_CALLS]",)),
    ToolFormat("mistral", JsonCall(is_list=True), (("[TOOL_CALLS]",),), ("[TOOL_CALLS]",)),
    ToolFormat("gemma4", BareCall('<|"|>'), (("<|tool_call>",),), ("<|tool_call>",), "<tool_call|>"),
    ToolFormat(
        "functiongemma",
        BareCall("<escape>"),
        (("<start_function_call>",),),
        ("<start_function_call>",),
        "<end_function_call>",
    ),
    ToolFormat(
        "granite",
        JsonCall(is_list=True),
        (("<|tool_call|>", "<|start_of_role|>"),),
        ("<|tool_call|>", "<tool_call>"),
    ),
    ToolFormat(
        "phi4",
        JsonCall(is_list=True),
        (("<|tool_call|>",), ("<|/tool|>",)),
        ("<|tool_call|>", "functools"),
        "<|/tool_call|>",
    ),
    ToolFormat(
        "hermes",
        JsonCall(),
        (("<tool_call>",),),
        ("<tool_call>",),
        "</tool_call>",
        space="\n",
        between="\n",
    ),
    ToolFormat(
        "pythonic",
        PythonCalls(),
        (("[func_name1(",), ("<|python_start|>",)),
        ("<|python_start|>",),
        "<|python_end|>",
        starts_output=True,
    ),
    ToolFormat(
        "llama3_json",
        JsonCall("parameters"),
        (("<|python_tag|>",), ('"parameters": dictionary of argument name',)),
        ("<|python_tag|>",),
        between="; ",
        starts_output=True,
    ),
)
"""Formats of tool calls, in order of search: formats with more special marks come first."""

REASONING_FORMATS = (
    ReasoningFormat("think", "</think>", "<think>", "</think>"),
    ReasoningFormat("mistral", "[/THINK]", "[THINK]", "[/THINK]"),
    ReasoningFormat("gemma4", "<|channel>thought", "<|channel>thought\n", "<channel|>"),
    ReasoningFormat(
        "gpt_oss",
        "<|channel|>analysis",
        "<|channel|>analysis<|message|>",
        "<|end|>",
        ("<|start|>", "<|channel|>", "<|call|>", "<|return|>"),
        end="<|end|><|start|>assistant<|channel|>",
    ),
)
NO_FORMAT = "none"
T = TypeVar("T")


def find_tool_format(template: str) -> ToolFormat | None:
    """The format of the calls that a chat template writes; None if it is not known."""
    return next((one for one in TOOL_FORMATS if any(all(t in template for t in texts) for texts in one.known_by)), None)


def find_reasoning_format(template: str) -> ReasoningFormat | None:
    return next((one for one in REASONING_FORMATS if one.known_by in template), None)


def named_tool_format(name: str) -> ToolFormat | None:
    """The format with this name; None for `none`. UsageError for an unknown name."""
    return _named(name, {one.name: one for one in TOOL_FORMATS}, "tool calls")


def named_reasoning_format(name: str) -> ReasoningFormat | None:
    """The reasoning format with this name; None for `none`. UsageError for an unknown name."""
    return _named(name, {one.name: one for one in REASONING_FORMATS}, "reasoning")


def _named(name: str, formats: Mapping[str, T], of: str) -> T | None:
    known = word_among(name, (NO_FORMAT, *formats))
    if known is None:
        raise UsageError(
            f"no such format of {of}: {name}", hint=f"the formats are {', '.join(sorted(formats))} and {NO_FORMAT}"
        )
    return formats.get(known)


@dataclass(frozen=True)
class Tool:
    """A function that a model may call. `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False

    def properties(self) -> Mapping[str, Any]:
        found = self.parameters.get("properties")
        return found if isinstance(found, Mapping) else {}

    def required(self) -> frozenset[str]:
        found = self.parameters.get("required")
        return frozenset(one for one in found if isinstance(one, str)) if isinstance(found, list) else frozenset()


def types_of(schema: Any) -> frozenset[str]:
    """The JSON types that a schema and its alternatives name."""
    if not isinstance(schema, Mapping):
        return frozenset()
    kind = schema.get("type")
    named = kind if isinstance(kind, list) else [kind]
    types = {one for one in named if isinstance(one, str)}
    for name in ("anyOf", "oneOf"):
        others = schema.get(name)
        for one in others if isinstance(others, list) else []:
            types |= types_of(one)
    if not types and isinstance(enum := schema.get("enum"), list) and all(isinstance(one, str) for one in enum):
        types.add("string")
    return frozenset(types)


SPACE = " \t\r\n"
_JSON_NAMES = {"true": True, "false": False, "null": None}


class Malformed(Exception):
    """The text after an opening tag is not a call."""


def escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def unquoted(text: str) -> str:
    """The object in a JSON text whose value is a text with the JSON of an object; any other text unchanged."""
    inner = str(loaded(text))
    try:
        return inner if isinstance(json.loads(inner), dict) else text
    except (ValueError, RecursionError):
        return text


def loaded(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        raise Malformed from None


def json_of(text: str, types: frozenset[str]) -> str:
    """JSON of a value written as text; a JSON string if the text is no value of these `types`."""
    text = text.strip()
    if text in ("True", "False", "None"):
        text = json.dumps(ast.literal_eval(text))
    with_text = json.dumps(text, ensure_ascii=False)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return with_text
    if types and _type_of(value) not in types and not (_type_of(value) == "integer" and "number" in types):
        return with_text
    return json.dumps(value, ensure_ascii=False) if _is_finite(value) else with_text


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or value - value == 0


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {int: "integer", float: "number", str: "string", dict: "object", list: "array", type(None): "null"}
    return names[type(value)]


def python_calls(text: str, tools: Mapping[str, Tool]) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of the calls in `[name(key=value), …]`; arguments without a key take the schema's keys, in
    order. Calls that cannot be read, such as those of unknown tools, are left out. Malformed if none is left.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else []
        found = []
        for call in calls:
            if not isinstance(call, ast.Call):
                raise Malformed
            with suppress(ValueError, TypeError, Malformed):  # other elements may be calls
                found.append(_python_call(call, tools))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise Malformed from None
    if not found:
        raise Malformed
    return found


def _python_call(call: ast.Call, tools: Mapping[str, Tool]) -> tuple[str, dict[str, Any]]:
    name = ast.unparse(call.func)
    keys = list(tools[name].properties()) if name in tools else []
    if name not in tools or len(call.args) > len(keys) or any(one.arg is None for one in call.keywords):
        raise Malformed
    arguments = {key: _python_value(one) for key, one in zip(keys, call.args, strict=False)}
    arguments |= {str(one.arg): _python_value(one.value) for one in call.keywords}
    json.dumps(arguments, allow_nan=False)
    return name, arguments


def _python_value(node: ast.AST) -> Any:
    match node:
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_python_value(one) for one in elements]
        case ast.Dict(keys=keys, values=values):
            return {
                str(_python_value(key)): _python_value(value)
                for key, value in zip(keys, values, strict=True)
                if key is not None
            }
    return ast.literal_eval(node)


class BareValues:
    """Reads `{key:value,…}`, in which texts stand between the format's own marks."""

    def __init__(self, text: str, quote: str) -> None:
        self._text, self._quote, self._at = text, quote, 0

    def value(self) -> dict[str, Any]:
        try:
            found = self._value()
        except (IndexError, RecursionError):
            raise Malformed from None
        if not isinstance(found, dict):
            raise Malformed
        return found

    def _value(self) -> Any:
        self._skip()
        if self._takes("{"):
            found: dict[str, Any] = {}
            while not self._takes("}"):
                key = str(self._value()) if self._is_next(self._quote) else self._until(":")
                if not self._takes(":"):
                    raise Malformed
                found[key.strip()] = self._value()
                self._skip()
                self._takes(",")
                self._skip()
            return found
        if self._takes("["):
            elements = []
            while not self._takes("]"):
                elements.append(self._value())
                self._skip()
                self._takes(",")
                self._skip()
            return elements
        if self._takes(self._quote):
            text = self._until(self._quote)
            self._takes(self._quote)
            return text
        word = self._until(",}]").strip()
        if not word:
            raise Malformed
        try:
            return json.loads(word)
        except (ValueError, RecursionError):
            return word

    def _skip(self) -> None:
        while self._text[self._at] in SPACE:
            self._at += 1

    def _is_next(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _takes(self, text: str) -> bool:
        is_next = self._is_next(text)
        self._at += len(text) * is_next
        return is_next

    def _until(self, marks: str) -> str:
        """Text before the next quote mark, or before the first of the characters in `marks`."""
        ends = [marks] if marks == self._quote else list(marks)
        found = [i for one in ends if (i := self._text.find(one, self._at)) >= 0]
        if not found:
            raise Malformed
        start, self._at = self._at, min(found)
        return self._text[start : self._at]
