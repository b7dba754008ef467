"""Chat: the assistant's messages by the tokenizer's template, and what clients of it read."""

from typing import Any

import pytest
from jinja2 import Template
from sentences import Said
from serving_models import TEMPLATE, Served

from runtime.core.params import SamplingParams

CHAT = "/v1/chat/completions"
MESSAGES = [
    {"role": "system", "content": "You are little."},
    {"role": "user", "content": "Who found the ball?"},
    {"role": "assistant", "content": "The dog."},
    {"role": "user", "content": "Who lost the ball?"},
]
GREEDY: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": 30, "ignore_eos": True}


def rendered(messages: list[dict[str, Any]]) -> str:
    return Template(TEMPLATE).render(messages=messages, add_generation_prompt=True)


def chat(served: Served, **body: Any) -> dict[str, Any]:
    response = served.post(CHAT, **(GREEDY | body))
    assert response.status_code == 200, response.text
    return response.json()


def test_a_message_is_what_the_model_says_after_the_rendered_conversation(served: Served) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    (expected,) = served.llm.generate(rendered(MESSAGES), params)
    found = chat(served)
    (choice,) = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert choice["finish_reason"] == "length"
    assert found["object"] == "chat.completion" and found["model"] == "tiny"
    assert found["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    as_parts = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in MESSAGES]
    assert chat(served, messages=as_parts)["choices"] == found["choices"]
    developer = [MESSAGES[0] | {"role": "developer"}, *MESSAGES[1:]]
    assert chat(served, messages=developer)["choices"] == found["choices"]


def test_special_tokens_in_messages_can_be_refused(served: Served, make_served: Any) -> None:
    """The default is that a text's `</s>` becomes the token, as in other servers."""
    strict = make_served(None, refuse_special_tokens=True)
    for body in (
        {"messages": [{"role": "user", "content": "a</s>b"}]},
        {"messages": [{"role": "assistant", "content": "a", "reasoning_content": "</s>"}, MESSAGES[3]]},
        {"messages": MESSAGES, "chat_template_kwargs": {"name": ["<s>"]}},
    ):
        assert served.post(CHAT, **body, max_tokens=1).status_code == 200
        refused = strict.post(CHAT, **body, max_tokens=1)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "special_token"
    assert strict.post(CHAT, messages=MESSAGES, max_tokens=1).status_code == 200  # the template's own are no text


@pytest.mark.parametrize(
    "said",
    [
        {"content": [{"type": "text", "text": "The "}, {"type": "refusal", "refusal": "dog."}]},
        {"content": None, "refusal": "The dog."},
    ],
)
def test_what_the_assistant_refused_is_what_it_said(served: Served, said: dict[str, Any]) -> None:
    """OpenAI's clients send back a message with a refusal like this."""
    messages = [*MESSAGES[:2], {"role": "assistant", **said}, MESSAGES[3]]
    assert chat(served, messages=messages)["choices"] == chat(served)["choices"]


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ({"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}, "refusal"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": 5}]}, "refusal"),
    ],
)
def test_a_refusal_is_an_assistants_text(served: Served, message: dict[str, Any], name: str, said: Said) -> None:
    response = served.post(CHAT, messages=[message, MESSAGES[3]])
    assert response.status_code == 400
    said(response.json()["error"]["message"], "messages.0", f"`{name}`" if message["role"] != "assistant" else name)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}])
def test_a_stream_of_chat_joins_to_the_message(served: Served, sampling: dict[str, Any]) -> None:
    whole = chat(served, n=2, **sampling)
    chunks = served.stream(CHAT, **(GREEDY | sampling), n=2, stream_options={"include_usage": True})
    texts = ["", ""]
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        assert chunk["object"] == "chat.completion.chunk"
        texts[choice["index"]] += choice["delta"]["content"]
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks[:3]] == ["assistant", "assistant", None]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 60


def test_logprobs_of_chat_have_tokens_and_their_bytes(served: Served) -> None:
    found = chat(served, logprobs=True, top_logprobs=2, max_tokens=12)["choices"][0]
    entries = found["logprobs"]["content"]
    assert len(entries) == 12 and all(len(entry["top_logprobs"]) == 2 for entry in entries)
    for entry in entries:
        assert entry["logprob"] == pytest.approx(entry["top_logprobs"][0]["logprob"])  # greedy: its own is the best
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
    streamed = served.stream(CHAT, **(GREEDY | {"max_tokens": 12}), logprobs=True, top_logprobs=2)
    again = [
        entry
        for chunk in streamed
        if chunk["choices"][0]["logprobs"]
        for entry in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert again == entries
