"""The document of `bench`: the keys of `vllm bench serve`'s result (vllm/benchmarks/serve.py), settings, our head."""

import math
import re
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from commands.documents.records import Head, Positive, Record, absent, document_head
from commands.options.bench import BenchPrompts, BenchResults, BenchServer, BenchTraffic, Endpoint
from runtime.benchmark.load import LoadResult
from runtime.benchmark.objectives import Objective, parse_objectives
from runtime.benchmark.results import results as numbers_of
from runtime.config import Count, Size

Backend = Literal["openai", "openai-chat"]
_SUMMARY_KEY = r"^(mean|median|std|p[0-9.]+)_(ttft|tpot|itl|e2el)_ms$"


class BenchSettings(Record):
    """What the command was told."""

    base_url: str
    endpoint: Endpoint
    dataset: str
    output_len: Size
    num_warmups: Count
    seed: Count
    extra_body: dict[str, Any]
    goodput: dict[Objective, float] = Field(description="milliseconds by metric")
    metric_percentiles: list[int | float]


class BenchDocument(Head):
    """What `specdec bench --json` prints. Times in milliseconds have the key of a metric and how it is summed up, such
    as `p99_ttft_ms`; null where nothing was measured."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "patternProperties": {_SUMMARY_KEY: {"anyOf": [{"type": "number"}, {"type": "null"}]}},
            "additionalProperties": False,
        },
    )
    __pydantic_extra__: dict[str, float | None]

    command: Literal["bench"]
    date: str = Field(pattern=r"^\d{8}-\d{6}$", description="UTC, as 20260131-235959")
    endpoint_type: Backend
    backend: Backend
    label: None
    model_id: str
    tokenizer_id: None = Field(description="the server counts the tokens")
    num_prompts: Size
    request_rate: Literal["inf"] | Positive
    burstiness: Annotated[float, Field(ge=1, le=1)] = Field(description="arrivals are a Poisson process")
    max_concurrency: Size | None
    settings: BenchSettings
    duration: float = Field(description="seconds from the first request to the last answer")
    completed: Count
    failed: Count
    total_input_tokens: Count
    total_output_tokens: Count
    request_throughput: float
    request_goodput: float | None = Field(
        description="requests a second that met every objective; null where there are none"
    )
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float | None = Field(
        description="of the busiest second; a request's tokens are spread evenly over its chunks"
    )
    output_tokens_by_second: list[float] = Field(description="from when the first request was sent")
    max_concurrent_requests: Count
    spec_decode_source: Literal["responses", "prometheus"] | None = Field(
        description="where the server tells of its speculation; null where it does not, and then the other keys are "
        "missing"
    )
    spec_decode_num_drafts: Count = absent()
    spec_decode_draft_tokens: Count = absent()
    spec_decode_accepted_tokens: Count = absent()
    spec_decode_acceptance_rate: float | None = absent("percent")
    spec_decode_acceptance_length: float | None = absent()
    spec_decode_per_position_acceptance_rates: list[float] = absent("shares of all drafts")
    num_steps: Count = absent()
    tokens_per_step: float | None
    input_lens: list[Count] = Field(description="by request, in the order of arrival; so are those below")
    output_lens: list[Count]
    ttfts: list[float] = Field(description="seconds; 0 for a request that failed")
    itls: list[list[float]]
    latencies: list[float]
    start_times: list[float] = Field(description="seconds after the start")
    queue_times: list[float] = Field(description="seconds that a request waited here because of the concurrency")
    generated_texts: list[str]
    errors: list[str] = Field(description="empty where a request was answered")

    @model_validator(mode="after")
    def _check_summary_keys(self) -> "BenchDocument":
        for key in self.model_extra or {}:
            if not re.match(_SUMMARY_KEY, key):
                raise ValueError(f"{key} is no key of a summary")
        return self


def bench_document(
    result: LoadResult, server: BenchServer, prompts: BenchPrompts, traffic: BenchTraffic, results: BenchResults
) -> dict[str, Any]:
    backend: Backend = "openai" if server.endpoint == "completions" else "openai-chat"
    objectives = parse_objectives(results.goodput or [])
    document = BenchDocument(
        **document_head("bench"),
        date=datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        endpoint_type=backend,
        backend=backend,
        label=None,
        model_id=result.model,
        tokenizer_id=None,
        num_prompts=len(result.answers),
        request_rate="inf" if math.isinf(traffic.request_rate) else traffic.request_rate,
        burstiness=1.0,
        max_concurrency=traffic.concurrency,
        settings=BenchSettings(
            base_url=server.base_url,
            endpoint=server.endpoint,
            dataset=prompts.source,
            output_len=traffic.output_len,
            num_warmups=traffic.num_warmups,
            seed=traffic.seed,
            extra_body=traffic.extra,
            goodput=objectives,
            metric_percentiles=list(results.percentiles),
        ),
        **numbers_of(result, objectives, results.percentiles),
    )
    return document.as_json()
