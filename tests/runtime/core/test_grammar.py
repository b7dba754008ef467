"""Grammars: outputs are what `jsonschema` and `re` say they should be, and masks what the expressions allow."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import byte_tokenizers
import jsonschema
import numpy as np
import pytest
import regex
import torch
from sentences import Said

from runtime.core.grammar import Grammars, Matcher
from runtime.core.params import Grammar, SamplingConfig
from runtime.core.sampling import Positions, Sampler, choose_all
from runtime.kernels.ops import load_kernels
from runtime.text.token_text import token_bytes
from specdec_cli import LLM, NgramDrafter, SamplingParams, SpecDecError

PROMPT = "The little dog had a red ball. The"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "is_dog": {"type": "boolean"},
    },
    "required": ["name", "age", "colours", "is_dog"],
    "additionalProperties": False,
}
EXPRESSION = r"(the (dog|ball)( and )?){1,3}[0-9]{2,4}"


@pytest.fixture(scope="module")
def llm(llama_engine_dir: Path) -> Iterator[LLM]:
    with LLM(llama_engine_dir) as opened:
        yield opened


def matcher(grammar: Grammar, tokenizer: Any, end_ids: frozenset[int] = frozenset({2})) -> Matcher:
    vocab_size = len(tokenizer) + 3  # models have more ids than tokenizers
    return Matcher(Grammars(tokenizer, vocab_size, end_ids).compiled(grammar), 1, end_ids)


EXPRESSIONS = [EXPRESSION, "a*b", "(ab|abab|aba)+(the|t)?", "[^a-c]{3}(do|dog)?"]


@pytest.mark.parametrize("make_tokenizer", [byte_tokenizers.byte_level, byte_tokenizers.byte_fallback])
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_masks_are_what_the_expression_allows(expression: str, make_tokenizer: Any) -> None:
    """Brute force, with `regex`'s partial matches: of each token, whether some text goes on so. What has only one
    continuation is written in its own tokens, and no others."""
    tokenizer = make_tokenizer()
    of_token, prompt = token_bytes(tokenizer), [1]
    assert of_token is not None
    texts = {i: of_token(i).decode("ascii") for i in range(3, len(tokenizer)) if of_token(i).isascii()}
    rng, num_choices = random.Random(0), 0
    for _ in range(6):
        state, tokens, text = matcher(Grammar("regex", expression), tokenizer), list(prompt), ""
        for _ in range(12):
            (mask,) = state.allowed(tokens, [])
            if mask is None:
                break
            found = set(np.flatnonzero(mask.allowed)) - {2}
            possible = {i for i, one in texts.items() if one and regex.fullmatch(expression, text + one, partial=True)}
            ascii_found = {i for i in found if i in texts}
            assert ascii_found <= possible
            assert bool(mask.allowed[2]) == (regex.fullmatch(expression, text) is not None)
            if len(found) > 1 or not possible:
                assert ascii_found == possible
                num_choices += 1
            if not ascii_found:
                break
            tokens.append(rng.choice(sorted(ascii_found)))
            text += texts[tokens[-1]]
            assert state.is_over(tokens) == (
                regex.fullmatch(expression, text) is not None
                and not any(one and regex.fullmatch(expression, text + one, partial=True) for one in texts.values())
            )
    assert num_choices > 6


VALID: list[tuple[dict[str, Any], Any]] = [
    ({"json_schema": SCHEMA}, lambda text: jsonschema.validate(json.loads(text), SCHEMA)),
    ({"json_schema": json.dumps(SCHEMA)}, lambda text: jsonschema.validate(json.loads(text), SCHEMA)),
    ({"regex": EXPRESSION}, lambda text: regex.fullmatch(EXPRESSION, text) or pytest.fail(text)),
    ({"choice": ["yes", "no", 'per"haps\n']}, lambda text: text in ("yes", "no", 'per"haps\n') or pytest.fail(text)),
    ({"grammar": 'start: "<" WORD ">"\nWORD: /[a-z]{2,5}/'}, lambda text: regex.fullmatch("<[a-z]{2,5}>", text).end()),
    (
        {"grammar": r'root ::= "\u00e9" [\u00e0-\u00e2] "\\" "\x41\xe9\U0001F600"'},
        lambda text: regex.fullmatch(r"é[à-â]\\Aé😀", text).end(),
    ),
    ({"grammar": 'root ::= "<" [a-z] [a-z]? ">"'}, lambda text: regex.fullmatch("<[a-z]{1,2}>", text).end()),
]


@pytest.mark.parametrize(("given", "check"), VALID)
def test_outputs_are_of_the_grammar(llm: LLM, given: dict[str, Any], check: Any) -> None:
    for temperature, seed in ((0.0, 0), (1.0, 0), (1.0, 1)):
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=120, **given)
        (output,) = llm.generate(PROMPT, params)
        assert output.finish_reason in ("stop", "end_id")
        check(output.text)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_k": 5}, {"top_p": 0.9, "repetition_penalty": 1.2}])
def test_kernels_choose_as_transformers_processors_do(kernels: Path, sampling: dict[str, Any]) -> None:
    """The same tokens of the same logits, beside brute force: of the legal ones the best, where it is greedy."""
    load_kernels(kernels)
    tokenizer = byte_tokenizers.byte_level()
    vocab_size, draft = len(tokenizer) + 3, tokenizer("the dog")["input_ids"]
    logits = torch.randn((len(draft) + 1, vocab_size), generator=torch.Generator().manual_seed(0))
    config = SamplingConfig(**({"top_k": 0} | sampling if sampling else {}))
    sampler = Sampler(config, [1], 0, matcher(Grammar("regex", EXPRESSION), tokenizer))
    before = logits.clone()
    tokens = list(sampler.choices([1], draft, logits))
    (by_kernels,) = choose_all([Positions(sampler, [1], draft, logits)])
    first_tokens = list(by_kernels)
    assert first_tokens == tokens[: len(first_tokens)] and first_tokens[:-1] == draft[: len(first_tokens) - 1]
    for i, token in enumerate(tokens):
        assert sampler.choose([1, *draft[:i]], logits[i]) == token
    assert torch.equal(logits, before)
    masks = matcher(Grammar("regex", EXPRESSION), tokenizer).allowed([1], draft)
    for token, row, mask in zip(tokens, logits, masks, strict=True):
        assert mask is not None and mask.allowed[token]
        if not sampling:
            assert token == max(np.flatnonzero(mask.allowed), key=lambda i: float(row[i]))


WRONG: list[dict[str, Any]] = [
    {"json_schema": "no schema"},
    {"json_schema": '["a", "list"]'},
    {"json_schema": {"type": "strange"}},
    {"json_schema": {"$ref": "#/nowhere"}},
    {"json_schema": {"$ref": "https://example.com/schema.json"}},
    {"json_schema": {"$ref": "#"}},
    {"json_schema": {"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}},
    {"json_schema": {"not": {"type": "string"}}},
    {"json_schema": False},
    {"json_schema": {"type": "string", "pattern": "(a"}},
    {"json_schema": json.dumps(SCHEMA).replace("{", "[" * 4000, 1)},
    {"json_schema": {"enum": ["a" * 300000]}},
    {"json_schema": {"allOf": [{"anyOf": [{"pattern": f"^[a-z]*{i}{j}"} for j in range(8)]} for i in range(8)]}},
    {"json_schema": 5},
    {"regex": "(a"},
    {"regex": "(?=a)b"},
    {"regex": "a{100000}"},
    {"regex": ""},
    {"grammar": "start: nothing"},
    {"grammar": 'start: "a" start'},
    {"grammar": "root ::= ("},
    {"choice": []},
    {"choice": ["a", ""]},
    {"choice": "yes"},
    {"regex": "a", "json_schema": {}},
    {"json_schema": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}},
    {"json_schema": {"type": "integer", "multipleOf": 0}},
    {"json_schema": {"properties": {"multipleOf": {"anyOf": [{"type": "number", "multipleOf": -0.5}]}}}},
    {"json_schema": {"items": {"$id": "http://localhost/a", "$ref": "#/$defs/b"}, "$defs": {"b": {"type": "null"}}}},
]


@pytest.mark.parametrize("given", WRONG, ids=range(len(WRONG)))
def test_what_is_no_grammar_is_refused_in_a_sentence(llm: LLM, given: dict[str, Any], said: Said) -> None:
    with pytest.raises(SpecDecError) as refused:
        llm.generate(PROMPT, SamplingParams(**given))
    said(refused.value)


KEYWORDS: dict[str, Any] = {
    "not": {},
    "if": {"type": "null"},
    "then": {},
    "else": {},
    "uniqueItems": True,
    "contains": {"type": "null"},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {}},
    "propertyNames": {"pattern": "a"},
    "unevaluatedProperties": False,
    "unevaluatedItems": False,
    "$dynamicRef": "#x",
}


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_keywords_that_are_not_held_to_are_refused_and_documented(keyword: str) -> None:
    grammar = Grammar("json_schema", json.dumps({keyword: KEYWORDS[keyword]}))
    with pytest.raises(SpecDecError, match=re.escape(f'"{keyword}"')):
        Grammars(byte_tokenizers.byte_level(), 300, frozenset({2})).compiled(grammar)
    assert f"`{keyword}`" in (Path(__file__).parents[3] / "docs/structured-output.md").read_text(encoding="utf-8")


def optional_properties(num: int) -> dict[str, Any]:
    properties = {f"p{i}": {"type": "integer"} for i in range(num)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def test_large_forms_are_held_to(llm: LLM) -> None:
    """Each of 2,000 choices was a rule of its own, and where llguidance gave up the output went on without its form."""
    choices = [f"{i} is {i * 7 % 31}" for i in range(2000)]
    many = [SamplingParams(seed=i, max_tokens=30, choice=choices) for i in range(5)]
    of_one = SamplingParams(seed=0, max_tokens=30, json_schema=optional_properties(1000) | {"required": ["p500"]})
    *chosen, written = [str(output.text) for output in llm.generate([PROMPT] * 6, [*many, of_one])]
    assert set(chosen) <= set(choices) and len(set(chosen)) > 1
    member = r'\s*"p\d+"\s*:\s*[-+.eE\d]+\s*'
    assert regex.fullmatch(rf"\{{{member}(,{member})*\}}", written, partial=True) and len(written) > 9


@pytest.mark.parametrize(
    ("limit", "value", "given"),
    [
        ("forms._MOST_ITEMS_IN_ROW", 1000, {"regex": "[xy](a{1000}){1000}"}),
        ("forms._MOST_ITEMS_IN_ROW", 1000, {"json_schema": optional_properties(300)}),
        # Each token takes longer than the one before; 400 held a server for two minutes.
        ("grammar._MOST_STEP_S", -1.0, {"grammar": 'start: e\ne: e e | "x"'}),
    ],
    ids=["expression", "object", "steps"],
)
@pytest.mark.parametrize("drafter", [None, NgramDrafter(4, 2)])
def test_a_form_that_takes_too_much_ends_its_request_alone(
    llm: LLM, limit: str, value: float, given: Any, drafter: NgramDrafter | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps are bounded; the others are answered."""
    monkeypatch.setattr(f"runtime.core.{limit}", value)
    hostile = SamplingParams(temperature=0, max_tokens=140, **given)
    said = "steps take too long" if value < 0 else "grammar allows no token"
    with pytest.raises(SpecDecError, match=said):
        llm.generate([PROMPT, PROMPT], [hostile, SamplingParams(temperature=0, max_tokens=4)], drafter=drafter)
