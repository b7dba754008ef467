"""Clients over HTTP: who they are, what each may have on its way, and what is told of them."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from gate import Gate
from sentences import Said
from serving_models import PROMPT, WAITS, MakeServed, Served
from test_serving_metrics import samples
from waiting import wait_until

from commands.serve.http.clients import client_of, with_key
from runtime.engine.engine import KVCacheConfig
from runtime.loop.serving import RequestHandle

COMPLETIONS = "/v1/completions"
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "ball"}]
CLASSES = ("idle", "few", "many")
LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 100, "ignore_eos": True, "temperature": 0}


def client(key: bytes = b"", user: str | None = None, address: str = "1.2.3.4", *, is_apart: bool = False) -> bytes:
    return client_of(with_key({"client": (address, 5000)}, key, num_keys=2 if is_apart else 0), user)


def test_clients_are_told_apart_by_key_then_user_then_address() -> None:
    assert client(b"a", "x", is_apart=True) == client(b"a", "y", "5.6.7.8", is_apart=True)
    assert client(b"a", "x", is_apart=True) != client(b"b", "x", is_apart=True)
    assert client(b"", "x") == client(b"", "x", "5.6.7.8") != client(b"", "y")
    assert client(b"none", "x") != client(b"none", "y")
    assert client() == client() != client(address="5.6.7.8")
    assert len({client(), client(user="1.2.3.4"), client(b"1.2.3.4"), client(b"a", "b"), client(b"", "ab")}) == 5
    assert client(user="\ud800") and len(client(user="x" * 10**6)) == 16


def in_thread(served: Served, num: int, body: dict[str, Any], **headers: str) -> list[Any]:
    """Requests on their way, which wait at the gate."""
    pool = ThreadPoolExecutor(num)
    sent = [pool.submit(served.client.post, COMPLETIONS, json=body, headers=headers) for _ in range(num)]
    pool.shutdown(wait=False)
    return sent


def test_further_requests_of_a_client_are_refused_and_not_anothers(
    make_served: MakeServed, gate: Gate, said: Said
) -> None:
    served = make_served(WAITS, max_requests_per_client=2)
    sent = in_thread(served, 2, LONG | {"user": "many", "n": 2})
    wait_until(lambda: len(served.model.loop.unfinished()) == 4 and gate.is_reached)
    refused = served.post(COMPLETIONS, **LONG, user="many")
    as_message = served.client.post(
        "/v1/messages", json={"messages": MESSAGES, "max_tokens": 2, "metadata": {"user_id": "many"}}
    )
    others = in_thread(served, 1, LONG | {"user": "polite"})
    wait_until(lambda: len(served.model.loop.unfinished()) == 5)
    gate.open()
    assert refused.status_code == as_message.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "too_many_requests")
    said(error["message"], 2)
    assert as_message.json()["error"]["type"] == "rate_limit_error"
    assert [one.result().status_code for one in (*sent, *others)] == [200, 200, 200]
    assert served.post(COMPLETIONS, **(LONG | {"max_tokens": 1}), user="many").status_code == 200


def test_keys_that_are_several_are_clients(make_served: MakeServed, gate: Gate) -> None:
    served = make_served(WAITS, api_key="one,two", max_requests_per_client=1)
    sent = in_thread(served, 1, LONG | {"user": "a"}, Authorization="Bearer one")
    wait_until(lambda: gate.is_reached)
    again = served.client.post(COMPLETIONS, json=LONG | {"user": "b"}, headers={"x-api-key": "one"})
    wrong = served.client.post(COMPLETIONS, json=LONG, headers={"Authorization": "Bearer one,two"})
    other = in_thread(served, 1, LONG | {"user": "a"}, Authorization="Bearer two")
    wait_until(lambda: len(served.model.loop.unfinished()) == 2)
    gate.open()
    assert (again.status_code, wrong.status_code) == (429, 401)
    assert [one.result().status_code for one in (*sent, *other)] == [200, 200]


def test_client_that_fills_the_queue_leaves_room_for_others(make_served: MakeServed, gate: Gate) -> None:
    served = make_served(WAITS, max_queue_len=4)
    many = in_thread(served, 1, LONG | {"user": "many", "n": 8})
    wait_until(lambda: len(served.model.loop.unfinished()) == 8 and gate.is_reached)
    refused = served.post(COMPLETIONS, **LONG, user="many")
    polite = [in_thread(served, 1, LONG | {"user": f"polite {i}"})[0] for i in range(4)]
    wait_until(lambda: len(served.model.loop.unfinished()) == 12)
    beyond = served.post(COMPLETIONS, **LONG, user="polite 5")
    gate.open()
    assert (refused.status_code, beyond.status_code) == (503, 503)
    assert [one.result().status_code for one in (*many, *polite)] == [200] * 5
    assert samples(served)["specdec:num_turns_total"] == served.model.loop.num_turns > 0


def test_priority_of_a_request_reaches_the_loop(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, object]] = []
    submit = served.model.loop.submit

    def note(asked: Any, owner: object = None, client: object = None) -> list[RequestHandle]:
        seen.extend((one.priority, client) for one in asked)
        return submit(asked, owner, client)

    monkeypatch.setattr(served.model.loop, "submit", note)
    for path, body in (
        (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1, "priority": -3, "user": "a"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1, "priority": 4}),
        ("/v1/responses", {"input": "ball", "max_output_tokens": 1, "priority": 5, "user": "a"}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, "priority": None}),
    ):
        response = served.client.post(path, json=body)
        assert response.status_code == 200, response.text
    assert [priority for priority, _ in seen] == [-3, 4, 5, 0]
    assert seen[0][1] == seen[2][1] != seen[1][1]


def test_metrics_tell_of_classes_and_name_nobody(make_served: MakeServed) -> None:
    served = make_served(None)
    names = ["somebody-by-name", "10.20.30.40"]
    for name in names:
        served.complete(max_tokens=4, ignore_eos=True, user=name, n=6)
    told = samples(served)
    counted = {one: told[f"specdec:client_time_to_first_token_seconds_countclient_class={one}"] for one in CLASSES}
    assert counted == {"idle": 12, "few": 0, "many": 0}
    assert told["specdec:num_clients"] == told["specdec:num_turns_total"] == told["vllm:num_preemptions_total"] == 0
    crowded = make_served(None, kv_cache=KVCacheConfig(max_tokens=100))
    crowded.complete(max_tokens=60, ignore_eos=True, n=4)
    assert samples(crowded)["vllm:num_preemptions_total"] == crowded.model.loop.num_preemptions > 0
    shown = served.client.get("/metrics").text + served.client.get("/requests").text
    assert not any(name in shown for name in names)


def test_classes_are_by_what_was_on_its_way(make_served: MakeServed, gate: Gate) -> None:
    served = make_served(WAITS)
    sent: list[Any] = []

    def have_come() -> bool:
        return len(served.model.loop.unfinished()) == len(sent)

    for _ in range(6):
        sent += in_thread(served, 1, LONG | {"user": "one"})
        wait_until(have_come)
    wait_until(lambda: gate.is_reached)
    assert samples(served)["specdec:num_clients"] == 1
    gate.open()
    assert [one.result().status_code for one in sent] == [200] * 6
    told = samples(served)
    counted = [told[f"specdec:client_time_to_first_token_seconds_countclient_class={one}"] for one in CLASSES]
    assert counted == [1, 3, 2]
