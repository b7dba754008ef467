"""The same calls in every format: the shapes that vLLM's tests of its parsers have, written as each model would.

One call, several, values of all types, no arguments, text around, escapes; read whole, and in pieces of any length.
"""

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from model_outputs import said_of
from test_tool_parser import form_of

from runtime.text.call_formats import Tool
from runtime.text.parser import OutputParser, Said, joined

Calls = list[tuple[str, dict[str, Any]]]
TOKYO: Calls = [("get_weather", {"city": "Tokyo"})]
TYPES = {
    "string_field": "hello",
    "int_field": 42,
    "float_field": 3.14,
    "bool_field": True,
    "null_field": None,
    "array_field": ["a", "b", "c"],
    "object_field": {"nested": "value"},
    "empty_array": [],
    "empty_object": {},
}
ESCAPES = {
    "quoted": 'He said "hello"',
    "path": "C:\\Users\\file.txt",
    "newline": "line1\nline2",
    "unicode": "emoji: 🎉",
}
SHAPES: dict[str, Calls] = {
    "one": TOKYO,
    "parallel": [*TOKYO, ("get_time", {"timezone": "Asia/Tokyo"})],
    "types": [("test_function", TYPES)],
    "empty": [("refresh", {})],
    "escapes": [("test_function", ESCAPES)],
    "nested": [("test_function", {"a": {"b": {"c": {"d": "[{}]"}}}})],
}
KINDS = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    list: "array",
    dict: "object",
}
PROPERTIES = {
    key: {"type": KINDS[type(value)]}
    for shape in SHAPES.values()
    for _, arguments in shape
    for key, value in arguments.items()
}
NAMES = ("get_weather", "get_time", "test_function", "refresh")
TOOLS = tuple(Tool(name, {"type": "object", "properties": PROPERTIES}) for name in NAMES)


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def objects(calls: Calls, key: str = "arguments") -> list[str]:
    return [json.dumps({"name": name, key: arguments}, ensure_ascii=False) for name, arguments in calls]


def bare(value: Any, quote: str) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{bare(one, quote)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(bare(one, quote) for one in value) + "]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)


def tagged(calls: Calls) -> str:
    texts = []
    for name, arguments in calls:
        inner = "".join(f"<parameter={key}>\n{as_text(one)}\n</parameter>\n" for key, one in arguments.items())
        texts.append(f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>")
    return "\n".join(texts)


def glm(calls: Calls) -> str:
    texts = []
    for name, arguments in calls:
        pairs = [f"<arg_key>{key}</arg_key>\n<arg_value>{as_text(one)}</arg_value>\n" for key, one in arguments.items()]
        texts.append(f"<tool_call>{name}\n{''.join(pairs)}</tool_call>")
    return "\n".join(texts)


def deepseek(calls: Calls, before: str, between: str, after: str) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{before}{name}{between}{json.dumps(arguments)}{after}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def python(calls: Calls) -> str:
    written = [f"{name}({', '.join(f'{key}={one!r}' for key, one in values.items())})" for name, values in calls]
    return f"[{', '.join(written)}]"


GEMMA = '<|"|>'
WRITERS: dict[str, list[Callable[[Calls], str]]] = {
    "hermes": [
        lambda calls: "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects(calls)),
        lambda calls: "".join(f"<tool_call>{one}</tool_call>" for one in objects(calls)),
    ],
    "qwen3_coder": [tagged],
    "glm": [glm],
    "deepseek_v3": [lambda calls: deepseek(calls, "function<｜tool▁sep｜>", "\n```json\n", "\n```")],
    "deepseek_v31": [lambda calls: deepseek(calls, "", "<｜tool▁sep｜>", "")],
    "mistral": [lambda calls: f"[TOOL_CALLS] [{', '.join(objects(calls))}]"],
    "mistral_args": [
        lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(one)}" for name, one in calls),
        lambda calls: "".join(f"[TOOL_CALLS]{name}{json.dumps(one)}" for name, one in calls),
    ],
    "gemma4": [lambda calls: "".join(f"<|tool_call>call:{name}{bare(one, GEMMA)}<tool_call|>" for name, one in calls)],
    "functiongemma": [
        lambda calls: "".join(
            f"<start_function_call>call:{name}{bare(one, '<escape>')}<end_function_call>" for name, one in calls
        )
    ],
    "granite": [
        lambda calls: f"<|tool_call|> [{', '.join(objects(calls))}]",
        lambda calls: "<tool_call> [\n  " + ",\n  ".join(objects(calls)) + "\n]",
    ],
    "phi4": [lambda calls: f"functools[{', '.join(objects(calls))}]"],
    "llama3_json": [
        lambda calls: "; ".join(objects(calls, "parameters")),
        lambda calls: ";".join(objects(calls)),
        lambda calls: "\n".join(objects(calls, "parameters")),
        lambda calls: f"<|python_tag|>{' ; '.join(objects(calls, 'parameters'))}",
    ],
    "pythonic": [python],
}


def parts(said: list[Said]) -> tuple[str, Calls]:
    content = "".join(one.text for one in said if one.kind == "content")
    names = [one.text for one in said if one.kind == "call"]
    arguments = [json.loads(one.text) for one in said if one.kind == "arguments"]
    return content, list(zip(names, arguments, strict=True))


@pytest.mark.parametrize("name", WRITERS)
def test_calls_of_every_shape_are_read_whole_and_in_pieces(name: str) -> None:
    form = form_of(name, TOOLS)
    for calls, write in itertools.product(SHAPES.values(), WRITERS[name]):
        text = form.special.marked(write(calls))
        whole = said_of(form, text)
        assert parts(whole) == ("", calls)
        for size in (1, 2, 5, 8, 64):
            parser, said = OutputParser(form), list[Said]()
            for i in range(0, len(text), size):
                said += parser.feed(text[i : i + size])
            assert joined([*said, *parser.end()]) == whole


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "pythonic"])
def test_text_around_calls_is_content(name: str) -> None:
    form = form_of(name, TOOLS)
    text = form.special.marked(f"Let me see.\n{WRITERS[name][0](TOKYO)}\nDone.")
    content, calls = parts(said_of(form, text))
    assert calls == TOKYO and content.split() == ["Let", "me", "see.Done."]
    plain = "How can I help you today?"
    assert said_of(form, plain) == [Said("content", plain)]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", '<tool_call>{"name": "refresh", "arguments": "hello"}</tool_call>', "", [("refresh", "hello")]),
        ("llama3_json", '{"parameters": {}}', '{"parameters": {}}', []),
        ("llama3_json", '{"name": "refresh"}', '{"name": "refresh"}', []),
        ("phi4", "functools[] is text", "functools[] is text", []),
        ("phi4", "functools[ is text ]", "functools[ is text ]", []),
        ("pythonic", "[get_time(x=b'z'), refresh()]", "", [("refresh", {})]),
        ("pythonic", "[get_time(x=1e999), refresh()]", "", [("refresh", {})]),
        ("pythonic", "[f(a='x 'y' 'z)]", "[f(a='x 'y' 'z)]", []),
        ("pythonic", "hello world[A(A=\t)A(A=", "hello world[A(A=\t)A(A=", []),
    ],
)
def test_what_is_nearly_a_call_is_text(name: str, text: str, content: str, calls: Any) -> None:
    assert parts(said_of(form_of(name, TOOLS), text)) == (content, calls)
