"""The document of `bench`: the keys of `vllm bench serve`'s result (vllm/benchmarks/serve.py), settings, our head."""

import math
from datetime import UTC, datetime
from typing import Any

from commands.documents.head import document_head
from commands.options.bench import BenchPrompts, BenchResults, BenchServer, BenchTraffic
from runtime.benchmark.load import LoadResult
from runtime.benchmark.objectives import parse_objectives
from runtime.benchmark.results import results as numbers_of


def bench_document(
    result: LoadResult, server: BenchServer, prompts: BenchPrompts, traffic: BenchTraffic, results: BenchResults
) -> dict[str, Any]:
    backend = {"completions": "openai", "chat": "openai-chat"}[server.endpoint]
    objectives = parse_objectives(results.goodput or [])
    return {
        **document_head("bench"),
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": backend,
        "backend": backend,
        "label": None,
        "model_id": result.model,
        "tokenizer_id": None,
        "num_prompts": len(result.answers),
        "request_rate": "inf" if math.isinf(traffic.request_rate) else traffic.request_rate,
        "burstiness": 1.0,
        "max_concurrency": traffic.concurrency,
        "settings": {
            "base_url": server.base_url,
            "endpoint": server.endpoint,
            "dataset": prompts.source,
            "output_len": traffic.output_len,
            "num_warmups": traffic.num_warmups,
            "seed": traffic.seed,
            "extra_body": traffic.extra,
            "goodput": objectives,
            "metric_percentiles": results.percentiles,
        },
        **numbers_of(result, objectives, results.percentiles),
    }
