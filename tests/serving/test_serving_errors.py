"""Clients' mistakes are told in OpenAI's form, by a status of their own; nothing of them is a 500."""

import asyncio
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Semaphore
from typing import Any

import pytest
from gate import Gate
from logged import logged
from pydantic import ValidationError
from sentences import Said
from serving_models import PROMPT, WAITS, MakeServed, Served
from waiting import wait_until

from commands.serve.errors import HTTPError, of_validation
from commands.serve.http.bodies import Document, EventStream
from commands.serve.protocol.conversations import ended_after
from commands.serve.protocol.schema import ChatRequest, CompletionRequest, MessagesRequest, refused_field, validate_body
from runtime.drafters.specs import NgramDrafter
from runtime.text.text import encode_text

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "a ball"}]
LONG_CHAT = [{"role": "user", "content": "the ball " * 60}]
A_FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}

WRONG = {
    "no prompt": ({}, "prompt"),
    "prompt of no kind": ({"prompt": 7}, "prompt"),
    "empty prompt": ({"prompt": ""}, "prompt"),
    "no prompts": ({"prompt": []}, "prompt"),
    "an empty one of several": ({"prompt": ["a", ""]}, "prompt"),
    "mixed prompts": ({"prompt": ["a", 3]}, "prompt"),
    "a foreign id": ({"prompt": [3, 100_000]}, "prompt"),
    "a negative id": ({"prompt": [3, -1]}, "prompt"),
    "too long": ({"prompt": "the ball " * 200}, "prompt"),
    "too long by far": ({"prompt": "x" * 1_000_000}, "prompt"),
    "too many tokens": ({"prompt": PROMPT, "max_tokens": 1000}, "max_tokens"),
    "no tokens": ({"prompt": PROMPT, "max_tokens": 0}, "max_tokens"),
    "top_k above the vocabulary": ({"prompt": PROMPT, "top_k": 1_000_000}, "top_k"),
    "stop": ({"prompt": PROMPT, "stop": ["x"] * 33}, "stop"),
    "an empty stop": ({"prompt": PROMPT, "stop": ""}, "stop"),
    "seed": ({"prompt": PROMPT, "seed": 2**70}, "seed"),
    "bias": ({"prompt": PROMPT, "logit_bias": {"3": 101}}, "logit_bias"),
    "bias of a word": ({"prompt": PROMPT, "logit_bias": {"ball": 1}}, "logit_bias"),
    "bias of a foreign id": ({"prompt": PROMPT, "logit_bias": {"100000": 1}}, "logit_bias"),
    "foreign stop id": ({"prompt": PROMPT, "stop_token_ids": [100_000]}, "stop_token_ids"),
    "suffix": ({"prompt": PROMPT, "suffix": "end"}, "suffix"),
    "no expression": ({"prompt": PROMPT, "guided_regex": "(a"}, "guided_regex"),
    "a schema of no type": ({"prompt": PROMPT, "json_schema": {"type": "strange"}}, "json_schema"),
    "a schema without an end": (
        {"prompt": PROMPT, "guided_json": {"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}},
        "guided_json",
    ),
    "no choice": ({"prompt": PROMPT, "guided_choice": []}, "guided_choice"),
    "a pattern of white space": ({"prompt": PROMPT, "guided_whitespace_pattern": " *"}, "guided_whitespace_pattern"),
    "a format without its schema": ({"prompt": PROMPT, "response_format": {"type": "json_schema"}}, "response_format"),
    "two forms": ({"prompt": PROMPT, "regex": "a", "response_format": {"type": "json_object"}}, "regex"),
    "a large schema": (
        {
            "prompt": PROMPT,
            "json_schema": {"allOf": [{"anyOf": [{"pattern": f"^[a-z]*{i}{j}"} for j in range(8)]} for i in range(8)]},
        },
        "json_schema",
    ),
    "a drafter": ({"prompt": PROMPT, "drafter": "os:system"}, "drafter"),
    "two drafters": ({"prompt": PROMPT, "speculative": {"ngram_config": [4, 2], "suffix_config": 4}}, "speculative"),
    "long drafts": ({"prompt": PROMPT, "speculative": {"ngram_config": [11, 2]}}, "speculative"),
    "longer drafts": ({"prompt": PROMPT, "speculative": {"draft_len": 11}}, "speculative"),
    "no config": ({"prompt": PROMPT, "speculative": {"ngram_config": "[[[["}}, "speculative"),
    "a config of code": ({"prompt": PROMPT, "speculative": {"ngram_config": "__import__('os')"}}, "speculative"),
    "top_k of thousands of digits": ({"prompt": PROMPT, "top_k": 10**4000}, "top_k"),
    "a text for a number": ({"prompt": PROMPT, "temperature": "0.5"}, "temperature"),
    "a text for true": ({"prompt": PROMPT, "echo": "true"}, "echo"),
    "a number for true": ({"prompt": PROMPT, "ignore_eos": 1}, "ignore_eos"),
    "allowed ids": ({"prompt": PROMPT, "allowed_token_ids": [3, 100_000]}, "allowed_token_ids"),
    "no allowed ids": ({"prompt": PROMPT, "allowed_token_ids": []}, "allowed_token_ids"),
    "fewest tokens above the most": ({"prompt": PROMPT, "min_tokens": 9, "max_tokens": 4}, "min_tokens"),
    "a prompt cut to nothing": ({"prompt": PROMPT, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    "no room for a prompt": ({"prompt": PROMPT, "truncate_prompt_tokens": -1, "max_tokens": 10**6}, "max_tokens"),
    "an empty bad word": ({"prompt": PROMPT, "bad_words": [""]}, "bad_words"),
    "no token left": ({"prompt": PROMPT, "guided_regex": "[a-z]+", "allowed_token_ids": [0]}, "allowed_token_ids"),
    "no token of a grammar": ({"prompt": PROMPT, "regex": "(a|b)+ ", "bad_words": ["a", "b", "ab"]}, "bad_words"),
    "a multiple below 0": ({"prompt": PROMPT, "json_schema": {"type": "integer", "multipleOf": -3}}, "json_schema"),
    "a priority beyond 64 bits": ({"prompt": PROMPT, "priority": 2**63}, "priority"),
    "a prediction of nothing": ({"prompt": PROMPT, "prediction": {"type": "content"}}, "prediction"),
}


def check_error(response: Any, status: int, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]
    assert param is None or error["param"] == param, error
    assert "/root" not in response.text and "/tmp" not in response.text and "Traceback" not in response.text
    return error


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_completion_is_refused(served: Served, name: str) -> None:
    body, param = WRONG[name]
    error = check_error(served.post(COMPLETIONS, **body), 400, param)
    assert "0" * 100 not in error["message"]
    assert not served.model.loop.unfinished()


@pytest.mark.parametrize(
    ("fields", "quoted"),
    [
        ({"stream": "x"}, ("stream", "'x'")),
        ({"stop": ["x"] * 33}, ("stop", 32, 33)),
        ({"stop": [""]}, ("stop.0", "''")),
        ({"speculative": {"draft_len": 0}}, ("speculative.draft_len", 1, 0)),
        ({"speculative": {"drafter": "x:y"}}, ("speculative.drafter", "'x:y'")),
        ({"prompt": [-1]}, ("prompt.0", 0, -1)),
        ({"prompt": [[1, 2], [3, -1]]}, ("prompt.1.1", 0, -1)),
        ({"prompt": [1, 2, "a"]}, ("prompt", 2)),
    ],
)
def test_a_message_names_the_field_as_it_was_written_and_the_reason(
    fields: dict[str, Any], quoted: tuple[object, ...], said: Said
) -> None:
    with pytest.raises(HTTPError) as caught:
        validate_body({"prompt": PROMPT} | fields, CompletionRequest)
    assert caught.value.status == 400
    said(caught.value.message, *quoted)


def test_a_lookup_that_is_no_config_is_told_by_its_field(served: Served, said: Said) -> None:
    for field in ("ngram_config", "suffix_config"):
        error = check_error(served.post(COMPLETIONS, prompt="a", speculative={field: "[[["}), 400, "speculative")
        said(error["message"], f"`{field}`", "[[[")
        assert "--" not in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}, {"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools"),
        ({"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"messages": MESSAGES, "top_logprobs": 3}, "top_logprobs"),
        ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": MESSAGES, "echo": True}, "echo"),
        ({"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": LONG_CHAT}, "messages"),
        ({"messages": MESSAGES, "max_completion_tokens": 1000}, "max_completion_tokens"),
        ({"messages": MESSAGES, "max_tokens": 1000}, "max_tokens"),
        ({"messages": MESSAGES, "response_format": A_FORMAT, "allowed_token_ids": [0]}, "allowed_token_ids"),
    ],
)
def test_a_wrong_chat_is_refused(served: Served, body: dict[str, Any], param: str) -> None:
    check_error(served.post(CHAT, **body), 400, param)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_chat_of_no_tokens_is_told_the_least_number(served: Served, field: str, said: Said) -> None:
    said(check_error(served.post(CHAT, messages=MESSAGES, **{field: 0}), 400, field)["message"], field, 1, 0)


def test_other_protocols_name_their_own_fields(served: Served) -> None:
    long = LONG_CHAT[0]["content"]
    for body, param in (
        ({"input": long}, "input"),
        ({"input": "a", "allowed_token_ids": [100_000]}, "allowed_token_ids"),
        (
            {"input": "a", "text": {"format": {**A_FORMAT["json_schema"], "type": "json_schema"}}, "bad_words": ["{"]},
            "bad_words",
        ),
    ):
        check_error(served.post("/v1/responses", **body), 400, param)
    refused = served.post("/v1/messages", messages=LONG_CHAT, max_tokens=4)
    assert refused.status_code == 400 and "prompt is too long" in refused.json()["error"]["message"]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_stream_that_no_token_can_go_on_names_what_left_none(
    is_late: bool, served: Served, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late stream begins when the answer is over, as on a busy machine."""
    begin = EventStream.__call__

    async def begin_late(stream: EventStream, *asked: Any) -> None:
        while not stream._group.is_over:
            await asyncio.sleep(0.002)
        await begin(stream, *asked)

    if is_late:
        monkeypatch.setattr(EventStream, "__call__", begin_late)
    response = served.post(COMPLETIONS, prompt=PROMPT, guided_regex="[a-z]+", allowed_token_ids=[0], stream=True)
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    (error,) = (event["error"] for event in events if "error" in event)
    assert error["param"] == "allowed_token_ids"
    said(error["message"], "regex", "allowed_token_ids")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"7", b"null", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b"\xff\xfe"]
)
def test_what_is_no_json_is_refused(served: Served, body: bytes) -> None:
    check_error(served.client.post(COMPLETIONS, content=body), 400)


def test_deep_and_long_bodies_are_refused(served: Served) -> None:
    for depth in (300, 100_000):  # valid JSON, and too deep
        deep = b'{"prompt": "a", "metadata": ' + b"[" * depth + b"]" * depth + b"}"
        error = check_error(served.client.post(COMPLETIONS, content=deep), 400)
        assert error["code"] == "nested_too_deep" and "200" in error["message"]
    served.complete(metadata=json.loads("[" * 190 + "]" * 190))
    assert check_error(served.client.post(COMPLETIONS, content=b" " * (5 << 20)), 413)["code"] == "body_too_long"
    chunks = (b" " * (1 << 20) for _ in range(6))
    check_error(served.client.post(COMPLETIONS, content=chunks), 413)
    check_error(served.client.post(COMPLETIONS, content=b'{"seed": ' + b"9" * 10_000 + b"}"), 400)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("typical_p", 0.9),
        ("stop_sequences", ["a"]),
        ("max_new_tokens", 5),
        ("mirostat", 2),
        ("parameters", {"max_new_tokens": 5}),
        ("negative_prompt", "a"),
    ],
)
def test_what_changes_an_answer_elsewhere_is_refused_by_name(served: Served, field: str, value: Any) -> None:
    for path, asked in ((COMPLETIONS, {"prompt": PROMPT}), (CHAT, {"messages": MESSAGES})):
        assert field in check_error(served.post(path, **asked, **{field: value}), 400, field)["message"]


def test_a_message_knows_or_refuses_every_field_of_other_requests() -> None:
    """A field of completions or chats that `/v1/messages` does not have is no less ignored than another server's."""
    takes_part = {"model", "user", "stream_options", "return_token_kinds", "parallel_tool_calls", "prompt"}
    others = {*CompletionRequest.model_fields, *ChatRequest.model_fields} - {*MessagesRequest.model_fields, *takes_part}
    asked = {"messages": MESSAGES, "max_tokens": 3}
    kept = [name for name in sorted(others) if refused_field(asked | {name: [0.123]}, MessagesRequest) != name]
    assert kept == []
    neutral = {"repetition_penalty": 1, "logit_bias": {}, "stop": [], "n": 1, "min_p": 0.0}
    assert refused_field(asked | neutral, MessagesRequest) is None


def test_a_thread_is_refused_as_clients_know_that_they_must_send_the_whole_conversation(served: Served) -> None:
    """Anthropic's client keeps a conversation at the server in a loop of tools, and without it where this is said."""
    asked: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 3}
    for field, details in (("thread", {"error_code": "thread_unsupported_request"}), ("compaction", None)):
        refused = served.post("/v1/messages", **asked, **{field: {"type": "create"}})
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert f"`{field}`" in error["message"] and error.get("details") == details
        assert served.post("/v1/messages", **asked, **{field: None}).status_code == 200


def test_tokens_at_the_start_of_a_text_are_as_each_route_has_them() -> None:
    for model, asked, refused in (
        (CompletionRequest, {"prompt": PROMPT}, False),
        (ChatRequest, {"messages": MESSAGES}, True),
    ):
        validate_body(asked | {"add_special_tokens": not refused}, model)
        with pytest.raises(HTTPError, match="add_special_tokens"):
            validate_body(asked | {"add_special_tokens": refused}, model)


def test_fields_that_ask_for_nothing_are_taken(served: Served) -> None:
    nothing = {"tools": [], "tool_choice": "none", "suffix": None, "best_of": 1, "response_format": {"type": "text"}}
    nothing |= {
        "typical_p": 1.0, "xtc_probability": 0, "repeat_penalty": 1, "grammar": "", "n_predict": -1, "mirostat": 0,
    }  # fmt: skip
    clients = {"user": "me", "logit_bias": None, "stop": None, "logprobs": None, "stream_options": None, "n": None}
    assert served.post(COMPLETIONS, prompt=PROMPT, **nothing, **clients).status_code == 200


def test_another_model_is_not_found_unless_any_is_taken(served: Served, make_served: MakeServed) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": MESSAGES}), ("/tokenize", {"prompt": "a"})):
        error = check_error(served.post(path, model="gpt-4", **body), 404, "model")
        assert error["code"] == "model_not_found"
        assert error["message"] == "the model `gpt-4` does not exist; this server has `tiny`, `tiny-alias`"
        assert served.post(path, model="tiny-alias", **body).status_code == 200
    check_error(served.client.get("/v1/models/gpt-4"), 404)
    of_anthropic = served.post("/v1/messages", model="opus", max_tokens=2, messages=MESSAGES).json()
    assert "`opus`" in of_anthropic["error"]["message"] and "`tiny`" in of_anthropic["error"]["message"]
    open_minded = make_served(any_model=True)
    assert open_minded.post(CHAT, model="gpt-4", messages=MESSAGES, max_tokens=2).json()["model"] == "tiny"
    assert open_minded.client.get("/v1/models/gpt-4").status_code == 200


def test_each_request_is_logged_in_a_line_without_its_text(
    make_served: MakeServed, capsys: pytest.CaptureFixture[str]
) -> None:
    logging = make_served(NgramDrafter(4, 2), log_requests=True)
    asked = {"prompt": "The secret dog had a red ball and a red ball. The", "max_tokens": 8, "temperature": 0}
    usage = [logging.complete(**asked)["usage"] for _ in range(2)][1]
    logging.stream(**asked, model="tiny-alias")
    logging.post(COMPLETIONS, **asked, model="gpt-4\x1b[2J")
    logging.client.get("/v1/models?secret=1")
    first, again, streamed, unknown, models = [line for line in capsys.readouterr().err.splitlines() if "/v1/" in line]
    assert "POST /v1/completions 200 in " in first and "(0 cached)" in first
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    told = f"{usage['prompt_tokens']} prompt tokens ({cached} cached), {usage['completion_tokens']} output, "
    assert f": tiny, {told}" in again and f": tiny-alias, {told}" in streamed and again.endswith(" a step") and cached
    assert " 404 in " in unknown and unknown.endswith(": gpt-4\\x1b[2J, model_not_found")
    assert "GET /v1/models 200 in " in models and models.endswith(" s")
    assert not any("secret" in line or "dog" in line for line in (first, again, streamed, unknown, models))


@pytest.mark.parametrize(
    ("method", "path", "route"),
    [
        ("POST", "/api/chat", "POST /v1/chat/completions"),
        ("POST", "/api/generate", "POST /v1/completions"),
        ("GET", "/api/tags", "GET /v1/models"),
        ("POST", "/completion", "POST /v1/completions"),
        ("GET", "/v1", "GET /v1/models"),
        ("GET", "/v1/", "GET /v1/models"),
        ("POST", "/v1/v1/chat/completions", "POST /v1/chat/completions"),
        ("POST", "/chat/completions", "POST /v1/chat/completions"),
        ("POST", "/v1/messages/v1/messages", "POST /v1/messages"),
        ("POST", "/v1/chat/completion", "POST /v1/chat/completions"),
        ("POST", "/api/embed", "no embeddings"),
        ("GET", "/v1/chat/completions", "it takes POST"),
    ],
)
def test_a_route_of_another_server_names_ours(served: Served, method: str, path: str, route: str) -> None:
    response = served.client.request(method, path, json={} if method == "POST" else None)
    message = response.json()["error"]["message"]
    assert response.status_code in (404, 405) and message.startswith(f"{method} {path}: ") and message.endswith(route)


def test_unknown_paths_and_methods_are_told_in_the_same_form(served: Served) -> None:
    check_error(served.client.get("/v1/nothing"), 404)
    check_error(served.client.get(COMPLETIONS), 405)
    of_anthropic = served.client.get("/v1/messages")
    assert (of_anthropic.status_code, of_anthropic.json()["error"]["type"]) == (405, "invalid_request_error")


def test_a_full_queue_is_refused_with_when_to_come_again(make_served: MakeServed, gate: Gate) -> None:
    served = make_served(WAITS, max_queue_len=2)
    check_error(served.post(COMPLETIONS, prompt=PROMPT, n=7), 400, "n")  # never: 4 run and 2 wait
    first = [served.model.loop.submit(asked_of(served, 100), None) for _ in range(6)]
    response = served.post(COMPLETIONS, prompt=PROMPT)
    served.model.loop.cancel([answer for group in first for answer in group])
    gate.open()
    error = check_error(response, 503)
    assert error["code"] == "queue_full" and int(response.headers["retry-after"]) >= 1


def asked_of(served: Served, max_tokens: int) -> list[Any]:
    from commands.serve.protocol.asking import ask_completion
    from commands.serve.protocol.schema import CompletionRequest

    body = CompletionRequest(prompt=PROMPT, max_tokens=max_tokens, ignore_eos=True)
    return ask_completion(served.model, body)


@pytest.mark.parametrize("stream", [False, True])
def test_what_takes_too_long_is_ended(make_served: MakeServed, gate: Gate, stream: bool) -> None:
    served = make_served(WAITS, request_timeout=0.02)
    response = served.post(COMPLETIONS, prompt=PROMPT, max_tokens=120, ignore_eos=True, n=4, stream=stream)
    if stream:
        assert response.status_code == 200 and '"code":"timeout"' in response.text
    else:
        check_error(response, 504)
    assert all(answer.is_cancelled for answer in served.model.loop.unfinished())
    gate.open()
    wait_until(lambda: not served.model.loop.unfinished())


@pytest.fixture(scope="module")
def keyed(make_served: MakeServed) -> Served:
    return make_served(None, api_key="secret")


def test_a_key_is_asked_for_everywhere_but_at_the_door(keyed: Served) -> None:
    for path in ("/v1/models", "/metrics", "/requests", "/tokenizer_info", "/openapi.json", "/nothing"):
        response = keyed.client.get(path)
        check_error(response, 401)
        assert "secret" not in response.text
        check_error(keyed.client.get(path, headers={"Authorization": "Bearer secre"}), 401)
    check_error(keyed.post(COMPLETIONS, prompt="a"), 401)
    for path in ("/", "/health"):
        assert keyed.client.get(path).status_code == 200
    key = {"Authorization": "Bearer secret"}
    assert keyed.client.get("/v1/models", headers=key).status_code == 200
    assert keyed.client.post(COMPLETIONS, json={"prompt": "a"}, headers=key).status_code == 200


def test_a_key_is_in_either_header_and_compared_as_http_says(keyed: Served) -> None:
    given = [("Authorization", f"{scheme} secret") for scheme in ("bearer", "BEARER", "Basic", "")]
    for (name, value), status in zip(
        [*given, ("x-api-key", "secret"), ("x-api-key", "wrong")], (200, 200, 401, 401, 200, 401), strict=True
    ):
        assert keyed.client.get("/v1/models", headers={name: value}).status_code == status, (name, value)


def test_a_name_that_leads_to_this_machine_is_not_its_own(make_served: MakeServed) -> None:
    """DNS rebinding: to a browser the page and the server are of one origin then."""
    served = make_served(None, is_of_this_machine=True, allowed_origins=["https://proxy.example"])
    for host in ("localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "192.168.1.5", "proxy.example"):
        assert served.client.get("/v1/models", headers={"Host": host}).status_code == 200, host
    for host in ("evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "[", "[::1].evil.example"):
        answer = served.client.get("/v1/models", headers={"Host": host, "Origin": f"http://{host}"})
        assert check_error(answer, 403)["code"] == "host_not_allowed"


LONG = 1_000_000


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": PROMPT, "speculative": {"ngram_config": [1] * LONG}},
        {"prompt": PROMPT, "speculative": {"ngram_config": [1, 2, [1] * LONG]}},
        {"prompt": PROMPT, "speculative": {"suffix_config": [1] * LONG}},
        {"prompt": [[1]] * LONG},
        {"prompt": ["a"] * LONG},
        {"prompt": PROMPT, "logit_bias": {"z" * LONG: 1}},
    ],
    ids=["ngram_config", "device_list", "suffix_config", "ids", "prompts", "logit_bias"],
)
def test_a_long_list_costs_neither_time_nor_a_long_answer(
    body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reading of it ends at the first thing that is wrong: one for each kind that a field may be of."""
    found: list[int] = []

    def watched(error: ValidationError, value: Any) -> HTTPError:
        found.append(error.error_count())
        return of_validation(error, value)

    monkeypatch.setattr("commands.serve.protocol.schema.of_validation", watched)
    with pytest.raises(HTTPError) as caught:
        validate_body(body, CompletionRequest)
    assert 1 <= found[0] < 10
    assert len(str(caught.value.body)) < 2000


def test_of_a_long_prediction_is_read_what_can_be_needed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def watched(tokenizer: Any, text: str) -> list[int]:
        lengths.append(len(text))
        return encode_text(tokenizer, text)

    monkeypatch.setattr("commands.serve.protocol.asking.encode_text", watched)
    content = "a b " * LONG
    response = served.post(COMPLETIONS, prompt=PROMPT, max_tokens=1, prediction={"type": "content", "content": content})
    assert response.status_code == 200
    assert 0 < lengths[0] <= served.model.max_text_len < len(content)


def test_pages_of_elsewhere_may_not_ask_unless_they_are_allowed(make_served: MakeServed, served: Served) -> None:
    evil = {"Origin": "https://evil.example"}
    response = served.client.post(COMPLETIONS, json={"prompt": "a"}, headers=evil)
    check_error(response, 403)
    assert "access-control-allow-origin" not in response.headers
    own = {"Origin": "http://testserver"}
    assert served.client.post(COMPLETIONS, json={"prompt": "a"}, headers=own).status_code == 200
    open_to = make_served(None, allowed_origins=["https://good.example"])
    good = {"Origin": "https://good.example"}
    response = open_to.client.post(COMPLETIONS, json={"prompt": "a"}, headers=good)
    assert response.headers["access-control-allow-origin"] == "https://good.example"
    check_error(open_to.client.post(COMPLETIONS, json={"prompt": "a"}, headers=evil), 403)


def test_a_model_without_a_chat_template_says_so(make_served: MakeServed, said: Said) -> None:
    served = make_served(None, tokenizer_dir=None)
    error = check_error(served.post(CHAT, messages=MESSAGES), 400)
    said(error["message"])


def test_a_chat_template_that_fails_is_an_answer(
    make_served: MakeServed, chat_tokenizer_dir: Path, tmp_path: Path, said: Said
) -> None:
    shutil.copytree(chat_tokenizer_dir, tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text("{{ 1 / 0 }}")
    served = make_served(None, tokenizer_dir=tmp_path / "tokenizer")
    with logged() as messages:
        error = check_error(served.post(CHAT, messages=MESSAGES), 400)
    said(error["message"], "ZeroDivisionError: division by zero")
    assert messages == []


def test_a_chat_template_that_does_not_end_is_given_up(
    make_served: MakeServed, chat_tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    monkeypatch.setattr("commands.serve.protocol.conversations._TEMPLATE_S", 0.2)
    shutil.copytree(chat_tokenizer_dir, tmp_path / "tokenizer")
    loops = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}"
    text = loops + "{% set d = 1 %}" + "{% endfor %}" * 3
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(text)
    served = make_served(None, tokenizer_dir=tmp_path / "tokenizer")
    error = check_error(served.post(CHAT, messages=MESSAGES), 400, "messages")
    assert error["code"] == "template_timeout"
    said(error["message"], "0.2 s")
    assert served.complete(max_tokens=2)["usage"]["completion_tokens"] == 2  # the thread that it held is there


def test_nobody_waits_for_a_chat_template(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of other routes are answered while templates are rendered, which may loop until their time is over."""
    begun, may_end, render = Semaphore(0), Event(), served.llm.chat_template.render

    def renders_long(*given: Any) -> str:
        begun.release()
        may_end.wait()
        return render(*given)

    monkeypatch.setattr(served.llm.chat_template, "render", renders_long)
    with ThreadPoolExecutor(2) as clients:
        asked = [clients.submit(served.post, CHAT, messages=MESSAGES, max_tokens=1) for _ in range(2)]
        try:
            for _ in asked:
                begun.acquire()
            assert served.complete(max_tokens=2)["usage"]["completion_tokens"] == 2
            assert not any(one.done() for one in asked)
        finally:
            may_end.set()
        assert [one.result().status_code for one in asked] == [200, 200]


def test_answers_that_wait_to_be_read_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    monkeypatch.setattr("commands.serve.http.bodies._MAX_HELD", 100)
    error = check_error(served.post(COMPLETIONS, prompt=PROMPT, max_tokens=1), 503)
    assert error["code"] == "answers_unread"
    said(error["message"])
    assert Document._num_held == 0


@pytest.mark.parametrize("seconds", [0, 0.001])
def test_block_that_ends_in_time_is_left_alone(seconds: float) -> None:
    for _ in range(300):  # some end as their time does, or before they begin
        try:
            with ended_after(seconds):
                sum(range(20_000))
        except TimeoutError:
            pass
    time.sleep(0.01)
