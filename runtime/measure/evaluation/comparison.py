"""Two documents side by side: the settings that differ, the metrics, and the differences that exceed the noise.

The noise is estimated from the documents themselves. Counts follow from the tokens, and greedy tokens from the
settings: a second run gives the same, so any difference is real. Whether a difference of times is more than chance is
judged by their values for each request, paired if both documents answer the same requests. Requests that ran together
shared their steps, and count as one observation. A disturbance of a whole run cannot be seen among the requests of that
run, but in the engine without a drafter, which `summarize` runs in turn with the other.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

from runtime.core.params import is_greedy
from runtime.drafters.specs import DRAFTERS
from runtime.measure.evaluation.significance import LEVEL, MIN_PAIRS, Interval, paired_shift, unpaired_shift

Kind = Literal["count", "time", "speedup"]
Unit = Literal["", "share", "s", "tokens/s", "x"]
Record = dict[str, Any]


@dataclass(frozen=True)
class Metric:
    """A metric of a document. `of_request` gives its value for a request; None if a document has one value only."""

    name: str
    title: str
    unit: Unit
    kind: Kind
    of_document: Callable[[Record], float | None]
    of_request: Callable[[Record], float | None] | None = None


def compare_documents(a: Record, b: Record) -> Record:
    """`settings`, `requests`, `control` and `metrics` of the document that `compare` prints."""
    matching = _match(a, b)
    control = _control(a, b, matching)
    metrics = {}
    for metric in _METRICS[a["command"]]:
        record = _metric_record(metric, a, b, matching, control)
        if record["a"] is not None or record["b"] is not None:
            metrics[metric.name] = record
    return {
        "settings": different_settings(a, b),
        "requests": matching.record(),
        "level": LEVEL,
        "control": None if control is None else _interval_record(control),
        "metrics": metrics,
    }


# Which requests belong together


@dataclass(frozen=True)
class _Matching:
    """Indices of the requests that have the same prompt in both documents, and whether their other data agree."""

    num_a: int
    num_b: int
    pairs: list[tuple[int, int]]
    num_identical: int
    is_greedy: bool

    @property
    def is_paired(self) -> bool:
        return len(self.pairs) == self.num_a == self.num_b

    @property
    def counts_are_exact(self) -> bool:
        """True if both counts are reproducible, so that a difference is real."""
        return self.is_paired and (self.is_greedy or self.num_identical == len(self.pairs))

    def record(self) -> Record:
        return {
            "num_a": self.num_a,
            "num_b": self.num_b,
            "num_same_prompt": len(self.pairs),
            "num_identical_outputs": self.num_identical,
            "paired": self.is_paired,
        }


def _match(a: Record, b: Record) -> _Matching:
    """Pair requests with the same prompt: the first with the other document's first, the second with its second."""
    keys_a, keys_b = _keys(a), _keys(b)
    places = {key: i for i, key in enumerate(keys_b)}
    pairs = [(i, places[key]) for i, key in enumerate(keys_a) if key in places]
    num_identical = sum(a["requests"][i]["output_ids"] == b["requests"][j]["output_ids"] for i, j in pairs)
    return _Matching(len(keys_a), len(keys_b), pairs, num_identical, _is_greedy(a) and _is_greedy(b))


def _keys(document: Record) -> list[tuple[Any, ...]]:
    seen: Counter[tuple[Any, ...]] = Counter()
    keys = []
    for request in document["requests"]:
        prompt = tuple(request["prompt_ids"])
        keys.append((prompt, seen[prompt]))
        seen[prompt] += 1
    return keys


def _is_greedy(document: Record) -> bool:
    sampling = document["settings"]["sampling"]
    return is_greedy(sampling["temperature"], sampling["top_k"])


# How a difference is judged


def _metric_record(metric: Metric, a: Record, b: Record, matching: _Matching, control: Interval | None) -> Record:
    value_a, value_b = metric.of_document(a), metric.of_document(b)
    record: Record = {
        "title": metric.title,
        "unit": metric.unit,
        "a": value_a,
        "b": value_b,
        "difference": None if value_a is None or value_b is None else value_b - value_a,
        "ratio": None if value_b is None or not value_a else value_b / value_a,
        "interval": None,
        "num_observations": None,
    }
    if value_a is None or value_b is None:
        return record | _verdict("unknown", "none", "only one of the two has it")
    if metric.kind == "count" and matching.counts_are_exact:
        return record | _verdict("same" if value_a == value_b else "different", "exact", None)
    if metric.of_request is None:
        return record | _verdict("unknown", "none", "one value each")
    if a["command"] == "run" and metric.name in ("ttft_s", "latency_s"):  # all requests of `run` arrive at the start
        return record | _verdict("unknown", "none", "a request's time includes waiting for others")
    method: Literal["paired", "unpaired"] = "paired" if matching.is_paired else "unpaired"
    interval, num_observations = _interval_of(metric, a, b, matching)
    record |= {"num_observations": list(num_observations)}
    if interval is None:
        return record | _verdict("unknown", "none", _few(num_observations, matching))
    record |= {"interval": _interval_record(interval)}
    if interval.contains(1.0):
        return record | _verdict("within noise", method, None)
    if metric.kind == "time" and control is not None and interval.overlaps(_as(metric.unit, control)):
        return record | _verdict("within noise", method, "as the control")
    return record | _verdict("different", method, None)


def _verdict(verdict: str, method: str, reason: str | None) -> Record:
    return {"verdict": verdict, "method": method, "reason": reason}


def _few(num_observations: tuple[int, int], matching: _Matching) -> str:
    """Reason for the lack of an interval: too few observations, since requests that ran together count as one."""
    if matching.is_paired:
        return f"{num_observations[0]} of the {MIN_PAIRS} observations that it takes"
    return f"{num_observations[0]} and {num_observations[1]} observations are too few"


def _interval_record(interval: Interval) -> Record:
    return {"ratio": interval.estimate, "low": interval.low, "high": interval.high}


def _interval_of(metric: Metric, a: Record, b: Record, matching: _Matching) -> tuple[Interval | None, tuple[int, int]]:
    """The interval of the ratio B to A, and the number of observations in each document."""
    assert metric.of_request is not None
    values_a, values_b = (_logs(metric.of_request, document["requests"]) for document in (a, b))
    groups_a, groups_b = (_groups(metric.kind, document) for document in (a, b))
    if matching.is_paired:
        # Requests that ran together in either document are one observation: the larger groups decide.
        groups = groups_a if len(set(groups_a)) <= len(set(groups_b)) else [groups_b[j] for _, j in matching.pairs]
        differences = [
            (group, y - x)
            for group, (i, j) in zip(groups, matching.pairs, strict=True)
            if (x := values_a[i]) is not None and (y := values_b[j]) is not None
        ]
        means = _means(differences)
        interval = paired_shift([0.0] * len(means), means) if means else None
        return (interval.exp() if interval else None), (len(means), len(means))
    means_a, means_b = (
        _means((group, value) for group, value in zip(groups, values, strict=True) if value is not None)
        for groups, values in ((groups_a, values_a), (groups_b, values_b))
    )
    interval = unpaired_shift(means_a, means_b) if means_a and means_b else None
    return (interval.exp() if interval else None), (len(means_a), len(means_b))


def _logs(of_request: Callable[[Record], float | None], requests: Iterable[Record]) -> list[float | None]:
    values = [of_request(request) for request in requests]
    return [math.log(value) if value else None for value in values]


def _groups(kind: Kind, document: Record) -> list[int]:
    """Groups of requests that shared their steps, and so their time. For counts, each request is a group."""
    requests, settings = document["requests"], document["settings"]
    if kind == "count":
        return list(range(len(requests)))
    if document["command"] == "run":
        size = document["engine"]["build_config"]["max_batch_size"]
        return [i // size for i in range(len(requests))]
    numbers: dict[tuple[Any, int], int] = {}
    seen: Counter[Any] = Counter()
    groups = []
    for request in requests:  # a batch holds one category
        key = (request["category"], seen[request["category"]] // settings["batch_size"])
        seen[request["category"]] += 1
        groups.append(numbers.setdefault(key, len(numbers)))
    return groups


def _means(values: Iterable[tuple[int, float]]) -> list[float]:
    by_group: defaultdict[int, list[float]] = defaultdict(list)
    for group, value in values:
        by_group[group].append(value)
    return [fmean(group) for group in by_group.values()]


def _control(a: Record, b: Record, matching: _Matching) -> Interval | None:
    """Interval of the ratio, B over A, of the times for a token without a drafter: the same work in both documents of
    `summarize`. None if the engines or requests differ, or if a document lacks these times.
    """
    same_engine = a["engine"] == b["engine"] and a["specdec_version"] == b["specdec_version"]
    if a["command"] != "summarize" or not same_engine or not matching.is_paired:
        return None
    metric = Metric("control", "", "s", "time", lambda document: None, _time_per_token("engine_no_drafter"))
    return _interval_of(metric, a, b, matching)[0]


def _as(unit: Unit, control: Interval) -> Interval:
    """The control as a ratio of metrics with this unit: inverted for a rate, since the control is a ratio of times."""
    if unit != "tokens/s":
        return control
    return Interval(1 / control.estimate, 1 / control.high, 1 / control.low)


# Settings


def different_settings(a: Record, b: Record) -> list[Record]:
    """Differences in settings, engines and versions, each change once; a value that one document lacks is None.

    Another drafter is one difference, `suffix matching 10` and `n-gram lookup 4,2`, and so is a record that only one
    side has, such as the quantization of an engine.
    """
    chosen_a, chosen_b = _chosen(a), _chosen(b)
    if a["settings"]["drafters"] != b["settings"]["drafters"]:
        chosen_a, chosen_b = (_without_drafters(one) | {"drafter": _drafter(one)} for one in (chosen_a, chosen_b))
    return list(_different(chosen_a, chosen_b, ""))


def _chosen(document: Record) -> Record:
    return {
        "specdec_version": document["specdec_version"],
        **document["settings"],
        "engine": _without_results(document["engine"]),
        "draft_engine": _without_results(document.get("draft_engine") or {}) or None,
    }


def _without_results(engine: Record) -> Record:
    """The engine's record without measurements made at its build, without values that follow from the formats, and, if
    a model was named, without the cache's directory.
    """
    left_out = {"logits_check", "quality", "bits"} | ({"engine_dir"} if engine.get("model") else set())
    return {key: value for key, value in engine.items() if key not in left_out}


def _without_drafters(chosen: Record) -> Record:
    """The settings without those of drafters and of the draft model's engine, which only one document may have."""
    own = {"drafters", "draft_engine", *(spec.description.flag for spec in DRAFTERS.values())}
    return {key: value for key, value in chosen.items() if key not in own}


def _drafter(chosen: Record) -> str | None:
    """The drafter of a document in words, such as `n-gram lookup 4,2`; None for a document without a drafter."""
    found = []
    for name in chosen["drafters"]:
        described = DRAFTERS[name].description
        record: Any = chosen.get(described.flag) or {}
        keys = [key for key in ("max_draft_len", "max_matching_ngram_size") if key in record]
        numbers = [record] if isinstance(record, str) else [record[key] for key in keys]
        found.append(f"{described.title} {','.join(map(str, numbers))}".rstrip())
    return ", then ".join(found) or None


def _different(a: Record, b: Record, prefix: str) -> Iterable[Record]:
    for key in dict.fromkeys([*a, *b]):
        value_a, value_b = a.get(key), b.get(key)
        if isinstance(value_a, dict) and isinstance(value_b, dict):
            yield from _different(value_a, value_b, f"{prefix}{key}.")
        elif value_a != value_b:
            yield {"name": prefix + key, "a": value_a, "b": value_b}


# The metrics


def _at(*keys: str) -> Callable[[Record], float | None]:
    def value(record: Record) -> float | None:
        found: Any = record
        for key in keys:
            found = found.get(key) if found is not None else None
        return None if found is None else float(found)

    return value


def _over_requests(
    reduce: Callable[[list[float]], float], of_request: Callable[[Record], float | None]
) -> Callable[[Record], float | None]:
    def value(document: Record) -> float | None:
        values = [v for request in document["requests"] if (v := of_request(request)) is not None]
        return reduce(values) if values else None

    return value


def _of_first_system(group: str, *keys: str) -> Callable[[Record], float | None]:
    """Value at `keys` of the first system in `group`: of the engine, unless only Hugging Face was run."""
    return lambda document: _at(*keys)(next(iter(document[group].values())))


def _time_per_token(system: str) -> Callable[[Record], float | None]:
    def value(request: Record) -> float | None:
        wall_s = request["wall_s"].get(system)
        return None if wall_s is None else float(wall_s / len(request["outputs"][system]))

    return value


def _tokens_per_second(request: Record) -> float | None:
    time = _time_per_token("engine")(request)
    return 1 / time if time else None


def _speedup_over(system: str) -> Callable[[Record], float | None]:
    def value(request: Record) -> float | None:
        slow, fast = _time_per_token(system)(request), _time_per_token("engine")(request)
        return slow / fast if slow and fast else None

    return value


def _total(name: str, title: str, unit: Unit, kind: Kind = "count", *, per_request: bool = False) -> Metric:
    return Metric(name, title, unit, kind, _at("total", name), _at("stats", name) if per_request else None)


_COUNTS = (
    _total("tokens_per_step", "tokens per step", "", per_request=True),
    _total("num_generated_tokens", "tokens", ""),
    _total("num_steps", "steps", ""),
    _total("num_draft_tokens", "draft tokens", ""),
    _total("num_accepted_draft_tokens", "accepted", ""),
    _total("draft_acceptance_rate", "acceptance rate", "share"),
    _total("mean_acceptance_length", "mean acceptance length", ""),
)
_STEP_TIMES = (
    _total("target_time_per_step_s", "target, per step", "s", "time"),
    _total("draft_time_per_step_s", "drafting, per step", "s", "time"),
    _total("host_time_per_step_s", "host, per step", "s", "time"),
)
_OF_RUN = (
    *(
        Metric(name, title, "s", "time", _over_requests(reduce, _at("stats", name)), _at("stats", name))
        for name, title, reduce in (
            ("ttft_s", "TTFT, median", median),
            ("tpot_s", "TPOT, median", median),
            ("latency_s", "latency, mean", fmean),
        )
    ),
    _total("output_tokens_per_second", "tokens/s", "tokens/s", "time"),
    *_STEP_TIMES,
    Metric("speedup", "speedup", "x", "speedup", _at("speedup")),
)
_OF_SUMMARIZE = (
    *(
        Metric(name, f"ROUGE-{name.removeprefix('rouge')}", "", "count", _of_first_system("rouge", name))
        for name in ("rouge1", "rouge2", "rougeL", "rougeLsum")
    ),
    *(
        Metric(name, title, "s", "time", _of_first_system("systems", key), _at("stats", name))
        for name, title, key in (
            ("ttft_s", "TTFT, median", "median_ttft_s"),
            ("tpot_s", "TPOT, median", "median_tpot_s"),
            ("latency_s", "latency, mean", "mean_latency_s"),
        )
    ),
    Metric(
        "output_tokens_per_second",
        "tokens/s",
        "tokens/s",
        "time",
        _of_first_system("systems", "total", "output_tokens_per_second"),
        _tokens_per_second,
    ),
    *_STEP_TIMES,
    Metric("speedup", "speedup", "x", "speedup", _at("speedup"), _speedup_over("engine_no_drafter")),
    Metric("speedup_over_hf", "speedup over Hugging Face", "x", "speedup", _at("speedup_over_hf"), _speedup_over("hf")),
)
_METRICS = {"run": (*_COUNTS, *_OF_RUN), "summarize": (*_COUNTS, *_OF_SUMMARIZE)}
