"""Budgets for thinking over HTTP: in every protocol by every name, streamed as whole, with drafts as without."""

import json
import shutil
from typing import Any

import jsonschema
import pytest
from serving_models import MakeServed, Served
from test_serving_tools import ASKED, CHAT, chat, joined

from runtime.core.params import SamplingParams
from runtime.drafters.specs import NgramDrafter
from runtime.text.text import encode_text
from runtime.util.errors import UsageError

THINK = {"chat_template_kwargs": {"think": True}}
NAMES: list[dict[str, Any]] = [
    {name: 5}
    for name in (
        "thinking_token_budget", "thinking_budget", "thinking_budget_tokens", "reasoning_budget_tokens",
        "reasoning_budget",
    )
]  # fmt: skip
IN_CHAT: list[dict[str, Any]] = [
    *NAMES, {"reasoning": {"max_tokens": 5}}, {"thinking": {"type": "enabled", "budget_tokens": 5}}
]  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


def ends_after(served: Served, tokens: list[int], budget: int) -> bool:
    """True if the end tag's tokens stand behind so many tokens."""
    end = encode_text(served.llm.tokenizer, "</think>")
    return len(end) > 1 and tokens[budget : budget + len(end)] == end


def test_each_name_in_each_protocol_ends_thinking(tooled: Served) -> None:
    asked = {"max_tokens": 30, "temperature": 0.9, "return_token_ids": True, "tools": None} | THINK
    first = chat(tooled, **asked, **IN_CHAT[0])
    assert ends_after(tooled, first["token_ids"], 5) and first["message"]["reasoning_content"]
    for named in IN_CHAT:
        assert chat(tooled, **asked, **named) == first
        assert joined(tooled, **asked | {"return_token_ids": None}, **named)["message"] == first["message"]
    assert chat(tooled, **asked, **NAMES[0], speculative=False) == first
    for named in NAMES:
        body = {"prompt": "Go <think>\n", "seed": 1, "return_token_ids": True, "max_tokens": 20} | named
        assert ends_after(tooled, tooled.complete(**body)["choices"][0]["token_ids"], 5)
    responses = [
        tooled.post("/v1/responses", input="Go", seed=3, temperature=0.9, max_output_tokens=30, **THINK, **named).json()
        for named in (*NAMES, {"reasoning": {"max_tokens": 5}})
    ]
    for one in responses:
        thought, said = one["output"]
        assert thought["content"][0]["text"] == first["message"]["reasoning_content"]
        assert said["content"][0]["text"] == first["message"]["content"]


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_schema_begins_where_thinking_ends(tooled: Served, budget: int) -> None:
    """Thoughts of any kind end at the budget, wherever that is in a draft; a receipt is checked exactly."""
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    for seed in range(2):
        asked = {"temperature": 1.5, "seed": seed, "thinking_token_budget": budget, "tools": None} | THINK
        asked |= {"response_format": form, "receipt": True, "return_token_ids": True, "max_tokens": 60}
        found = chat(tooled, **asked)
        assert ends_after(tooled, found["token_ids"], budget)
        assert bool(found["message"].get("reasoning_content", "").strip()) <= (budget > 0)
        jsonschema.validate(json.loads(found["message"]["content"]), SCHEMA)
        assert chat(tooled, **asked, speculative=False)["token_ids"] == found["token_ids"]
        receipt = found["receipt"]
        (exact,) = tooled.llm.check_receipts([receipt])
        assert (exact.verdict, exact.rule) == ("exact", "tokens"), exact.reason
        assert receipt["thinking"] == "think" and receipt["sampling"]["thinking_token_budget"] == budget


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"thinking_budget": -3}, "thinking_budget"),
        ({"thinking_token_budget": 1.5}, "thinking_token_budget"),
        ({"reasoning": {"max_tokens": -1}}, "reasoning"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking"),
        ({"thinking_budget": 3, "reasoning": {"max_tokens": 4}}, "reasoning"),
        ({"thinking_token_budget": 3, "thinking_budget_tokens": 4}, "thinking_budget_tokens"),
        ({"thinking_token_budget": 3, "reasoning_budget": -1}, "reasoning_budget"),
        ({"thinking_budget_tokens": -1, "reasoning_budget": -1}, "reasoning_budget"),
    ],
)
def test_a_wrong_budget_is_one_sentence(tooled: Served, body: dict[str, Any], param: str) -> None:
    response = tooled.post(CHAT, messages=ASKED, **body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param and ("only one budget" in error["message"]) == (len(body) > 1)
    assert "\n" not in error["message"]


def test_a_model_without_thinking_says_so_and_claude_code_is_answered(make_served: MakeServed, served: Served) -> None:
    """Claude Code sends `thinking` to any model. A server's flag is a default, which a request may change."""
    for path, asked in ((CHAT, {"messages": ASKED}), ("/v1/completions", {"prompt": "a"})):
        for named in NAMES[:2]:
            response = served.post(path, **asked, **named)
            assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(named)))
    with pytest.raises(UsageError, match="there is no thinking to limit"):
        served.llm.generate("a", SamplingParams(thinking_token_budget=3))
    with pytest.raises(UsageError, match="there is no thinking to limit"):
        make_served(thinking_token_budget=3)
    with pytest.raises(UsageError, match="thinking_token_budget must be a number of at least 0: -1"):
        SamplingParams(thinking_token_budget=-1)
    thinking = {"type": "enabled", "budget_tokens": 1024}
    assert served.post("/v1/messages", messages=ASKED, max_tokens=4, thinking=thinking).status_code == 200
    assert served.post(CHAT, messages=ASKED, max_tokens=2, thinking_budget_tokens=-1).status_code == 200


def test_a_body_lifts_the_limit_that_the_server_has(make_served: MakeServed, tooled: Served) -> None:
    """-1 by llama.cpp's names, in each protocol: the same output as from a server without a limit."""
    limited = make_served(NgramDrafter(4, 2), tokenizer_dir=tooled.llm.tokenizer_dir, thinking_token_budget=3)
    asked: dict[str, Any] = {"max_tokens": 30, "temperature": 0.9, "return_token_ids": True, "tools": None} | THINK
    free = chat(tooled, **asked)
    assert ends_after(limited, chat(limited, **asked)["token_ids"], 3) and not ends_after(tooled, free["token_ids"], 3)
    for name in ("thinking_budget_tokens", "reasoning_budget_tokens", "reasoning_budget"):
        assert chat(limited, **asked, **{name: -1}) == free
    body = {"prompt": "Go <think>\n", "temperature": 0.9, "seed": 1, "max_tokens": 20, "reasoning_budget": -1}
    assert limited.complete(**body)["choices"] == tooled.complete(**body)["choices"]
    body = {"input": "Go", "seed": 3, "temperature": 0.9, "max_output_tokens": 30, "reasoning_budget": -1} | THINK
    (thought,) = limited.post("/v1/responses", **body).json()["output"]
    assert thought["content"][0]["text"] == free["message"]["reasoning_content"]
    body = {"messages": ASKED, "max_tokens": 4, "reasoning_budget": -1}
    assert limited.post("/v1/messages", **body).status_code == 200


@pytest.fixture(scope="module")
def always(make_served: MakeServed, tooled: Served, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A server whose template opens thinking whatever the request says."""
    directory = tmp_path_factory.mktemp("always") / "tokenizer"
    shutil.copytree(str(tooled.llm.tokenizer_dir), directory)
    template = directory / "chat_template.jinja"
    template.write_text(template.read_text().replace("{% if think %}<think>", "{% if true %}<think>"))
    return make_served(NgramDrafter(4, 2), tokenizer_dir=directory)


FORMS: list[dict[str, Any]] = [
    {"guided_choice": ["yes"]}, {"guided_regex": "yes"}, {"grammar": 'root ::= "yes"'},
    {"structured_outputs": {"choice": ["yes"]}},
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_form_of_the_whole_output_is_the_answer(always: Served, form: dict[str, Any]) -> None:
    """It leaves no room for thinking, though the prompt opened it; with an end tag of its own it writes thoughts."""
    for budget in ({}, {"thinking_budget": 2}):
        for choice in (chat(always, tools=None, **form, **budget), joined(always, tools=None, **form, **budget)):
            assert (choice["message"]["content"], choice["message"].get("reasoning_content")) == ("yes", None)
    response = always.post("/v1/responses", input="Go", **form).json()
    assert [one["content"][0]["text"] for one in response["output"]] == ["yes"]
    message = always.post("/v1/messages", messages=ASKED, max_tokens=20, **form).json()
    assert message["content"] == [{"type": "text", "text": "yes"}]
    for thinks in ("Hm\\.\\n<\\/think>\\n\\nyes", "(.|\\n)*yes"):
        body = {"tools": None, "guided_regex": thinks, "thinking_budget": 20, "max_tokens": 40}
        assert chat(always, **body)["message"]["reasoning_content"]


@pytest.mark.parametrize(
    "off",
    [
        {"reasoning": {"enabled": False}}, {"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)  # fmt: skip
def test_thinking_that_the_template_always_opens_is_ended_at_once(always: Served, off: dict[str, Any]) -> None:
    asked = {"max_tokens": 20, "temperature": 0.9, "return_token_ids": True, "tools": None}
    assert not ends_after(always, chat(always, **asked)["token_ids"], 0)
    assert ends_after(always, chat(always, **asked, **off)["token_ids"], 0)
    assert ends_after(always, chat(always, **asked, **off, thinking_budget=5)["token_ids"], 0)


def test_a_message_ends_thinking_by_its_budget(always: Served) -> None:
    asked: dict[str, Any] = {"messages": ASKED, "max_tokens": 40, "seed": 3, "temperature": 0.9}
    expected = chat(always, **asked, tools=None, thinking_budget=4, return_token_ids=True)
    assert ends_after(always, expected["token_ids"], 4)
    thinking = {"type": "enabled", "budget_tokens": 4}
    thought, said = always.post("/v1/messages", **asked, thinking=thinking).json()["content"]
    assert thought["thinking"] == expected["message"]["reasoning_content"]
    assert said["text"] == expected["message"]["content"]
    both = always.post("/v1/messages", **asked, thinking=thinking, thinking_budget=3)
    assert both.status_code == 400 and "only one budget" in both.json()["error"]["message"]


def test_messages_and_responses_can_turn_thinking_off(always: Served, served: Served) -> None:
    asked: dict[str, Any] = {"messages": ASKED, "max_tokens": 12, "temperature": 0}
    thinking = {"type": "disabled"}
    message = always.post("/v1/messages", **asked, thinking=thinking).json()
    assert [block["type"] for block in message["content"]] == ["text"]
    body = {"input": "Go", "max_output_tokens": 12, "temperature": 0, "reasoning": {"effort": "none"}}
    assert [item["type"] for item in always.post("/v1/responses", **body).json()["output"]] == ["message"]
    for path in (CHAT, "/v1/messages"):  # a model that does not think
        assert served.post(path, **asked, thinking=thinking).status_code == 200
