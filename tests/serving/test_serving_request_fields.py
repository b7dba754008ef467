"""vLLM's further fields of requests: each does over HTTP what it does in Python, whole and in a stream."""

import json
from typing import Any

import pytest
from jinja2 import Template
from sentences import Said
from serving_models import PROMPT, TEMPLATE, Served

from runtime.core.params import SamplingParams

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Who found the ball?"}]
OPEN = [*MESSAGES, {"role": "assistant", "content": "The little dog"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


def ids(served: Served, **params: Any) -> list[int]:
    (output,) = served.llm.generate(PROMPT, SamplingParams(**GREEDY | params))
    return output.token_ids


def rendered(messages: list[dict[str, Any]]) -> str:
    return Template(TEMPLATE).render(messages=messages, add_generation_prompt=True)


def asked_by_each_protocol(served: Served, **fields: Any) -> dict[str, str]:
    """Texts of one request in the protocols that have these fields."""
    chat = served.post(CHAT, messages=MESSAGES, **GREEDY, **fields)
    given = {"input": MESSAGES, "temperature": 0, "max_output_tokens": 24, "store": False}
    response = served.post("/v1/responses", **given, **fields)
    assert chat.status_code == response.status_code == 200, (chat.text, response.text)
    (item,) = response.json()["output"]
    return {"chat": chat.json()["choices"][0]["message"]["content"], "responses": item["content"][0]["text"]}


def test_least_tokens_hold_in_every_protocol(served: Served) -> None:
    """The first token that the model would choose ends the output, until it has enough tokens."""
    for prompt, path, body in (
        (PROMPT, COMPLETIONS, {"prompt": PROMPT}),
        (rendered(MESSAGES), CHAT, {"messages": MESSAGES}),
    ):
        (free,) = served.llm.generate(prompt, SamplingParams(**GREEDY, ignore_eos=True))
        end = free.token_ids[0]
        (expected,) = served.llm.generate(prompt, SamplingParams(**GREEDY, stop_token_ids=[end], min_tokens=9))
        assert end not in expected.token_ids[:9] and len(expected.token_ids) >= 9
        short = served.post(path, **body, **GREEDY, stop_token_ids=[end]).json()
        assert short["usage"]["completion_tokens"] == 1
        found = served.post(path, **body, **GREEDY, stop_token_ids=[end], min_tokens=9, return_token_ids=True).json()
        assert found["choices"][0]["token_ids"] == expected.token_ids
    texts = asked_by_each_protocol(served, stop_token_ids=[end], min_tokens=9)
    assert {*texts.values()} == {expected.text}


def test_only_allowed_tokens_are_chosen_in_every_protocol(served: Served) -> None:
    allowed = sorted({*served.llm.encode("the little dog had a red ball")[0]})
    fields = {"allowed_token_ids": allowed}
    found = served.complete(**GREEDY, **fields, return_token_ids=True)["choices"][0]
    assert found["token_ids"] == ids(served, **fields) and {*found["token_ids"]} <= {*allowed}
    assert found["finish_reason"] == "length"  # no end id is among them
    (expected,) = served.llm.generate(rendered(MESSAGES), SamplingParams(**GREEDY, **fields))
    assert {*asked_by_each_protocol(served, **fields).values()} == {expected.text}


@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, {"prompt": PROMPT}), (CHAT, {"messages": MESSAGES})], ids=["completions", "chat"]
)
def test_ids_are_told_whole_and_in_a_stream(served: Served, path: str, body: dict[str, Any]) -> None:
    prompt = PROMPT if path == COMPLETIONS else rendered(MESSAGES)
    asked = {**GREEDY, "ignore_eos": True, "stop": "no such word", "n": 2}
    (expected,) = served.llm.generate(prompt, SamplingParams(**GREEDY, ignore_eos=True))
    whole = served.post(path, **body, **asked, return_token_ids=True).json()
    chunks = served.stream(path, **body, **asked, return_token_ids=True)
    for index in range(2):
        assert whole["choices"][index]["token_ids"] == expected.token_ids
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [one for choice in choices for one in choice.get("token_ids", [])] == expected.token_ids
        if path == COMPLETIONS:
            assert whole["choices"][index]["prompt_token_ids"] == expected.prompt_token_ids
            given = [choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice]
            assert given == [expected.prompt_token_ids]
    if path == CHAT:
        assert whole["prompt_token_ids"] == expected.prompt_token_ids
        assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [
            expected.prompt_token_ids
        ]
    assert "token_ids" not in json.dumps(served.post(path, **body, **asked).json())


@pytest.mark.parametrize("flag", [{}, {"add_generation_prompt": False}])
def test_a_message_is_continued(served: Served, flag: dict[str, Any]) -> None:
    """Both routes that render messages have it, and Python; vLLM's clients send `add_generation_prompt` too."""
    prompt = "<user>Who found the ball?\n<assistant>The little dog"
    (expected,) = served.llm.generate(prompt, SamplingParams(**GREEDY))
    body = {"messages": OPEN, "continue_final_message": True, **flag}
    found = served.post(CHAT, **body, **GREEDY).json()
    assert found["choices"][0]["message"]["content"] == expected.text
    assert found["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert served.post("/tokenize", **body).json()["tokens"] == expected.prompt_token_ids
    (output,) = served.llm.chat(OPEN, SamplingParams(**GREEDY), continue_final_message=True)
    assert output.token_ids == expected.token_ids
    ended = served.post("/tokenize", messages=OPEN, add_generation_prompt=False).json()["tokens"]
    assert ended == served.llm.encode(f"{prompt}\n")[0]


def test_a_prompt_keeps_its_last_tokens(served: Served) -> None:
    for prompt, path, body in (
        (PROMPT, COMPLETIONS, {"prompt": PROMPT}),
        (rendered(MESSAGES), CHAT, {"messages": MESSAGES}),
    ):
        tokens = served.llm.encode(prompt)[0]
        found = served.post(path, **body, **GREEDY, truncate_prompt_tokens=4, return_token_ids=True).json()
        cut = found.get("prompt_token_ids") or found["choices"][0]["prompt_token_ids"]
        assert cut == served.llm.encode(tokens if path == CHAT else prompt, 4)[0] and len(cut) == 4
    long = [5] * 5000
    assert served.post(COMPLETIONS, prompt=long, **GREEDY).status_code == 400
    found = served.post(COMPLETIONS, prompt=long, **GREEDY, truncate_prompt_tokens=-1).json()
    build = served.llm.bundle.config.build_config
    assert found["usage"]["prompt_tokens"] == min(build.max_input_len, build.max_request_len - 24)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"continue_final_message": True}, "continue_final_message"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ("/v1/responses", {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ("/v1/messages", {"allowed_token_ids": [5]}, None),
    ],
)
def test_what_cannot_be_is_refused(served: Served, path: str, fields: dict[str, Any], param: Any, said: Said) -> None:
    body: dict[str, Any] = {"max_tokens": 24}
    body |= {"prompt": PROMPT} if path == COMPLETIONS else {"messages": MESSAGES}
    body = {"input": "a"} if path == "/v1/responses" else body
    response = served.post(path, **body, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert next(iter(fields)) in error["message"] or param in error["message"]
    assert param is None or error["param"] == param
