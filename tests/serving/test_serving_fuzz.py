"""Bodies of any kind are answered, or refused by a status of the user's: never 5xx, never a hang."""

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving_models import PROMPT, MakeServed, Served
from strength import CHARACTERS, examples

from commands.serve.protocol.schema import (
    REFUSED,
    ChatRequest,
    CompletionRequest,
    CountRequest,
    DetokenizeRequest,
    MessagesRequest,
    ResponsesRequest,
    TokenizeRequest,
)

MODELS = {
    "/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest, "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest, "/v1/messages/count_tokens": CountRequest, "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}  # fmt: skip
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a ball"}], "max_tokens": 3},
    "/v1/responses": {"input": "a ball", "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "a ball"}], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a ball"}]},
    "/tokenize": {"prompt": PROMPT},
    "/detokenize": {"tokens": [5, 6]},
}
TEXT_PART = {"type": "text", "text": "a"}
ODD = [
    None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, 2**31, 2**63, -(2**63), 10**30,
    "", "a", "\u0000", "\U0001f642" * 9, "required",
    [], {}, [[]], [None], [0], [-1], [[0]], ["a"], ["a", 0], {"": 0}, {"0": 1, "5": -100},
    {"type": "text"}, {"type": "any"}, {"type": "content", "content": "a b"},
    {"ngram_config": "3,2"}, {"ngram_config": "[3,2"}, {"suffix_config": [2, [0]]}, {"draft_len": 0},
    {"include_usage": True},
    [{"role": "user", "content": None}], [{"role": "assistant", "content": [TEXT_PART]}],
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    [{"type": "function", "name": "f", "parameters": {"$ref": "#"}}],
    [{"name": "f", "input_schema": {"type": "object"}}],
    [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}],
]  # fmt: skip
values = st.one_of(
    st.sampled_from(ODD),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_subnormal=False) | st.text(CHARACTERS, max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(CHARACTERS, max_size=8), inner, max_size=3),
        max_leaves=6,
    ),
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path, and a body that was right before some of its fields got other values."""
    path = draw(st.sampled_from(sorted(MODELS)))
    names = sorted({*MODELS[path].model_fields, *REFUSED, "foreign"})
    changes = draw(st.dictionaries(st.sampled_from(names), values, max_size=4))
    raw = json.dumps(VALID[path] | changes).encode()
    if draw(st.integers(0, 9)) == 0:
        cut = draw(st.integers(0, len(raw)))
        raw = raw[:cut] + draw(st.binary(max_size=4)) + raw[cut + draw(st.integers(0, 4)) :]
    return path, raw


def test_any_body_is_answered_or_refused_and_the_server_is_whole(served: Served, make_served: MakeServed) -> None:
    """Afterwards the server's answers and its cache have nothing of the bodies."""

    @settings(max_examples=examples(2000), deadline=None, suppress_health_check=list(HealthCheck))
    @given(bodies())
    def send(body: tuple[str, bytes]) -> None:
        path, raw = body
        response = served.client.post(path, content=raw)
        assert response.status_code in (200, 400, 404, 413), response.text
        if response.status_code != 200:
            assert response.json()["error"]["message"]

    send()
    assert not served.model.loop.unfinished() and served.model.loop.takes_requests
    fresh = make_served(None)
    for prompt in (PROMPT, "the ball the ball"):
        found = served.complete(prompt=prompt, max_tokens=20, ignore_eos=True)
        assert found["choices"] == fresh.complete(prompt=prompt, max_tokens=20, ignore_eos=True)["choices"]
    assert served.num_free_blocks == served.llm.engine._blocks.num_blocks - 1
