"""Chat templates where the hub's directories have them, beside what transformers finds."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizers import byte_level
from jinja2.sandbox import ImmutableSandboxedEnvironment
from llamacpp_tokens import write_byte_level
from sentences import Said
from shared import edit_json
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import _cached_compile_jinja_template

from runtime.builder.convert import copy_side_files
from runtime.checkpoint.gguf.tokenizer import make_gguf_tokenizer
from runtime.checkpoint.tokenizer import TEMPLATE_DIR
from runtime.text.call_formats import named_tool_format
from runtime.text.chat import ChatTemplate, TemplateInputs, check_chat_template, has_chat_template
from runtime.text.chat_templates import chat_templates
from runtime.util.errors import SpecDecError

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
TEMPLATES = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": TEMPLATE}]


@pytest.mark.parametrize("place", ["none", "inline", "list", "file", "processor", "files"])
def test_a_template_is_found_where_transformers_finds_it(place: str, tmp_path: Path) -> None:
    byte_level().save_pretrained(tmp_path)
    if place in ("inline", "list"):
        edit_json(tmp_path / "tokenizer_config.json", chat_template=TEMPLATE if place == "inline" else TEMPLATES)
    elif place == "file":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    elif place == "files":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
        (tmp_path / TEMPLATE_DIR).mkdir()
        (tmp_path / TEMPLATE_DIR / "tool_use.jinja").write_text("tools")
    elif place == "processor":
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    own = AutoTokenizer.from_pretrained(tmp_path)
    assert has_chat_template(tmp_path) == (own.chat_template is not None) == (place not in ("none", "processor"))
    named = own.chat_template if isinstance(own.chat_template, dict) else {"default": own.chat_template}
    assert chat_templates(tmp_path) == {name: text for name, text in named.items() if text is not None}
    if own.chat_template is not None:
        messages = [{"role": "user", "content": "the dog"}]
        found = ChatTemplate(tmp_path, {"model_type": "llama"}).encode(messages)  # type: ignore[list-item]
        expected = own.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert found == expected != []


CALLING = '{{ tools | tojson }} <tool_call>\n{"name": "", "arguments": {}}\n</tool_call>' + TEMPLATE


@pytest.mark.parametrize("place", ["list", "files", "gguf"])
def test_a_template_for_tools_reaches_the_engine_and_says_how_tools_are_called(place: str, tmp_path: Path) -> None:
    """transformers' prompts of both templates, and the format of calls of the one with tools."""
    if place == "gguf":
        path = write_byte_level(tmp_path / "model.gguf", "smollm", write_two_templates)
        make_gguf_tokenizer(path).save_pretrained(tmp_path / "source")
        assert chat_templates(path) == {"default": TEMPLATE, "tool_use": CALLING}
    else:
        tokenizer = copy.deepcopy(byte_level())
        tokenizer.chat_template = {"default": TEMPLATE, "tool_use": CALLING}
        tokenizer.save_pretrained(tmp_path / "source", save_jinja_files=place == "files")
    (tmp_path / "engine").mkdir()
    copy_side_files(tmp_path / "source", tmp_path / "engine")
    found = ChatTemplate(tmp_path / "engine", {"model_type": "llama"})
    assert found.knows_tools and found.tool_format == named_tool_format("hermes")
    own = AutoTokenizer.from_pretrained(tmp_path / "source")
    messages = [{"role": "user", "content": "the dog"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    prompts = [
        (
            found.render(messages, TemplateInputs(given)),  # type: ignore[arg-type]
            own.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, tools=given or None),
        )
        for given in ([], tools)
    ]
    assert all(ours == theirs for ours, theirs in prompts) and prompts[0] != prompts[1]


def write_two_templates(writer: Any) -> None:
    writer.add_chat_template([{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": CALLING}])


BROKEN = {
    "line 2; Expected": [{"name": "default", "template": "\n{% if %}"}],
    "line 1; upside_down": "{{ messages | upside_down }}",
    "not text; 5": 5,
    "not text; ''": "",
    "rag, tool_use": [{"name": name, "template": TEMPLATE} for name in ("tool_use", "rag")],
}


@pytest.mark.parametrize("words", BROKEN)
def test_template_that_no_conversation_can_have_is_told_before_and_when_it_is_used(
    words: str, tmp_path: Path, said: Said
) -> None:
    byte_level().save_pretrained(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", chat_template=BROKEN[words])
    with pytest.raises(SpecDecError) as error:
        check_chat_template(tmp_path, str(tmp_path))
    said(error, *words.split("; "))
    with pytest.raises(SpecDecError) as used:
        ChatTemplate(tmp_path, {"model_type": "llama"}).encode([{"role": "user", "content": "the dog"}])
    said(used, *words.split("; "))


def test_templates_of_transformers_own_language_are_whole(tmp_path: Path) -> None:
    """Its blocks and functions: what is generated, the day, errors, loops that are left."""
    byte_level().save_pretrained(tmp_path)
    text = (
        "{% if not messages %}{{ raise_exception('none') }}{% endif %}{{ strftime_now('%Y') }}"
        "{% for m in messages %}{% if loop.index > 9 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content | tojson(indent=2) }}{% endgeneration %}{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(text)
    check_chat_template(tmp_path, "it")
    ids = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template([{"role": "user", "content": "x"}])
    assert ids["input_ids"]


@pytest.mark.parametrize(
    "template", ["{% if messages is upside_down %}{% endif %}", "{{ messages.__class__.__mro__ }}"]
)
def test_what_the_template_does_wrong_is_no_refusal_of_its_own(template: str, tmp_path: Path, said: Said) -> None:
    byte_level().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(SpecDecError) as error:
        ChatTemplate(tmp_path, {"model_type": "llama"}).encode([{"role": "user", "content": "the dog"}])
    said(error)


HOSTILE = [
    "{{ 9 ** (9 ** 9) }}",
    "{% set x = messages[0].content | length %}{{ (x + 90) ** ((x + 90) ** (x + 90)) }}",
    "{% set x = 99999 ** 999 %}{{ (x * x * x * x * x * x) % 7 }}",
    "{{ 'a' * 10000000000 }}",
    "{{ 10000000000 * [0] }}",
    "{{ '%09999999999d' % 1 }}",
    "{{ '%*d' % (9999999999, 1) }}",
    "{{ '%.999999999f' | format(1.5) }}",
    "{{ '{:9999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 9999999999) }}",
    "{{ 'a'.ljust(9999999999) }}",
    "{{ (5).to_bytes(9999999999) }}",
    "{{ 'a' | center(9999999999) }}",
    "{{ 'a\nb' | indent(9999999999) }}",
    "{{ 1.5 | round(999999999, 'ceil') }}",
    "{{ messages | tojson(indent=9999999999) }}",
    "{% set all = namespace(x='aaaa') %}{% for _ in range(60) %}{% set all.x = all.x + all.x %}{% endfor %}",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_an_operation_of_a_template_that_cannot_be_ended_is_refused(text: str, tmp_path: Path) -> None:
    """Each would hold the interpreter for minutes, or take gigabytes."""
    byte_level().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(text)
    check_chat_template(tmp_path, str(tmp_path))
    with pytest.raises(SpecDecError, match="the chat template fails on the conversation: SecurityError: "):
        ChatTemplate(tmp_path, {"model_type": "llama"}).encode([{"role": "user", "content": "the dog"}])


HARMLESS = [
    "{{ 2 ** 10 }} {{ 2 ** 0.5 }} {{ -1 ** 3 }} {{ 7 % 4 }} {{ 'ab' * 3 }} {{ [1] * 2 + [3] }} {{ 1.5 * 2 }}",
    "{{ '%s has %5.2f, 100%% of %d' % (messages[0].role, 1.5, 12345678) }} {{ '%-20s|%d' | format('a', 123456789) }}",
    "{{ '{} {:>10} {x}'.format(1234567, 'a', x=2) }} {{ 'ab'.center(20) }} {{ 'ab' | center(20) }}",
    "{{ messages | tojson(indent=4) }} {{ 12345678.125 | round(2) }} {{ 'a\nb' | indent(3) }}",
    "{{ range(5) | batch(2) | list }} {{ [1, 2, 3] | slice(2) | list }} {{ 'a b c' | wordwrap(3) }}",
    "{% macro f(x) %}{{ x + 1 }}{% endmacro %}{{ f(123456789) }} {{ namespace(x=12345678).x }} {{ dict(a=9999999) }}",
    "{{ 'costs 1234567 * 2, **bold**: %s' % 'a' }} {{ messages[0].content + '!' }} {{ [3, 1] | sort | join('*') }}",
]


@pytest.mark.parametrize("text", HARMLESS)
def test_operations_of_templates_give_what_transformers_gives(text: str, tmp_path: Path) -> None:
    byte_level().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(text)
    messages = [{"role": "user", "content": "the dog"}]
    expected = _cached_compile_jinja_template(text).render(messages=messages)
    assert ChatTemplate(tmp_path, {"model_type": "llama"}).render(messages) == expected  # type: ignore[arg-type]
    assert type(_cached_compile_jinja_template(text).environment) is ImmutableSandboxedEnvironment
