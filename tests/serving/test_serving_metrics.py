"""Facts that the server tells of itself: metrics by vLLM's names, its model, its tokens, its requests."""

import json
import re
from pathlib import Path
from typing import Any

from gate import Gate
from jsonschema import Draft202012Validator
from prometheus_client.parser import text_string_to_metric_families
from serving_models import PROMPT, WAITS, MakeServed, Served
from waiting import wait_until

from commands.serve.protocol.asking import ask_completion
from commands.serve.protocol.schema import CompletionRequest
from runtime.drafters.specs import NgramDrafter


def samples(served: Served) -> dict[str, float]:
    """Name and labels but the model's -> value."""
    found = {}
    for family in text_string_to_metric_families(served.client.get("/metrics").text):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "tiny"
            if "_bucket" not in sample.name and "_created" not in sample.name:
                found[sample.name + ",".join(f"{k}={v}" for k, v in sample.labels.items())] = sample.value
    return found


def test_counters_are_the_sums_of_what_answers_said(make_served: MakeServed) -> None:
    served = make_served(NgramDrafter(4, 2))
    assert set(samples(served).values()) <= {0}
    prompts = [PROMPT, "the ball the ball the ball the ball", "little little little little"]
    found = [served.complete(prompt=prompt, max_tokens=40, ignore_eos=True) for prompt in prompts]
    served.stream(prompt=prompts[1], max_tokens=40, ignore_eos=True, temperature=0)
    found.append(found[1])
    told, speculation = samples(served), [one["metrics"]["speculative_decoding"] for one in found]
    assert told["vllm:prompt_tokens_total"] == sum(one["usage"]["prompt_tokens"] for one in found)
    assert told["vllm:generation_tokens_total"] == 160
    for name, key in (
        ("num_drafts", "num_drafts"),
        ("num_draft_tokens", "num_draft_tokens"),
        ("num_accepted_tokens", "num_accepted_tokens"),
    ):
        assert told[f"vllm:spec_decode_{name}_total"] == sum(one[key] for one in speculation) > 0
    for position in range(4):
        counts = [one["accepted_per_position"] for one in speculation]
        expected = sum(one[position] for one in counts if position < len(one))
        assert told[f"vllm:spec_decode_num_accepted_tokens_per_pos_totalposition={position}"] == expected
    for histogram in ("time_to_first_token", "time_per_output_token", "e2e_request_latency"):
        assert told[f"vllm:{histogram}_seconds_count"] == 4
        assert told[f"vllm:{histogram}_seconds_sum"] > 0
    assert told["vllm:request_success_totalfinished_reason=length"] == 4
    assert told["vllm:num_requests_running"] == told["vllm:num_requests_waiting"] == 0
    assert told["vllm:kv_cache_usage_perc"] == 0


def test_the_model_is_told_as_clients_ask_for_it(served: Served) -> None:
    for path in ("/v1/models", "/models"):
        data = served.client.get(path).json()
        assert data["object"] == "list" and [one["id"] for one in data["data"]] == ["tiny", "tiny-alias"]
        assert data["data"][0]["root"] == "tiny" and data["data"][0]["max_model_len"] == 160
    assert served.client.get("/v1/models/tiny").json()["id"] == "tiny"
    assert served.client.get("/health").status_code == 200
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", served.client.get("/version").json()["version"])


def test_texts_and_tokens_go_both_ways(served: Served) -> None:
    expected = served.llm.encode(PROMPT)[0]
    found = served.post("/tokenize", prompt=PROMPT).json()
    assert found["tokens"] == expected and found["count"] == len(expected) and found["max_model_len"] == 160
    assert served.post("/detokenize", tokens=expected).json() == {"prompt": PROMPT}
    strings = served.post("/tokenize", prompt=PROMPT, add_special_tokens=False, return_token_strs=True).json()
    assert "".join(strings["token_strs"]) == PROMPT
    conversation = [{"role": "user", "content": "a ball"}]
    assert (
        served.post("/tokenize", messages=conversation).json()["tokens"]
        == served.llm.encode("<user>a ball\n<assistant>")[0]
    )
    assert served.post("/tokenize").status_code == served.post("/detokenize", tokens=[10**6]).status_code == 400


def test_tokenizer_info_has_what_clients_probe_for(served: Served) -> None:
    info: dict[str, Any] = served.client.get("/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"], info["pad_token"]) == ("</s>", "<s>", "<pad>")
    assert "<assistant>" in info["chat_template"]


def test_requests_on_their_way_are_listed(make_served: MakeServed, gate: Gate) -> None:
    served = make_served(WAITS)
    assert served.client.get("/requests").json() == {"data": []}
    body = CompletionRequest(prompt=PROMPT, max_tokens=120, ignore_eos=True, n=8)
    answers = served.model.loop.submit(ask_completion(served.model, body))
    wait_until(lambda: gate.is_reached)
    data = served.client.get("/requests").json()["data"]
    served.model.loop.cancel(answers)
    gate.open()
    assert len(data) == 8
    assert {*data[0]} == {"id", "prompt_tokens", "completion_tokens", "tokens_per_step", "running_s"}
    assert data[0]["prompt_tokens"] == len(served.llm.encode(PROMPT)[0])


def test_the_page_may_run_nothing_that_is_not_in_it(served: Served) -> None:
    response = served.client.get("/")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert "http://" not in policy and "https://" not in policy


def test_openapi_says_what_is_asked_and_answered(served: Served) -> None:
    text = served.client.get("/openapi.json").text
    schema = json.loads(text)
    assert schema["components"]["schemas"]["ChatRequest"]["properties"]
    assert {*re.findall(r'"#/components/schemas/(\w+)"', text)} <= {*schema["components"]["schemas"]}
    assert "422" not in str(schema) and "HTTPValidationError" not in schema["components"]["schemas"]
    for path in ("/v1/completions", "/v1/chat/completions"):
        responses = schema["paths"][path]["post"]["responses"]
        assert set(responses) == {"200", "400", "401", "403", "404", "408", "413", "429", "500", "503", "504"}
        assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
        assert responses["400"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Error"}
    errors = served.client.get("/v1/models/nobody"), served.client.post("/v1/messages", json={})
    for error, name in zip(errors, ("Error", "AnthropicError"), strict=True):
        Draft202012Validator({"$ref": f"#/components/schemas/{name}"} | schema).validate(error.json())
        assert set(schema["components"]["schemas"][f"{name}Words"]["properties"]) == set(error.json()["error"])
    assert "404" in schema["paths"]["/v1/models/{name}"]["get"]["responses"]
    assert schema["paths"]["/health"]["get"]["security"] == []
    (kind,) = schema["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    assert served.client.get("/metrics").headers["content-type"].startswith(kind)
    (scheme,) = schema["components"]["securitySchemes"].values()
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")


def test_the_chapter_names_every_route_and_field_and_no_other(served: Served) -> None:
    chapter = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    schema = served.client.get("/openapi.json").json()
    routes = {f"{method.upper()} {path}" for path, methods in schema["paths"].items() for method in methods}
    table = chapter.partition("## Routes")[2].partition("## Fields")[0]
    assert set(re.findall(r"`((?:GET|POST|DELETE) [^`]*)`", table)) - {"GET /openapi.json"} == routes
    fields: dict[str, set[str]] = {"completions": set(), "chat": set()}
    for row in chapter.partition("## Fields")[2].partition("## What speculation")[0].splitlines():
        if cells := re.match(r"\| (`.*?`) \| (.*?) \|", row):
            for part in cells[2].split("; "):  # `completions, chat, messages`, or `top_logprobs` in chat
                names, _, bodies = part.rpartition(" in ")
                for body, found in fields.items():
                    if bodies in ("all", "both") or body in bodies.split(", "):
                        found |= set(re.findall(r"`(\w+)`", names or cells[1]))
    described = schema["components"]["schemas"]
    assert fields == {
        "completions": set(described["CompletionRequest"]["properties"]),
        "chat": set(described["ChatRequest"]["properties"]),
    }
