"""Documents about the server itself: openapi.json, the page to try the model, and Prometheus metrics."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic.json_schema import models_json_schema

from commands.serve.errors import ANTHROPIC_PATH
from commands.serve.protocol import response_models
from commands.serve.protocol import schema as body_models
from runtime.core.scopes import KINDS
from runtime.loop.serving import RequestHandle, ServingLoop

_STATUSES = {
    400: "the request is invalid or too long",
    401: "no key, or a wrong one",
    403: "a page of a foreign origin",
    404: "another model",
    408: "the body did not come in time",
    413: "the body is too long",
    429: "the client has as many requests on their way as it may have",
    500: "a step failed",
    503: "the queue is full, or the server shuts down",
    504: "it took too long",
}
_TEXT = {"type": "string"}
_NULLABLE = {"anyOf": [_TEXT, {"type": "null"}]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": _TEXT, "type": _TEXT, "param": _NULLABLE, "code": _NULLABLE},
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"message": _TEXT, "type": _TEXT},
        },
    },
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI description of the error responses with these statuses."""
    return {status: {"description": _STATUSES[status], "content": _json_of("Error")} for status in statuses}


def answers(model: type[Any]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI description of the response of a route that generates: a document, or a stream of events."""
    content = _json_of(model.__name__) | {"text/event-stream": {"schema": _TEXT}}
    return {200: {"description": "the answer, whole or in a stream", "content": content}}


def body_of(model: type[Any]) -> dict[str, Any]:
    """OpenAPI description of a body that the route parses by hand."""
    return {"requestBody": {"required": True, "content": _json_of(model.__name__)}}


def _json_of(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def openapi_schema(app: FastAPI) -> dict[str, Any]:
    """FastAPI's OpenAPI document, with the parts added that FastAPI does not know."""
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            operation["responses"].pop("422", None)  # FastAPI's own form of errors, which is never sent
            # A server without a key asks for none.
            operation["security"] = [{}, {"key": []}] if "401" in operation["responses"] else []
            for status, response in operation["responses"].items():
                if path.startswith(ANTHROPIC_PATH) and int(status) >= 400:
                    response["content"] = _json_of("AnthropicError")
    own = {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    named = sorted(set(re.findall(r"#/components/schemas/(\w+)", json.dumps(schema["paths"]))) - own.keys())
    found = [getattr(response_models, name, None) or getattr(body_models, name) for name in named]
    models: list[tuple[type[Any], Any]] = [(model, "validation") for model in found]
    described = models_json_schema(models, ref_template="#/components/schemas/{model}")[1]
    key = {"type": "http", "scheme": "bearer"}
    schema["components"] = {"schemas": described["$defs"] | own, "securitySchemes": {"key": key}}
    return schema


_INLINE = re.compile(r"<(script|style)[^>]*>(.*?)</\1>", re.DOTALL | re.IGNORECASE)


def page_response() -> HTMLResponse:
    """The page to try the model. Its own scripts and styles are allowed by their digests."""
    html = (files("commands.serve") / "page.html").read_text(encoding="utf-8")
    digests: dict[str, list[str]] = {"script": [], "style": []}
    for kind, content in _INLINE.findall(html):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        digests[kind.lower()].append(f"'sha256-{digest}'")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(digests['script'])}",
            f"style-src {' '.join(digests['style'])}",
            "connect-src 'self'",
            "img-src 'self' data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )
    headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
    return HTMLResponse(html, headers=headers | {"X-Content-Type-Options": "nosniff"})


_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_E2E_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 600.0)


_CLIENT_CLASSES = ("idle", "few", "many")


def _client_class(num_before: int, max_batch_size: int) -> str:
    """Class of a client by its number of running or waiting sequences: none, fewer than run at once, or as many."""
    return "idle" if num_before == 0 else "few" if num_before < max_batch_size else "many"


class ServerMetrics:
    """All metrics that `/metrics` shows of a model, by vLLM's names. Counters are the loop's own, so nothing is counted
    twice.
    """

    def __init__(self, loop: ServingLoop, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_LoopCollector(loop, model_name))

        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(f"vllm:{name}", help_text, ["model_name"], registry=self._registry, buckets=buckets)
            return metric.labels(model_name)

        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.", _TTFT_S)
        by_class = Histogram(
            "specdec:client_time_to_first_token_seconds",
            "From arrival to the first token, by how many sequences of the client were on their way at the arrival.",
            ["model_name", "client_class"],
            registry=self._registry,
            buckets=_TTFT_S,
        )
        self._ttft_of = {one: by_class.labels(model_name, one) for one in _CLIENT_CLASSES}
        self._max_batch_size = loop.engine.max_batch_size
        self._tpot = histogram("time_per_output_token_seconds", "Between the first token and the last.", _TPOT_S)
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the end.", _E2E_S)

    def observe(self, answer: RequestHandle) -> None:
        """Record the times of an answer when it has ended."""
        if answer.progress.finish_reason is None:
            return
        stats = answer.sequence.stats
        for metric, value in ((self._ttft, stats.ttft_s), (self._tpot, stats.tpot_s), (self._e2e, stats.latency_s)):
            if value is not None:
                metric.observe(value)
        if stats.ttft_s is not None:
            self._ttft_of[_client_class(answer.num_before, self._max_batch_size)].observe(stats.ttft_s)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _LoopCollector(Collector):
    def __init__(self, loop: ServingLoop, model_name: str) -> None:
        self._loop, self._model_name = loop, model_name

    def collect(self) -> Iterator[Metric]:
        loop, totals = self._loop, self._loop.totals
        gauges = (
            ("vllm:num_requests_running", "Sequences in the running batch.", loop.num_running),
            ("vllm:num_requests_waiting", "Sequences that wait to join it.", loop.num_waiting),
            ("specdec:num_clients", "Clients with sequences on their way.", loop.num_clients),
            (
                "vllm:kv_cache_usage_perc",
                "Share of the K/V cache that sequences hold, 1 is all.",
                loop.engine.cache_usage,
            ),
            ("vllm:gpu_cache_usage_perc", "The same by its former name.", loop.engine.cache_usage),
        )
        for name, help_text, value in gauges:
            yield self._filled(GaugeMetricFamily(name, help_text, labels=["model_name"]), {(): value})
        prompts = loop.engine.prompt_tokens
        counters = (
            ("vllm:prompt_tokens", "Prompt tokens of requests that got their first token.", totals.num_prompt_tokens),
            ("vllm:generation_tokens", "Generated tokens.", totals.num_generated_tokens),
            ("specdec:prompt_tokens_in_memory", "Prompt tokens found in the K/V cache.", prompts.num_in_memory),
            ("specdec:prompt_tokens_on_disk", "Prompt tokens found in K/V on disk.", prompts.num_on_disk),
            ("specdec:prompt_tokens_computed", "Prompt tokens found in neither.", prompts.num_computed),
            ("vllm:num_preemptions", "How often a sequence gave its K/V blocks back for others.", loop.num_preemptions),
            ("specdec:num_turns", "How often a running sequence made room for another one's turn.", loop.num_turns),
            ("vllm:spec_decode_num_drafts", "Steps with a draft.", totals.num_drafts),
            ("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", totals.num_draft_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were kept.", totals.num_accepted_tokens),
        )
        for name, help_text, value in counters:
            yield self._filled(CounterMetricFamily(name, help_text, labels=["model_name"]), {(): value})
        per_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were kept, by their place in the draft.",
            labels=["model_name", "position"],
        )
        yield self._filled(per_position, {(str(i),): n for i, n in enumerate(list(totals.num_accepted_per_position))})
        if (pools := loop.owner_pools) is not None:
            what = "Pools of earlier outputs, by what their requests have in common."
            of_kinds = (
                ("specdec:num_pools", what, pools.num_pools),
                ("specdec:num_pool_tokens", "Tokens in these pools.", pools.num_tokens),
            )
            for name, help_text, counts in of_kinds:
                gauge = GaugeMetricFamily(name, help_text, labels=["model_name", "scope"])
                yield self._filled(gauge, {(kind,): counts[kind] for kind in KINDS})
        ended = CounterMetricFamily(
            "vllm:request_success", "Sequences that ended.", labels=["model_name", "finished_reason"]
        )
        yield self._filled(ended, {(reason,): n for reason, n in list(totals.num_finished.items())})

    def _filled(
        self, family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[tuple[str, ...], float]
    ) -> Metric:
        """The metric with these values, by their labels after the model's name."""
        for labels, value in values.items():
            family.add_metric([self._model_name, *labels], value)
        return family
