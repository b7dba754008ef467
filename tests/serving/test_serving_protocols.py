"""OpenAI's Responses and Anthropic's Messages: the same model, asked and answered in other words."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic_core import from_json
from sentences import Said
from serving_models import Served

from runtime.proof.receipts import read_receipts

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
CALL = '<tool_call>\n{"name": "go", "arguments": {"by": 2}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]}
FUNCTION = {"type": "function", "name": "go", "parameters": SCHEMA}
OWN_TOOL = {"name": "go", "input_schema": SCHEMA}
THOUGHT = {"chat_template_kwargs": {"think": True}}


def events_of(response: Any) -> list[dict[str, Any]]:
    """The events of a stream whose events have names."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for event in response.text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def ok(response: Any) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def without_ids(value: Any) -> Any:
    """A document without what is made up for it."""
    if isinstance(value, dict):
        made_up = ("id", "item_id", "created_at", "completed_at")
        return {key: without_ids(one) for key, one in value.items() if key not in made_up}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


def check_schema(served: Served, path: str, document: dict[str, Any]) -> None:
    """The document is of the schema that openapi.json has for the answer."""
    openapi = ok(served.client.get("/openapi.json"))
    schema = openapi["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(document, schema | {"components": openapi["components"]})


ASKED: dict[str, Any] = {"input": "Go", "temperature": 0, "max_output_tokens": 12, "store": False}


def test_a_response_says_what_a_chat_says(tooled: Served) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Go"}]
    chat = ok(tooled.post(CHAT, messages=messages, temperature=0, max_tokens=12, ignore_eos=True))
    found = ok(tooled.post(RESPONSES, **ASKED, instructions="S", ignore_eos=True))
    (item,) = found["output"]
    assert item["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert found["usage"]["output_tokens"] == 12
    check_schema(tooled, RESPONSES, found)
    check_schema(tooled, CHAT, chat)


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_receipts_are_exact_and_come_where_the_answer_ends(tooled: Served, path: str, tmp_path: Path) -> None:
    """The log that `check` reads has a whole answer and the last event of a stream."""
    asked = (
        {"input": "Go", "max_output_tokens": 12}
        if path == RESPONSES
        else {"messages": [{"role": "user", "content": "Go"}], "max_tokens": 12}
    )
    body = asked | {"temperature": 1.1, "seed": 3, "receipt": True}
    whole = ok(tooled.post(path, **body))
    check_schema(tooled, path, whole)
    (event,) = [one for one in events_of(tooled.post(path, **body, stream=True)) if "receipt" in json.dumps(one)]
    assert event["type"] in ("response.incomplete", "message_delta")
    log = tmp_path / "log.jsonl"
    log.write_text(f"{json.dumps(whole)}\n{json.dumps(event)}\n")
    reads = list(read_receipts(log))
    assert reads[0].receipt is not None and reads[0].receipt == reads[1].receipt
    assert [one.verdict for one in tooled.llm.checker("tokens").check(reads)] == ["exact"] * 2
    assert "receipt" not in ok(tooled.post(path, **asked))


def test_input_items_are_the_messages_of_a_chat(tooled: Served) -> None:
    """Parts, calls and what they gave: one prompt either way."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Go"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
        {"type": "function_call", "call_id": "c1", "name": "go", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "ok"},
    ]
    call = {"id": "c1", "type": "function", "function": {"name": "go", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": "A", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
    ]
    chat = ok(tooled.post(CHAT, messages=messages, max_tokens=2, seed=1))
    found = ok(tooled.post(RESPONSES, input=items, max_output_tokens=2, seed=1))
    assert found["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    blocks = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm", "signature": ""},
            {"type": "text", "text": "A"},
            {"type": "tool_use", "id": "c1", "name": "go", "input": {}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "ok"}]},
    ]  # fmt: skip
    counted = ok(tooled.post(f"{MESSAGES}/count_tokens", messages=blocks))
    assert counted == {"input_tokens": chat["usage"]["prompt_tokens"]}


def written(reasoning: str = "") -> dict[str, Any]:
    """The only text that the model can write."""
    return {"guided_choice": [f"{reasoning}I go. {CALL}"]}


def test_calls_of_a_response_stream_as_they_are_whole(tooled: Served) -> None:
    body = {"input": "Go", "seed": 1, "tools": [FUNCTION, {"type": "web_search"}, {"type": "namespace", "name": "x"}]}
    body |= written("Hm.\n</think>\n\n") | THOUGHT
    found = ok(tooled.post(RESPONSES, **body))
    assert [item["type"] for item in found["output"]] == ["reasoning", "message", "function_call"]
    assert found["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert found["output"][1]["content"][0]["text"] == "I go."
    assert (found["output"][2]["name"], found["output"][2]["arguments"]) == ("go", '{"by": 2}')
    events = events_of(tooled.post(RESPONSES, **body, stream=True))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"] and kinds[-1] == "completed"
    assert without_ids(events[-1]["response"]) == without_ids(found) | {"usage": events[-1]["response"]["usage"]}
    for kind, field in (("reasoning_text", 0), ("output_text", 1), ("function_call_arguments", 2)):
        deltas = "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta")
        (done,) = [event for event in events if event["type"] == f"response.{kind}.done"]
        assert deltas == done.get("text", done.get("arguments")) and done["output_index"] == field
    added = [event["item"]["type"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert added == ["reasoning", "message", "function_call"] and done == events[-1]["response"]["output"]


def test_a_response_goes_on_from_one_that_is_kept(tooled: Served) -> None:
    first = ok(tooled.post(RESPONSES, input="Go", max_output_tokens=4, seed=1))
    text = first["output"][0]["content"][0]["text"]
    second = ok(tooled.post(RESPONSES, input="On", previous_response_id=first["id"], max_output_tokens=2))
    messages = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "On"},
    ]
    chat = ok(tooled.post(CHAT, messages=messages, max_tokens=2))
    assert second["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert ok(tooled.client.get(f"{RESPONSES}/{first['id']}")) == first
    assert ok(tooled.client.delete(f"{RESPONSES}/{first['id']}"))["deleted"] is True
    assert tooled.client.get(f"{RESPONSES}/{first['id']}").status_code == 404
    unkept = ok(tooled.post(RESPONSES, **ASKED))
    assert tooled.client.get(f"{RESPONSES}/{unkept['id']}").status_code == 404


def test_kept_responses_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from commands.serve.protocol.openai_responses import ResponseStore

    monkeypatch.setattr("commands.serve.protocol.openai_responses._MOST_STORED_CHARACTERS", 1000)
    store = ResponseStore()
    for i in range(20):
        store.add({"id": str(i)}, [{"role": "user", "content": "x" * 100}])
    assert 3 < len(store._held) < 10 and "19" in store._held and "0" not in store._held


def test_calls_of_a_message_stream_as_they_are_whole(tooled: Served) -> None:
    tools = [OWN_TOOL, {"type": "web_search_20250305", "name": "web_search"}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Go"}],
        "max_tokens": 90,
        "tools": tools,
        "seed": 1,
    }
    found = ok(tooled.post(MESSAGES, **body, tool_choice=choice))
    (block,) = found["content"]
    assert (block["type"], block["name"], found["stop_reason"]) == ("tool_use", "go", "tool_use")
    jsonschema.validate(block["input"], SCHEMA)
    check_schema(tooled, MESSAGES, found)
    events = events_of(tooled.post(MESSAGES, **body, tool_choice=choice, stream=True))
    assert events[0]["type"] == "message_start" and events[-1] == {"type": "message_stop"}
    arguments = "".join(e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta")
    assert json.loads(arguments) == block["input"]
    assert [event["type"] for event in events if event["type"].startswith("content_block_s")] == [
        "content_block_start",
        "content_block_stop",
    ]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_a_call_that_is_cut_off_has_what_a_client_makes_of_the_stream(tooled: Served) -> None:
    """anthropic's client parses what came of the arguments; it was nothing where the answer came whole."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Go"}], "max_tokens": 20, "seed": 1}
    body |= {"tools": [OWN_TOOL], "tool_choice": {"type": "any"}}
    found = ok(tooled.post(MESSAGES, **body))
    assert found["stop_reason"] == "max_tokens"
    events = events_of(tooled.post(MESSAGES, **body, stream=True))
    arguments = "".join(e["delta"].get("partial_json", "") for e in events if e["type"] == "content_block_delta")
    inputs = [block["input"] for block in found["content"] if block["type"] == "tool_use"]
    assert inputs == ([from_json(arguments, allow_partial=True)] if arguments else [{}] * len(inputs))


@pytest.mark.parametrize(
    "form",
    [
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"guided_json": SCHEMA},
    ],
    ids=lambda form: next(iter(form)),
)
def test_a_message_is_of_the_form_that_is_asked_for(tooled: Served, form: dict[str, Any]) -> None:
    """anthropic's `messages.parse` has `output_config`; the others were ignored as well."""
    for seed in range(3):
        asked = {"messages": [{"role": "user", "content": "Go"}], "max_tokens": 60, "seed": seed, **form}
        found = ok(tooled.post(MESSAGES, **asked))
        (block,) = found["content"]
        value = from_json(block["text"], allow_partial=found["stop_reason"] == "max_tokens")
        assert isinstance(value, dict)
        if found["stop_reason"] != "max_tokens":
            jsonschema.validate(value, SCHEMA)


def test_a_message_says_why_it_ends(tooled: Served) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Go"}], "seed": 2}
    chat = ok(tooled.post(CHAT, **body, max_tokens=12, ignore_eos=True))["choices"][0]["message"]["content"]
    cut = ok(tooled.post(MESSAGES, **body, max_tokens=3))
    assert cut["stop_reason"] == "max_tokens" and cut["usage"]["output_tokens"] == 3
    word = next(character for character in chat if character.isprintable() and character != "\ufffd")
    stopped = ok(tooled.post(MESSAGES, **body, max_tokens=12, stop_sequences=[word]))
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", word)
    text = "".join(block.get("text", "") for block in stopped["content"])
    assert text == chat[: chat.index(word)]
    usage = ok(tooled.post(MESSAGES, **body, max_tokens=3))["usage"]
    assert usage["cache_read_input_tokens"] > 0 and usage["input_tokens"] >= 1


USER = {"role": "user", "content": "a"}
CALLS = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
GAVE = {"type": "function_call_output", "call_id": "1", "output": "a"}


def test_a_message_has_as_many_tokens_as_there_is_room_for(tooled: Served) -> None:
    """Claude Code asks for 32,000 whatever the model is, and knows an error by its beginning."""
    long = {"type": "object", "properties": {"to": {"type": "string", "minLength": 200}}, "required": ["to"]}
    only = {"name": "go", "input_schema": long}
    body = {"messages": [{"role": "user", "content": "Go"}], "tools": [only], "tool_choice": {"type": "any"}}
    found = ok(tooled.post(MESSAGES, **body, max_tokens=32000))
    assert found["stop_reason"] == "model_context_window_exceeded"
    num_prompt = found["usage"]["input_tokens"] + found["usage"]["cache_read_input_tokens"]
    assert num_prompt + found["usage"]["output_tokens"] == tooled.model.max_model_len
    too_long = tooled.post(MESSAGES, messages=[{"role": "user", "content": "Go on. " * 30}], max_tokens=1)
    assert too_long.status_code == 400
    assert too_long.json()["error"]["message"].startswith("prompt is too long: ")


USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}
RESULTS = [{"type": "tool_result", "tool_use_id": one, "content": "a"} for one in ("1", "2")]
WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "an item of another type": (RESPONSES, {"input": [{"type": "computer_call", "id": "1"}]}),
    "an image": (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
    "an unknown response": (RESPONSES, {"input": "a", "previous_response_id": "resp_1"}),
    "a choice of a hosted tool": (RESPONSES, {"input": "a", "tool_choice": {"type": "web_search"}}),
    "a call without its answer": (
        RESPONSES, {"input": [USER, CALLS, USER], "instructions": "Be brief.", "store": False}),
    "an answer to another call": (RESPONSES, {"input": [USER, CALLS, GAVE | {"call_id": "2"}]}),
    "a choice among unknown functions": (
        RESPONSES, {"input": "a", "tools": [FUNCTION], "tool_choice": {
            "type": "allowed_tools", "tools": [{"type": "function", "name": "fly"}]}}),
    "an input of nothing": (RESPONSES, {"input": []}),
    "no room for a token": (RESPONSES, {"input": "a", "max_output_tokens": 0}),
    "log-probabilities": (RESPONSES, {"input": "a", "include": ["message.output_text.logprobs"]}),
    "a chat's length": (RESPONSES, {"input": "a", "max_tokens": 3}),
    "a schema that is none": (
        RESPONSES, {"input": "a", "text": {"format": {
            "type": "json_schema", "name": "a", "schema": {"$ref": "#/no"}}}}),
    "a beginning of the answer": (
        MESSAGES, {"messages": [USER, {"role": "assistant", "content": "The answer is"}], "max_tokens": 1}),
    "no length": (MESSAGES, {"messages": [USER]}),
    "a result of no call, after another": (
        MESSAGES, {"system": "Be brief.", "max_tokens": 1,
                   "messages": [USER, USED, {"role": "user", "content": RESULTS}]}),
    "embeddings": ("/v1/embeddings", {"input": "a"}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_in_the_protocols_own_form(tooled: Served, name: str, said: Said) -> None:
    path, body = WRONG[name]
    response = tooled.post(path, **body)
    assert response.status_code in (400, 404), response.text
    answer = response.json()
    if path == MESSAGES:
        assert answer["type"] == "error" and set(answer["error"]) == {"type", "message"}
    else:
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert answer["error"]["param"] != "messages"
    assert "function.name" not in answer["error"]["message"]
    assert path == MESSAGES or "messages" not in answer["error"]["message"]
    said(answer["error"]["message"])


def test_head_is_answered_like_get(tooled: Served) -> None:
    for path in ("/", "/health", "/v1/models", "/version"):
        assert tooled.client.head(path).status_code == tooled.client.get(path).status_code == 200
    assert tooled.client.head("/v1/responses").status_code == 405
