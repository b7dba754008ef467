"""Random outputs under schemas of many keywords are valid, by `jsonschema`; and the campaign notices what is not."""

from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from runtime.checkpoint.resolve import resolve_model
from runtime.core.grammar import Grammars
from runtime.text.text import open_tokenizer
from scripts.campaigns.json_schemas import Campaign

TREE = {
    "$defs": {
        "node": {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}
    },
    "$ref": "#/$defs/node",
}
# A schema, a valid instance that is written in its one way, and an invalid one.
CASES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "required": ({"properties": {"a": {"type": "integer"}}, "required": ["a"], "type": "object"}, {"a": 1}, {"a": "1"}),
    "closed": ({"properties": {"a": {}}, "additionalProperties": False, "type": "object"}, {"a": None}, {"b": 1}),
    "pattern of names": ({"patternProperties": {"^x": {"type": "number"}}, "type": "object"}, {"x": 1.5}, {"x": "y"}),
    "numbers": ({"type": "number", "exclusiveMinimum": 1, "maximum": 2.5}, 2.25, 1),
    "multiples": ({"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100}, 49, 50),
    "lengths": ({"type": "string", "minLength": 2, "maxLength": 3}, "éé", "a"),
    "pattern": ({"type": "string", "pattern": "^(a|bc)+$"}, "abc", "ac"),
    "items": ({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}, [True], []),
    "prefix": (
        {"type": "array", "prefixItems": [{"type": "string"}, {"enum": [1, None]}], "items": False},
        ["a", 1],
        [1],
    ),
    "one of": ({"oneOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}]}, 5, "long"),
    "any of": ({"anyOf": [{"const": {"a": [1, 2]}}, {"type": "null"}]}, {"a": [1, 2]}, {"a": [2, 1]}),
    "all of": ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, 4, 6),
    "types": ({"type": ["string", "null"], "maxLength": 1}, None, 3),
    "a tree": (TREE, {"children": [{"children": []}]}, {"children": [3]}),
    "a date": ({"type": "string", "format": "date"}, "2026-11-26", "2026-13-26"),
    "quotes": ({"enum": ['"', "\\", "é"]}, '"', "e"),
}


@pytest.fixture(scope="module")
def make_campaign() -> Callable[[], Campaign]:
    tokenizer = open_tokenizer(resolve_model("demo"))
    grammars = Grammars(tokenizer, max(tokenizer.get_vocab().values()) + 1, frozenset({1}))
    return lambda: Campaign(grammars, tokenizer, num_walks=6)


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_valid(make_campaign: Callable[[], Campaign], name: str) -> None:
    schema, valid, invalid = CASES[name]
    campaign, tests = make_campaign(), [{"data": valid, "valid": True}, {"data": invalid, "valid": False}]
    campaign.look(name, {"schema": schema, "tests": tests}, jsonschema.Draft202012Validator)
    assert campaign.faults == [] and not campaign.refused
    assert campaign.counts["True written"] == 1
    assert campaign.counts["walks"] or name == "a tree"


def test_what_is_not_valid_is_noticed(make_campaign: Callable[[], Campaign]) -> None:
    campaign = make_campaign()
    campaign.look("a", {"schema": {"enum": [1]}, "tests": [{"data": 1, "valid": False}]}, jsonschema.Draft7Validator)
    assert len(campaign.faults) == 1
    campaign.look("b", {"schema": {"format": "x"}, "tests": []}, jsonschema.Draft7Validator)
    assert sum(campaign.refused.values()) == 1
