"""The numbers of a benchmark, under the keys of `vllm bench serve` (vllm/benchmarks/serve.py, `benchmark`).

Two things are counted otherwise than there. A chat's first chunk, which names the role and carries no text, is no
token. And where a chunk holds several tokens, as under speculation, `max_output_tokens_per_s` counts tokens, not
chunks. What was not measured is null, where vLLM writes 0.
"""

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, Literal, get_args

import numpy as np

from runtime.measure.benchmark.client import Answer, SpeculationCounts
from runtime.measure.benchmark.load_generator import LoadResult
from runtime.util.errors import UsageError

Objective = Literal["ttft", "tpot", "e2el"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


def parse_objectives(pairs: Seq[str]) -> dict[Objective, float]:
    """Milliseconds by metric, of words such as `ttft:200`; UsageError for what is none, or two for one metric."""
    objectives: dict[Objective, float] = {}
    for pair in pairs:
        word, _, value = pair.partition(":")
        name = next((one for one in OBJECTIVES if one == word), None)
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name is None or not 0 <= limit < math.inf:
            raise UsageError(
                f"not a service objective: {pair}", hint="ttft, tpot or e2el with its milliseconds, as ttft:200"
            )
        if name in objectives:
            raise UsageError(f"two objectives for one metric: {pair}", hint="give one")
        objectives[name] = limit
    return objectives


def results(result: LoadResult, objectives: Mapping[Objective, float], percentiles: Seq[float]) -> dict[str, Any]:
    """Results in the format of `vllm bench serve`, and tokens per step."""
    answers, duration_s = result.answers, result.duration_s
    good = [answer for answer in answers if answer.error is None]
    num_input = sum(answer.num_prompt_tokens or 0 for answer in good)
    num_output = sum(answer.num_tokens for answer in good)
    num_meeting = sum(_meets(answer, objectives) for answer in good)
    by_second = _tokens_by_second(good)
    numbers: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration_s,
        "request_goodput": num_meeting / duration_s if objectives else None,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_output_tokens_per_s": max(by_second, default=None),
        "output_tokens_by_second": by_second,
        "max_concurrent_requests": _peak_concurrency(good),
    }
    for name, values in _series(good).items():
        numbers |= _summary(name, values, percentiles)
    return numbers | _speculation(result, num_output) | _records(result)


def _series(answers: Seq[Answer]) -> dict[str, list[float]]:
    """Seconds, by vLLM's names of the metrics."""
    return {
        "ttft": [answer.ttft_s for answer in answers],
        "tpot": [answer.tpot_s for answer in answers if answer.tpot_s is not None],
        "itl": [gap for answer in answers for gap in answer.itls_s],
        "e2el": [answer.latency_s for answer in answers],
    }


def _summary(name: str, values: Seq[float], percentiles: Seq[float]) -> dict[str, float | None]:
    milliseconds = np.array(values) * 1000
    names = [f"mean_{name}_ms", f"median_{name}_ms", f"std_{name}_ms", *(f"p{p:g}_{name}_ms" for p in percentiles)]
    if not len(values):
        return dict.fromkeys(names)
    shares = np.percentile(milliseconds, percentiles)
    numbers = (milliseconds.mean(), np.median(milliseconds), milliseconds.std(), *shares)
    return {name: float(number) for name, number in zip(names, numbers, strict=True)}


def _meets(answer: Answer, objectives: Mapping[Objective, float]) -> bool:
    """True if a request met every objective; one of a single token has a TPOT of 0, as in vLLM."""
    measured_s = {"ttft": answer.ttft_s, "tpot": answer.tpot_s or 0.0, "e2el": answer.latency_s}
    return all(measured_s[name] * 1000 <= limit for name, limit in objectives.items())


def _tokens_by_second(answers: Seq[Answer]) -> list[float]:
    """Tokens that arrived in each second since the first request; a request's are spread evenly over its chunks."""
    if not answers:
        return []
    first_s = min(answer.start_s for answer in answers)
    num_seconds = math.ceil(max(answer.end_s for answer in answers) - first_s) or 1
    seconds = [0.0] * (num_seconds + 1)
    for answer in answers:
        for time_s in answer.piece_times:
            seconds[int(time_s - first_s)] += answer.num_tokens / len(answer.piece_times)
    return seconds[:num_seconds]


def _peak_concurrency(answers: Seq[Answer]) -> int:
    """Peak number of simultaneous requests; one that ends at that moment is not counted."""
    events = sorted([(answer.start_s, 1) for answer in answers] + [(answer.end_s, -1) for answer in answers])
    counts = np.cumsum([change for _, change in events])
    return int(counts.max()) if len(counts) else 0


def _speculation(result: LoadResult, num_output: int) -> dict[str, Any]:
    """Percent and lengths as vLLM has them; `tokens_per_step` and the counts it comes from are ours."""
    counts = result.speculation
    if counts is None:
        return {"spec_decode_source": None, "tokens_per_step": None}
    drafts, drafted, accepted = counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens
    num_steps = _num_steps(counts, num_output)
    return {
        "spec_decode_source": result.speculation_source,
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_acceptance_rate": 100 * accepted / drafted if drafted else None,
        "spec_decode_acceptance_length": 1 + accepted / drafts if drafts else None,
        "spec_decode_per_position_acceptance_rates": [n / drafts for n in counts.accepted_per_position]
        if drafts
        else [],
        **(
            {}
            if counts.drafted_per_position is None
            else {
                "spec_decode_num_drafts_per_position": list(counts.drafted_per_position),
                "spec_decode_acceptance_rate_per_position": [
                    accepted / num if num else None
                    for accepted, num in zip(counts.accepted_per_position, counts.drafted_per_position, strict=True)
                ],
            }
        ),
        "num_steps": num_steps,
        "tokens_per_step": num_output / num_steps if num_steps and num_output else None,
    }


def _num_steps(counts: SpeculationCounts, num_output: int) -> int:
    """Every step makes its accepted tokens and one of the target's own: steps = tokens − accepted.

    A request's last step may be cut before its own token, which counters for Prometheus do not tell.
    """
    return num_output - counts.num_accepted_tokens if counts.num_steps is None else round(counts.num_steps)


def _records(result: LoadResult) -> dict[str, Any]:
    """Request by request, in the order of their arrival; seconds, and 0 for those that failed, as vLLM has it."""
    answers = result.answers
    failed = [answer.error is not None for answer in answers]

    def of(values: Seq[float]) -> list[float]:
        return [0.0 if has_failed else value for value, has_failed in zip(values, failed, strict=True)]

    return {
        "input_lens": [answer.num_prompt_tokens or 0 for answer in answers],
        "output_lens": [0 if answer.error else answer.num_tokens for answer in answers],
        "ttfts": of([answer.ttft_s if answer.piece_times else 0.0 for answer in answers]),
        "itls": [[] if answer.error else answer.itls_s for answer in answers],
        "latencies": of([answer.latency_s for answer in answers]),
        "start_times": [answer.start_s - result.start_s for answer in answers],
        "queue_times": [answer.start_s - answer.arrival_s for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "errors": [answer.error or "" for answer in answers],
    }
