"""Outputs as models write them, by the chat templates that their makers publish, and what they say."""

from typing import Any

from runtime.text.call_formats import Tool
from runtime.text.parser import OutputForm, OutputParser, Said, joined

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
            "hourly": {"type": "boolean"},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
NOW = Tool("now", {})
TOOLS = (WEATHER, NOW)

Parts = list[tuple[str, str]]


def calls(*named: tuple[str, str]) -> Parts:
    return [part for name, arguments in named for part in (("call", name), ("arguments", arguments))]


PARIS = '{"city": "Paris"}'
PARIS_3 = '{"city": "Paris", "days": 3}'
OUTPUTS: list[tuple[str, str, Parts]] = [
    (
        "hermes",
        f'I look.\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS_3}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        [("content", "I look."), *calls(("get_weather", PARIS_3), ("now", "{}"))],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"city": "a}\\"b\\u00e9"}, "id": [1, "x"], "name": "get_weather"}</tool_call> Done.',
        [*calls(("get_weather", '{"city": "a}\\"b\\u00e9"}')), ("content", "Done.")],
    ),
    (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}\n</tool_call>',
        calls(("get_weather", PARIS)),
    ),
    ("hermes", '<tool_call>\n{"name": "now"}\n</tool_call>', calls(("now", "{}"))),
    (
        "hermes",
        "<think>\nThe <tool_call> is\n\nright.\n</think>\n\nHello <b>, \n",
        [("reasoning", "The <tool_call> is\n\nright."), ("content", "Hello <b>, \n")],
    ),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"ci', calls(("get_weather", '{"ci'))),
    ("hermes", 'a <tool_call>{"na', [("content", 'a <tool_call>{"na')]),
    ("hermes", "a <tool_call> b </tool_call> c", [("content", "a <tool_call> b </tool_call> c")]),
    ("hermes", "a <tool_", [("content", "a <tool_")]),
    ("hermes", " \n", [("content", " \n")]),
    (
        "qwen3_coder",
        'Look\n<tool_call>\n<function=get_weather>\n<parameter=city>\nSt. "\nGallen\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n<parameter=hourly>\nTrue\n</parameter>\n</function>\n</tool_call>",
        [("content", "Look"), *calls(("get_weather", '{"city": "St. \\"\\nGallen", "days": 3, "hourly": true}'))],
    ),
    (
        "qwen3_coder",
        "<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        calls(("now", "{}"), ("now", "{}")),
    ),
    (
        "glm",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
        calls(("get_weather", PARIS_3), ("now", "{}")),
    ),
    (
        "deepseek_v3",
        "So:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{PARIS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [("content", "So:"), *calls(("get_weather", PARIS), ("now", "{}"))],
    ),
    (
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        calls(("get_weather", PARIS), ("now", "{}")),
    ),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "now", "arguments": {{}}}}]',
        calls(("get_weather", PARIS), ("now", "{}")),
    ),
    (
        "mistral_args",
        f"Yes. [TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{{}}",
        [("content", "Yes."), *calls(("get_weather", PARIS), ("now", "{}"))],
    ),
    ("mistral_args", f"[TOOL_CALLS]get_weather{PARIS}", calls(("get_weather", PARIS))),
    (
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Pa, }ris<|"|>,days:3,hourly:true}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        calls(("get_weather", '{"city": "Pa, }ris", "days": 3, "hourly": true}'), ("now", "{}")),
    ),
    (
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>",
        calls(("get_weather", PARIS)),
    ),
    ("granite", f'<|tool_call|>[{{"name": "get_weather", "arguments": {PARIS}}}]', calls(("get_weather", PARIS))),
    ("phi4", f'functools[{{"name": "get_weather", "arguments": {PARIS}}}]', calls(("get_weather", PARIS))),
    ("phi4", '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', calls(("now", "{}"))),
    (
        "pythonic",
        "[get_weather(city='Pa(r]is', days=3, hourly=True), now()]",
        calls(("get_weather", '{"city": "Pa(r]is", "days": 3, "hourly": true}'), ("now", "{}")),
    ),
    ("pythonic", '<|python_start|>[get_weather("Paris", 3)]<|python_end|>', calls(("get_weather", PARIS_3))),
    ("pythonic", "[1, 2] is a list", [("content", "[1, 2] is a list")]),
    (
        "llama3_json",
        f'{{"name": "get_weather", "parameters": {PARIS}}}; {{"name": "now", "parameters": {{}}}}',
        calls(("get_weather", PARIS), ("now", "{}")),
    ),
    ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}', calls(("now", "{}"))),
    ("llama3_json", '{"name": "nobody", "x": 1}', [("content", '{"name": "nobody", "x": 1}')]),
    (
        "gpt_oss",
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{PARIS}",
        [("reasoning", "Think."), *calls(("get_weather", PARIS))],
    ),
    (
        "gpt_oss",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now<|channel|>commentary json"
        "<|message|>{}",
        [("content", "I look."), *calls(("now", "{}"))],
    ),
    ("gpt_oss", "<|channel|>final<|message|>Hello", [("content", "Hello")]),
    ("gpt_oss", "plain", [("content", "plain")]),
]
"""Name of a format, an output, and its parts."""

WRITTEN = {
    "hermes": [0],
    "qwen3_coder": [10],
    "deepseek_v3": [13],
    "deepseek_v31": [14],
    "gemma4": [18],
    "functiongemma": [19],
    "granite": [20],
    "phi4": [22],
    "gpt_oss": [29, 30],
}
"""Outputs that are to the letter as a format is written, and so allowed by its grammar: their places."""

_SPECIAL = "<|channel|> <|message|> <|end|> <|start|> <|constrain|> [TOOL_CALLS] <|tool_call|> <|python_tag|> [ARGS]"
SPECIAL: dict[str, Any] = {name: 300 + i for i, name in enumerate(_SPECIAL.split())}
"""Special tokens; tags of other formats are text."""


def said_of(form: OutputForm, text: str, *, in_reasoning: bool = False) -> list[Said]:
    """The parts of a whole output."""
    parser = OutputParser(form, in_reasoning=in_reasoning)
    return joined([*parser.feed(text), *parser.end()])
