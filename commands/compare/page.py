"""The page of `specdec compare --report`."""

from pathlib import Path
from typing import Any

from commands.compare.document import CompareDocument, notes, shown_setting, shown_values, shown_verdict
from commands.output.html.page import Bars, made, page

_DECISIVE = ("output_tokens_per_second", "tpot_s", "ttft_s", "latency_s", "speedup", "tokens_per_step")
"""Metrics that the page begins with, if the documents have them."""
_DEFINITIONS = {
    "different": "the interval of the ratio does not contain 1, and is not what the control changed by",
    "within the noise": "the requests of both vary as much as A and B differ; more requests show smaller differences",
    "interval": "where the ratio B ÷ A of a typical request lies, with 95 % confidence",
    "control": "the engine without a drafter, which `summarize` runs in turn with the other: the same work in A and B",
}


def compare_page(document: CompareDocument, a: dict[str, Any], b: dict[str, Any]) -> str:
    data, metrics = document.as_json(), document.metrics
    decisive = [name for name in _DECISIVE if name in metrics]
    return page(
        "compare.html",
        data,
        f"A {Path(document.a).name} and B {Path(document.b).name}: {_finding(document)}",
        made=[f"A: {', '.join(made(a))}", f"B: {', '.join(made(b))}"],
        cards={"A": a["settings"], "B": b["settings"]},
        definitions=_DEFINITIONS,
        decisive=decisive,
        bars=[_bars(document, name) for name in decisive],
        names=list(metrics),
        values={name: shown_values(metric) for name, metric in metrics.items()},
        verdicts={name: shown_verdict(metric) for name, metric in metrics.items()},
        settings=[(one.name, shown_setting(one.a), shown_setting(one.b)) for one in document.settings],
        remarks=notes(document),
        todo=_todo(document),
    )


def _different(document: CompareDocument) -> list[str]:
    return [
        f"{metric.title} {metric.ratio:.2f}x" if metric.ratio is not None else metric.title
        for name in _DECISIVE
        if (metric := document.metrics.get(name)) is not None and metric.verdict == "different"
    ]


def _finding(document: CompareDocument) -> str:
    """The first sentence of the page: the ratio of B to A for the decisive metrics."""
    if different := _different(document):
        return f"in B {', '.join(different)}"
    verdicts = {document.metrics[name].verdict for name in _DECISIVE if name in document.metrics}
    return "no time differs by more than noise" if "within noise" in verdicts else "too little to tell which is faster"


def _todo(document: CompareDocument) -> str:
    """Advice that follows from the finding."""
    if document.requests.num_same_prompt == 0:
        return "Run both with the same prompts: these have none in common, so only large differences can be seen."
    unsure = [one.title for one in document.metrics.values() if "observations" in (one.reason or "")]
    if document.requests.num_identical_outputs < document.requests.num_same_prompt:
        return "The outputs differ: `specdec run --check-lossless` tells whether a drafter changed them."
    if unsure:
        return (
            f"Give both runs more prompts, or use `specdec summarize`: there is too little to tell {', '.join(unsure)} "
            "from chance."
        )
    if not _different(document):
        return "Keep what is simpler, or repeat both runs with more prompts, which show smaller differences."
    control = document.control
    if control is None:
        return "Repeat both runs on a quiet machine before trusting times: there is no control in these documents."
    if not control.low <= 1 <= control.high:
        return "Trust the counts and the speedup, which has the control in it: the machine was not as fast in both."
    return "The machine was as fast in both, says the control: what differs comes from the settings below."


def _bars(document: CompareDocument, name: str) -> Bars:
    metric = document.metrics[name]
    shown = zip(("predicted", "measured"), ("A", "B"), (metric.a, metric.b), shown_values(metric), strict=False)
    parts = [(style, side, value, text) for style, side, value, text in shown if value is not None]
    return Bars(metric.title, parts, shown_verdict(metric))
