"""Structured output over HTTP: answers are of the form that any of the fields asks for."""

import http.client
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import jsonschema
import psutil
import pytest
from serving_models import Listening, Served
from waiting import HANG_S, wait_until

from scripts.campaigns.hostile_forms import attack, politely

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["dog", "ball"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
OF_SCHEMA: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
    {"structured_outputs": {"json": SCHEMA, "regex": None, "whitespace_pattern": None}},
    {"guided_json": SCHEMA},
    {"json_schema": SCHEMA, "grammar": ""},
]


def asked(path: str, form: dict[str, Any]) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "Who?"}]} if path == CHAT else {"prompt": "The dog"}
    return {**prompt, "temperature": 1.0, "seed": 1, "max_tokens": 80, **form}


def text_of(served: Served, path: str, form: dict[str, Any]) -> str:
    response = served.post(path, **asked(path, form))
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"] if path == CHAT else choice["text"]


@pytest.mark.parametrize("form", OF_SCHEMA, ids=lambda form: "+".join(form))
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_answers_are_valid_by_the_schema(served: Served, path: str, form: dict[str, Any]) -> None:
    jsonschema.validate(json.loads(text_of(served, path, form)), SCHEMA)


@pytest.mark.parametrize("speculative", [None, False, {"suffix_config": 4}, {"ngram_config": [4, 2], "draft_len": 2}])
def test_text_does_not_depend_on_drafts_or_streaming(served: Served, speculative: Any) -> None:
    form = {"guided_json": SCHEMA, "speculative": speculative}
    expected = text_of(served, COMPLETIONS, {"guided_json": SCHEMA})
    assert text_of(served, COMPLETIONS, form) == expected
    assert text_of(served, COMPLETIONS, form | {"prediction": {"type": "content", "content": expected}}) == expected
    chunks = served.stream(COMPLETIONS, **asked(COMPLETIONS, form))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected


def test_nobody_waits_for_a_form_that_takes_long(make_listening: Callable[..., Listening]) -> None:
    """The process in which forms are compiled stands still: their requests wait, and no others; not for a form that
    was compiled before either."""
    listening = make_listening(drafter=None)
    known = {"prompt": "The", "max_tokens": 4, "guided_regex": "[ab]{2}"}

    def post(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", listening.port, timeout=HANG_S)
        with closing(connection):
            connection.request("POST", COMPLETIONS, json.dumps(body))
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    assert post(known)[0] == 200
    prover = listening.model.llm.grammars._prover
    assert prover is not None
    process = psutil.Process(prover.pid)
    process.suspend()
    children = process.children()  # forked for the next form
    for child in children:
        child.suspend()
    try:
        with ThreadPoolExecutor(3) as threads:
            waiting = [
                threads.submit(post, {"prompt": "The", "max_tokens": 4, "guided_json": {"multipleOf": multiple}})
                for multiple in (7, 99_999_989)
            ]
            wait_until(lambda: listening.model.llm.grammars._num_compiling == 2)
            assert post({"prompt": "The", "max_tokens": 3})[0] == 200
            assert post(known)[0] == 200
            assert not any(one.done() for one in waiting)
            for stopped in (*children, process):
                stopped.resume()
            harmless, (status, answer) = (one.result() for one in waiting)
    finally:
        for stopped in (*children, process):
            with suppress(psutil.NoSuchProcess):
                stopped.resume()
    assert (harmless[0], status) == (200, 400)
    assert answer["error"]["param"] == "guided_json" and "takes more than" in answer["error"]["message"]


def test_too_many_forms_are_a_503(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.core.grammar.MOST_COMPILING", 0)
    for path, form in [
        (COMPLETIONS, {"guided_regex": "[xy]{5}"}),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 5}}}}),
    ]:
        refused = served.post(path, **asked(path, form))
        assert refused.status_code == 503 and refused.headers["Retry-After"]
        assert refused.json()["error"]["code"] == "forms_busy"


def test_hostile_forms_leave_a_server_that_answers(
    make_listening: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of scripts/campaigns/hostile_forms.py, one of each kind, beside a polite client."""
    monkeypatch.setattr("runtime.core.form_prover.MOST_S", 0.1)
    listening = make_listening(drafter=None)
    found: list[tuple[Any, list[str]]] = []
    waits = politely(listening.port, lambda: found.append(attack(listening.port, range(10), 4)))
    (counts, wrong), *_ = found
    assert wrong == [] and waits.failures == []
    assert counts.total() == 10 and counts[400] > 1 and counts[200] > 1 and waits.seconds
    assert not listening.model.loop.unfinished() and listening.model.loop.takes_requests
    assert listening.model.llm.grammars._num_compiling == listening.model.llm.grammars._num_slow == 0
