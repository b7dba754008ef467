"""Consequences of a request field's description: bodies, refusals, flags, JSON records and pages."""

import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import pytest

from commands.options.hints import flag_of_setting
from commands.options.sampling_flags import ConversationOptions, FormOptions, SamplingOptions
from commands.output.documents.settings import Sampling
from commands.output.help import as_flag
from commands.serve.protocol.schema import (
    ChatRequest,
    CompletionRequest,
    Forms,
    MessagesRequest,
    ResponsesRequest,
    TokenizeRequest,
    refused_field,
)
from runtime.core.params import (
    CONVERSATION_FIELDS,
    FIELDS,
    REQUEST_FIELDS,
    AnswerParams,
    ConversationParams,
    Protocol,
    Range,
    RequestField,
    SamplingConfig,
    SamplingParams,
    fields_of,
)

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BODIES: dict[Protocol, Any] = {
    "completions": CompletionRequest, "chat": ChatRequest, "responses": ResponsesRequest, "messages": MessagesRequest,
}  # fmt: skip
FLAGS_OF_COMMANDS = {  # flags with a meaning of their own in each command, or TensorRT-LLM's names
    "n", "seed", "stop", "stop_token_ids", "max_tokens", "truncate_prompt_tokens", "logprobs",
    "return_generation_logits",
}  # fmt: skip
NO_FLAGS = {
    "include_stop_str_in_output",
    "skip_special_tokens",
    "ignore_eos",
    "penalize_prompt",
    "logit_bias",
    "return_token_ids",
    "receipt",
    "add_generation_prompt",
}
MOST_FILES = 4
IN_MORE_FILES = {  # words that mean other things too, and fields that are older than the rule
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "bad_words", "max_tokens",
    "thinking_token_budget", "logprobs", "penalize_prompt", "logit_bias", "receipt", "json_schema", "regex", "grammar",
    "choice",
}  # fmt: skip


def test_every_field_is_described_once() -> None:
    classes: tuple[Any, ...] = (SamplingParams, AnswerParams, ConversationParams)
    names = [field.name for described in classes for field in dataclasses.fields(described)]
    assert names == list(REQUEST_FIELDS) and len({*names}) == len(names)
    assert {*get_args(Protocol)} == {*BODIES}


def test_a_field_without_a_description_is_an_error() -> None:
    @dataclasses.dataclass
    class Undescribed:
        there: Annotated[int, RequestField("A number.", {})] = 0
        forgotten: int = 0

    with pytest.raises(TypeError, match=r"Undescribed\.forgotten"):
        fields_of(Undescribed)


@pytest.mark.parametrize("protocol", BODIES)
def test_a_body_has_each_field_or_refuses_it_unless_it_is_neutral(protocol: Protocol) -> None:
    model = BODIES[protocol]
    for name, (_, described) in REQUEST_FIELDS.items():
        if protocol in described.names:
            field = model.model_fields[described.names[protocol]]
            assert described.shapes == "form" or field.description in (described.help, None), name
            assert refused_field({described.names[protocol]: [0.123]}, model) is None, name
        elif name not in model.model_fields:
            assert refused_field({name: [0.123]}, model) == name
            for neutral in (None, *described.neutral):
                assert refused_field({name: neutral}, model) is None, name


def test_every_body_with_a_conversation_has_the_conversations_fields() -> None:
    for model in (ChatRequest, TokenizeRequest):
        assert CONVERSATION_FIELDS.keys() <= model.model_fields.keys()
    body = {"messages": [{"role": "user", "content": "the dog"}], "prompt": None}
    for values in ({}, {"continue_final_message": True}, {"add_generation_prompt": False}):
        for given in (values, dict.fromkeys(CONVERSATION_FIELDS) | values):
            found = TokenizeRequest.model_validate(body | given).params_of_conversation
            assert found == ConversationParams(**values)


def test_a_field_has_few_places() -> None:
    """A field is described once, and the files between its description and its effect do not name it. A field in as
    few files as that is no longer one of `IN_MORE_FILES`.
    """
    packages = ("runtime", "commands", "specdec_cli")
    paths = (path for package in packages for path in (ROOT / package).rglob("*.py"))
    words = Counter(word for path in paths for word in set(re.findall(r"\w+", path.read_text(encoding="utf-8"))))
    counts = {name: words[name] for name in REQUEST_FIELDS}
    assert {name for name, count in counts.items() if count > MOST_FILES} == IN_MORE_FILES, counts


def test_every_form_is_a_field_of_all_bodies_and_a_flag() -> None:
    forms = {name for name, (_, described) in FIELDS.items() if described.shapes == "form"}
    assert forms == {field.name for field in dataclasses.fields(FormOptions)} and forms <= {*Forms.model_fields}
    assert all(issubclass(model, Forms) for model in BODIES.values())


def test_a_range_in_a_body_is_told_by_its_schema() -> None:
    for name, (_, described) in FIELDS.items():
        bounds = described.in_body or described.range
        if described.shapes == "form" or "completions" not in described.names or bounds == Range():
            continue
        if name == "logit_bias":  # its range is that of its values
            continue
        schema = CompletionRequest.model_json_schema()["properties"][described.names["completions"]]["anyOf"][0]
        assert schema["exclusiveMinimum" if bounds.is_open else "minimum"] == bounds.least, name
        assert schema["maximum"] == bounds.most, name


def test_every_field_has_a_flag_or_is_named_here() -> None:
    groups: tuple[Any, ...] = (SamplingOptions, FormOptions, ConversationOptions)
    flags = {field.name for group in groups for field in dataclasses.fields(group)}
    assert REQUEST_FIELDS.keys() - flags == FLAGS_OF_COMMANDS | NO_FLAGS
    assert flags - {"form"} <= REQUEST_FIELDS.keys()


def test_a_flag_says_what_its_field_says_unless_it_takes_one_item_of_a_list() -> None:
    flags = {name: described.flag.help for name, (_, described) in REQUEST_FIELDS.items() if described.flag is not None}
    assert {name for name, own in flags.items() if own is not None} == {"bad_words", "allowed_token_ids"}
    hints = [get_type_hints(group, include_extras=True) for group in (SamplingOptions, ConversationOptions)]
    shown = {name: hint.__metadata__[0].help for of in hints for name, hint in of.items() if name in flags}
    assert shown == {name: own or REQUEST_FIELDS[name][1].help for name, own in flags.items()}


def test_a_flag_reaches_the_parameters() -> None:
    values: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "no_repeat_ngram_size": 3, "bad_words": ["a"], "min_tokens": 3,
        "allowed_token_ids": [5, 6], "thinking_token_budget": 7,
    }  # fmt: skip
    assert values.keys() == {name for name, (_, described) in FIELDS.items() if described.flag is not None}
    params = SamplingOptions(**values).params()
    assert {name: getattr(params, name) for name in values} == values
    assert ConversationOptions().params == ConversationParams()
    assert ConversationOptions(continue_final_message=True).params == ConversationParams(continue_final_message=True)


def test_a_field_with_a_flag_is_named_by_the_flag_in_errors() -> None:
    flags = {name for name, (_, described) in REQUEST_FIELDS.items() if described.flag is not None}
    assert {name: flag_of_setting(name) for name in flags} == {name: as_flag(name) for name in flags}


def test_every_field_of_the_engines_is_recorded() -> None:
    config = {field.name for field in dataclasses.fields(SamplingConfig)}
    assert {*Sampling.model_fields} == config | {"grammar"}
    assert config <= {described.config or name for name, (_, described) in FIELDS.items()}
    record = Sampling(**dataclasses.asdict(SamplingConfig(min_tokens=3, allowed_token_ids=(5, 6))) | {"bad_words": []})
    assert (record.as_json()["min_tokens"], record.as_json()["allowed_token_ids"]) == (3, [5, 6])


def test_the_page_of_python_names_every_field() -> None:
    assert {*REQUEST_FIELDS} <= {*re.findall(r"`(\w+)`", (DOCS / "python.md").read_text(encoding="utf-8"))}


def test_the_page_of_the_server_has_a_row_of_every_field_of_a_body() -> None:
    table = (
        (DOCS / "serving.md").read_text(encoding="utf-8").partition("<!-- body fields -->")[2].partition("<!-- end")[0]
    )
    rows = {name: cells.split(" | ") for name, cells in re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE)}
    assert rows.keys() == {name for name, (_, described) in REQUEST_FIELDS.items() if described.names}
    for name, (bodies, _, _, meaning) in rows.items():
        described = REQUEST_FIELDS[name][1]
        others = {*described.names.values()} - {name}
        assert meaning == described.help and others == {*re.findall(r"`(\w+)`", bodies)}, name
        assert {*re.findall(r"[a-z]+", re.sub(r"`\w+` in", "", bodies))} == (
            {"all"} if len(described.names) == len(BODIES) and not others else {*described.names}
        ), name
    values = {name: cells[2] for name, cells in rows.items()}
    assert values["n"] == "1 to 128" and values["top_p"] == "more than 0 to 1" and values["ignore_eos"] == "true, false"
    assert values["seed"] == "-2^63 to 2^64 - 1" and values["stop"] == "text, list of up to 32"
    assert values["logit_bias"] == "object of up to 1,024, each -100 to 100" and values["json_schema"] == "object, text"
    defaults = {name: cells[1] for name, cells in rows.items()}
    assert (defaults["n"], defaults["seed"], defaults["receipt"]) == ("`1`", "", "`false`")
    assert defaults["repetition_penalty"] == "the model's, else `1.0`"


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        (Range(0), [0, 5, 2**2000], [-1, float("nan"), float("inf")]),
        (Range(0, 1, is_open=True), [1, 0.5], [0, 1.1]),
        (Range(), [-3, 0], [float("inf"), float("nan")]),
    ],
)
def test_a_range_has_its_numbers(bounds: Range, inside: list[float], outside: list[float]) -> None:
    assert all(map(bounds.has, inside)) and not any(map(bounds.has, outside))
