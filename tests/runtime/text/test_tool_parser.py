"""Outputs are read as their formats say, and the same however they arrive."""

import random

import pytest
from model_outputs import NOW, OUTPUTS, SPECIAL, TOOLS, Parts, said_of

from runtime.text.call_formats import REASONING_FORMATS, find_tool_format, named_tool_format
from runtime.text.parser import OutputForm, OutputParser, Said, SpecialTokens, joined
from runtime.text.response_template import TemplateParser


def form_of(name: str, tools: tuple[object, ...] = TOOLS) -> OutputForm:
    return OutputForm.of(named_tool_format(name), REASONING_FORMATS[0], SPECIAL, tools)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "text", "parts"), OUTPUTS, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(OUTPUTS)]
)
def test_an_output_is_read_as_its_format_says_wherever_it_is_split(name: str, text: str, parts: Parts) -> None:
    form = form_of(name)
    marked = form.special.marked(text)
    assert [tuple(said) for said in said_of(form, marked)] == parts
    rng = random.Random(text)
    for most in (1, 2, 9):
        parser, said, i = OutputParser(form), list[Said](), 0
        while i < len(marked):
            end = i + rng.randint(1, most)
            said += parser.feed(marked[i:end])
            i = end
        assert [tuple(one) for one in joined([*said, *parser.end()])] == parts


def test_arguments_are_told_before_they_are_whole() -> None:
    parser = OutputParser(form_of("hermes"))
    assert parser.feed('<tool_call>\n{"name": "now", "arg') == [Said("call", "now")]
    assert parser.feed('uments": {"a": "bc') == [Said("arguments", '{"a": "bc')]
    assert parser.feed('d"}') == [Said("arguments", 'd"}')]


@pytest.mark.parametrize(
    ("name", "text"),
    [(name, text) for name, text, parts in OUTPUTS if len(parts) > 2 and parts[-1][0] == parts[-3][0] == "arguments"],
)
def test_of_a_call_that_was_cut_off_no_part_is_text(name: str, text: str) -> None:
    """A call or nothing comes after the first call, wherever there was no more room."""
    form = form_of(name)
    marked, whole = form.special.marked(text), said_of(form, form.special.marked(text))
    for end in range(len(marked)):
        parser = OutputParser(form)
        said = joined([*parser.feed(marked[:end]), *parser.end(is_cut=True)])
        kinds = [one.kind for one in said]
        if "call" in kinds:
            num_before = kinds.index("call")
            assert "content" not in kinds[num_before:] and said[:num_before] == whole[:num_before], marked[:end]
            assert "".join(one.text for one in whole).startswith("".join(one.text for one in said))


def test_a_first_call_that_was_cut_off_is_no_text_either() -> None:
    """One that has a tag: JSON without one may be an answer, and so is all that a model ended by itself."""
    text = 'a <tool_call>\n{"na'
    for is_cut, parts in ((True, [Said("content", "a")]), (False, [Said("content", text)])):
        parser = OutputParser(form_of("hermes"))
        assert joined([*parser.feed(text), *parser.end(is_cut=is_cut)]) == parts
    bare = OutputParser(form_of("llama3_json"))
    assert joined([*bare.feed('{"name": "n'), *bare.end(is_cut=True)]) == [Said("content", '{"name": "n')]


def test_special_tokens_are_not_their_names() -> None:
    """A user may have a model repeat a tag: as a text it opens no call."""
    form = form_of("mistral")
    text = '[TOOL_CALLS] [{"name": "now", "arguments": {}}]'
    assert said_of(form, text) == [Said("content", text)]
    assert said_of(form, form.special.marked(text))[0] == Said("call", "now")


def test_without_tools_a_call_is_text() -> None:
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert said_of(form_of("hermes", ()), text) == [Said("content", text)]


@pytest.mark.parametrize(
    ("prompt", "is_open"), [("a<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False), ("<think>a", False)]
)
def test_what_is_thought_may_be_opened_by_the_prompt(prompt: str, is_open: bool) -> None:
    form = form_of("hermes", (NOW,))
    assert form.is_in_reasoning(prompt) is is_open
    said = said_of(form, "hm\n</think>\n\nYes", in_reasoning=True)
    assert said == [Said("reasoning", "hm"), Said("content", "Yes")]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>, <tool_call>', "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=a>", "qwen3_coder"),
        ("<tool_call>{{ name }}<arg_key>", "glm"),
        ("<｜tool▁calls▁begin｜> ```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("[TOOL_CALLS] [ARGS]", "mistral_args"),
        ("[TOOL_CALLS]", "mistral"),
        ('Respond in the format {"name": f, "parameters": dictionary of argument name and its value}', "llama3_json"),
        ("<|start_of_role|> <|tool_call|>", "granite"),
        ("<|tool|> <|/tool|>", "phi4"),
        ("<|channel|> <|message|>", "gpt_oss"),
        ("{{ message.content }}", None),
    ],
)
def test_a_format_is_known_by_the_chat_template(text: str, name: str | None) -> None:
    found = find_tool_format(text)
    assert (found.name if found else None) == name


TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {},
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"},
    },
}
ADD = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
WRONG = '<tool_call>{"name": nope}</tool_call> and more'


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hello " + ADD, [("content", "hello "), ("call", "add"), ("arguments", '{"a": 1}')]),
        (2 * ADD, 2 * [("call", "add"), ("arguments", '{"a": 1}')]),
        ("<think>so</think>hello", [("reasoning", "so"), ("content", "hello")]),
        ("hello " + WRONG, [("content", "hello " + WRONG)]),
        (
            "<think>so</think>" + ADD + WRONG,
            [("reasoning", "so"), ("call", "add"), ("arguments", '{"a": 1}'), ("content", WRONG)],
        ),
        ("hello <tool_", [("content", "hello <tool_")]),
    ],
)
def test_a_tokenizers_own_template_is_read_by_transformers_and_nothing_is_lost(
    text: str, parts: list[tuple[str, str]]
) -> None:
    """A call that is none stays text, with its tags, wherever the output is split."""
    for size in (1, 2, 7, len(text)):
        parser, said = TemplateParser(TEMPLATE, "<|im_start|>assistant\n", [], SpecialTokens({}, [])), list[Said]()
        for i in range(0, len(text), size):
            said += parser.feed(text[i : i + size])
        assert [tuple(one) for one in joined([*said, *parser.end()])] == parts


def test_of_a_tokenizers_own_call_that_was_cut_off_nothing_is_told() -> None:
    for is_cut, told in ((True, []), (False, [Said("content", '<tool_call>{"na')])):
        parser = TemplateParser(TEMPLATE, "<|im_start|>assistant\n", [], SpecialTokens({}, []))
        said = joined([*parser.feed(ADD + '<tool_call>{"na'), *parser.end(is_cut=is_cut)])
        assert said == [Said("call", "add"), Said("arguments", '{"a": 1}'), *told]
