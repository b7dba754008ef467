"""Calls under a grammar: whatever tokens are chosen, they are read back, with arguments valid by the schema."""

import json
import random
from functools import cache, partial
from typing import Any

import jsonschema
import pytest
from model_outputs import NOW, OUTPUTS, TOOLS, WEATHER, WRITTEN, said_of
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from runtime.core.grammar import Grammars
from runtime.core.params import MOST_GRAMMAR, Grammar
from runtime.text.call_formats import REASONING_FORMATS, TOOL_FORMATS, Tool, named_tool_format
from runtime.text.call_grammar import Calls, SpecialIds, call_grammar, schema_of
from runtime.text.parser import OutputForm, Said, tags_of
from runtime.text.text import TextStream
from runtime.util.errors import UsageError

THINK = REASONING_FORMATS[0]
NAMES = [one.name for one in TOOL_FORMATS]
END = 2
BOUNDED = (
    Tool(
        "set",
        {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
            "required": ["a"],
        },
        is_strict=True,
    ),
    NOW,
)
"""Arguments of few texts, so that a random walk ends."""


@pytest.fixture(scope="module")
def tagged(tokenizer: PreTrainedTokenizerFast) -> Any:
    """`tagged(name)`: a tokenizer with all tags of a format as special tokens, and its grammars."""
    state = tokenizer.backend_tokenizer.to_str()

    @cache
    def make(name: str, has_tokens: bool) -> tuple[Any, Grammars]:
        import tokenizers

        made = PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer.from_str(state), eos_token="</s>", bos_token="<s>"
        )
        tags = tags_of(named_tool_format(name), THINK)
        words = [tag for tag in tags if tag.strip() and tag[0] in "<[" and tag[-1] in ">]" and has_tokens]
        made.add_tokens([AddedToken(word, special=True, normalized=False) for word in dict.fromkeys(words)])
        return made, Grammars(made, len(made), frozenset({END}))

    return make


def lark_of(
    name: str, grammars: Grammars, calls: Calls, think: Any = THINK, *, in_reasoning: bool = False
) -> str | None:
    form = named_tool_format(name)
    assert form is not None
    special = SpecialIds(grammars.special_tokens(), frozenset({END}))
    return call_grammar(calls, form, think, special, in_reasoning=in_reasoning)


def test_definitions_are_copied_only_where_an_argument_refers_to_them(tagged: Any) -> None:
    """A grammar grows with the arguments, and is refused before it is longer than one may be."""
    definitions = {"long": {"enum": ["x" * 10_000]}}
    _, grammars = tagged("qwen3_coder", True)

    def written(num_referring: int, num_others: int) -> str | None:
        properties: dict[str, Any] = {f"a{i}": {"$ref": "#/$defs/long"} for i in range(num_referring)}
        properties |= {f"b{i}": {"type": "integer"} for i in range(num_others)}
        tool = Tool("f", {"type": "object", "properties": properties, "$defs": definitions}, is_strict=True)
        return lark_of("qwen3_coder", grammars, Calls((tool,), "required"))

    text = written(2, 500)
    assert text is not None and text.count("x" * 10_000) == 2
    with pytest.raises(UsageError, match=f"longer than {MOST_GRAMMAR:,} characters"):
        written(1000, 0)


def special_ids(tokenizer: Any) -> dict[str, int]:
    return {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}


def read(name: str, tokenizer: Any, tokens: list[int], tools: tuple[Tool, ...], **options: Any) -> list[Said]:
    form = OutputForm.of(named_tool_format(name), THINK, special_ids(tokenizer), tools)
    text = TextStream(tokenizer, None, (), form.special.shown).next_piece(tokens, finished=True)
    return said_of(form, text, **options)


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_required_calls_are_read_back_and_valid(tagged: Any, name: str, has_tokens: bool) -> None:
    """Tokens are chosen at random among those allowed, by which each way through the grammar is taken."""
    tokenizer, grammars = tagged(name, has_tokens or name == "gpt_oss")
    lark = lark_of(name, grammars, Calls(BOUNDED, "required", are_parallel=False), None)
    assert lark is not None
    compiled = grammars.compiled(Grammar("lark", lark))
    schemas = {tool.name: schema_of(tool) for tool in BOUNDED}
    found = set()
    for seed in range(8):
        tokens = walk(compiled, random.Random(seed), tokenizer)
        said = read(name, tokenizer, tokens, BOUNDED)
        (call,) = [one.text for one in said if one.kind == "call"]
        arguments = "".join(one.text for one in said if one.kind == "arguments")
        jsonschema.validate(json.loads(arguments), schemas[call])
        assert {one.kind for one in said} <= {"call", "arguments", "reasoning"}
        found.add(call)
    assert found == {"set", "now"}


def walk(compiled: Any, rng: random.Random, tokenizer: Any) -> list[int]:
    """Random tokens to the end, without white space and gpt-oss's `analysis`, which need never end."""
    avoided = {*tokenizer("\n\t\r a", add_special_tokens=False)["input_ids"]}
    matcher, tokens = compiled.start(), list[int]()
    while not matcher.is_stopped() and not (matcher.is_accepting() and tokens):
        bits = matcher.compute_bitmask()
        allowed = [i for i in range(len(tokenizer)) if bits[i // 8] >> (i % 8) & 1 and i != END]
        kept = [i for i in allowed if i not in avoided]
        tokens.append(rng.choice(kept or allowed))
        matcher.consume_token(tokens[-1])
        assert len(tokens) < 3000
    return tokens


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", WRITTEN)
def test_what_models_write_is_allowed_unless_no_call_may_be(tagged: Any, name: str, has_tokens: bool) -> None:
    tokenizer, grammars = tagged(name, has_tokens or name == "gpt_oss")
    lark = lark_of(name, grammars, Calls(TOOLS, "auto"))
    assert lark is not None
    for i in WRITTEN[name]:
        matcher = grammars.compiled(Grammar("lark", lark)).start()
        tokens = tokenizer(OUTPUTS[i][1].replace("True", "true"), add_special_tokens=False)["input_ids"]
        assert matcher.try_consume_tokens(tokens) == len(tokens), OUTPUTS[i]
        assert matcher.is_accepting()
    without = lark_of(name, grammars, Calls((), "none"))
    for i in WRITTEN[name]:
        assert not is_taken(tokenizer, grammars, without, OUTPUTS[i][1].replace("True", "true"))[0]
    free = "<|channel|>final<|message|>{}<" if name == "gpt_oss" else 'Any {"name": 1} <b> </too'
    assert is_taken(tokenizer, grammars, without, free) == (True, True)


def test_text_is_free_up_to_the_tag(tagged: Any) -> None:
    strict = Tool("get_weather", WEATHER.parameters, is_strict=True)
    for has_tokens in (True, False):
        tokenizer, grammars = tagged("hermes", has_tokens)
        taken = partial(is_taken, tokenizer, grammars, lark_of("hermes", grammars, Calls((WEATHER,), "auto")))
        call = '<tool_call>\n{"name": "get_weather", "arguments": {"any": 1}}\n</tool_call>'
        assert taken("Anything </tool_cal <tool") == (True, True)
        assert taken("a <tool_call>") == (True, False)
        assert taken("a <tool_call>b")[0] is False
        assert taken(f"a {call}\n{call} and b") == (True, True)
        assert taken(call.replace("get_weather", "other"))[0] is False
        of_strict = lark_of("hermes", grammars, Calls((strict,), "auto"))
        assert is_taken(tokenizer, grammars, of_strict, call)[0] is False


def is_taken(tokenizer: Any, grammars: Grammars, lark: str | None, text: str) -> tuple[bool, bool]:
    """True twice if a grammar allows a text, and its end there."""
    matcher = grammars.compiled(Grammar("lark", lark or "")).start()
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    return matcher.try_consume_tokens(tokens) == len(tokens), matcher.is_accepting()


def test_a_call_comes_after_what_the_prompt_has_begun_to_think(tagged: Any) -> None:
    for has_tokens in (True, False):
        tokenizer, grammars = tagged("hermes", has_tokens)
        lark = lark_of("hermes", grammars, Calls((NOW,), "required", are_parallel=False), in_reasoning=True)
        matcher = grammars.compiled(Grammar("lark", lark or "")).start()
        text = 'So <tool_call> it is</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert matcher.try_consume_tokens(tokens) == len(tokens)
        assert matcher.is_accepting() and read("hermes", tokenizer, tokens, (NOW,), in_reasoning=True) == [
            Said("reasoning", "So <tool_call> it is"),
            Said("call", "now"),
            Said("arguments", "{}"),
        ]
