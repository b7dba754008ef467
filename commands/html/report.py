"""`--report`: one HTML page made of the document that `--json` prints, and of the outputs' tokens.

The page refers to nothing outside itself and has no script. A number of the document is shown by its place there
(`data-path`) and stands beside what is shown in full (`value`), so the page cannot say anything else than the JSON.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from commands.documents.rouge import ROUGE_TYPES
from commands.html.charts import charts_section
from commands.html.frame import definitions_section, facts_section, page_footer, page_header, tile, whole_page
from commands.html.outputs import Pieces, outputs_section
from commands.html.values import NO_DRAFTS, Page, escaped, integer, request_time, seconds, table, tenths, times
from commands.output import number, percent
from runtime.drafters.specs import DRAFTERS
from runtime.evaluation.steps import TOKEN_KINDS
from runtime.files import write_file

_SYSTEMS = {"engine": "engine", "engine_no_drafter": "engine, no drafter", "hf": "Hugging Face"}
_DEFINITIONS = {
    "tokens per step": "generated tokens ÷ steps of the target, the one that computes the prompt included",
    "acceptance rate": "draft tokens kept ÷ draft tokens sent to the target, after the cut at end id, stop word and "
    "budget",
    "mean acceptance length": "1 + accepted ÷ steps that carried a draft",
    "speedup": "wall time without a drafter ÷ with one: same engine, same requests, same run",
    "TTFT, TPOT": "submission to first token; (end − first token) ÷ (generated − 1)",
    **{f"{kind} token": meaning for kind, meaning in TOKEN_KINDS.items()},
}


def write_report(path: Path, document: dict[str, Any], outputs: Seq[Pieces]) -> None:
    """The page, whole or not at all."""
    write_file(path, html_report(document, outputs).encode(errors="replace"))


def html_report(document: dict[str, Any], outputs: Seq[Pieces]) -> str:
    """`document` is one of `run` or `summarize`; `outputs` has the tokens of each of its requests."""
    page = Page(document)
    title = _title(document)
    body = [
        _header(document, title),
        _tiles(page),
        *([charts_section(page, outputs)] if document["total"] and document["requests"] else []),
        *([_system_table(page)] if "systems" in document else []),
        *([_category_table(page)] if document.get("categories") else []),
        outputs_section(page, outputs),
        _settings(document),
        definitions_section(_DEFINITIONS),
        page_footer(document),
    ]
    return whole_page(title, body)


def _title(document: dict[str, Any]) -> str:
    settings, engine = document["settings"], document["engine"]
    num_requests = len(document["requests"])
    what = (
        f"{Path(settings['dataset']).name}, {num_requests} samples"
        if document["command"] == "summarize"
        else f"{num_requests} request{'s' if num_requests != 1 else ''}"
    )
    return f"{engine['model_type']} {engine['dtype']}, {_drafter(settings)}: {what}"


def _drafter(settings: dict[str, Any]) -> str:
    """The drafter in a few words."""
    return ", then ".join(_one_drafter(name, settings) for name in settings["drafters"]) or "no drafter"


def _one_drafter(name: str, settings: dict[str, Any]) -> str:
    described = DRAFTERS[name].description
    record = settings[described.flag]
    if isinstance(record, str):
        return f"{described.title} {record}"
    return f"{described.title}, up to {record['max_draft_len']} tokens"


def _header(document: dict[str, Any], title: str) -> str:
    num_unfinished = document.get("num_unfinished_requests", 0)
    num_requests = len(document["requests"])
    alert = (
        f'\n<p class="alert" role="note"><strong>Interrupted:</strong> {num_requests} of '
        f"{num_requests + num_unfinished} requests had finished, and only they are counted.</p>"
        if num_unfinished
        else ""
    )
    return page_header(document["command"], title, alert)


def _tiles(page: Page) -> str:
    tiles = [_speedup_tile(page)]
    if page.at("total"):
        tiles += [_tokens_per_step_tile(page), _acceptance_tile(page), _throughput_tile(page)]
    tiles.append(_lossless_tile(page))
    if page.at("rouge"):
        name = next(iter(page.document["rouge"]))
        caption = f"× 100, {page.show(integer, 'num_references')} outputs with a reference ({_SYSTEMS[name]})"
        tiles.append(tile("ROUGE-1", page.show(number, "rouge", name, "rouge1", reason="no references"), caption))
    return f'<dl class="tiles">\n{"".join(tiles)}</dl>'


def _speedup_tile(page: Page) -> str:
    speedup = page.at("speedup")
    if speedup is not None:
        caption = "over no drafter" if speedup >= 0.995 else "over no drafter: slower than without one"
    elif _drafter(page.document["settings"]) == "no drafter":
        caption = "there is no drafter to compare"
    elif page.document["command"] == "run":
        caption = "not measured: <code>--check-lossless</code> does"
    else:
        caption = "not measured: the engine was not run"
    return tile("Speedup", page.show(times, "speedup", reason="not measured"), caption)


def _tokens_per_step_tile(page: Page) -> str:
    tokens, steps = page.show(integer, "total", "num_generated_tokens"), page.show(integer, "total", "num_steps")
    figure = page.show(number, "total", "tokens_per_step", reason="no step was made")
    return tile("Tokens per step", figure, f"{tokens} tokens in {steps} steps")


def _acceptance_tile(page: Page) -> str:
    figure = page.show(percent, "total", "draft_acceptance_rate", reason=NO_DRAFTS)
    accepted = page.show(integer, "total", "num_accepted_draft_tokens")
    drafted = page.show(integer, "total", "num_draft_tokens")
    caption = f"{accepted} of {drafted} draft tokens" if page.at("total", "num_draft_tokens") else NO_DRAFTS
    return tile("Acceptance rate", figure, caption)


def _throughput_tile(page: Page) -> str:
    figure = page.show(tenths, "total", "output_tokens_per_second", reason="no time was measured")
    wall = page.show(seconds, "total", "wall_s")
    return tile("Tokens/s", figure, f"wall time {wall}, without loading and warm-up")


def _lossless_tile(page: Page) -> str:
    """The check where it was made, or what is known without it."""
    check, same = page.at("checks", "lossless"), page.at("checks", "identical_to_no_drafter")
    if check is not None and check["rule"] == "distribution":
        return _distribution_tile(page, check["passed"])
    if check is not None:
        caption = (
            f"{page.show(integer, 'checks', 'lossless', 'num_identical')} of "
            f"{page.show(integer, 'checks', 'lossless', 'num_samples')} outputs token for token the same as without a "
            "drafter"
        )
        return tile("Lossless", "passed" if check["passed"] else "FAILED", caption, _verdict(check["passed"]))
    if same is not None:
        figure = (
            f"{page.show(integer, 'checks', 'identical_to_no_drafter', 'num_identical')} of "
            f"{page.show(integer, 'checks', 'identical_to_no_drafter', 'num_samples')}"
        )
        is_same = same["num_identical"] == same["num_samples"]
        return tile("Lossless", figure, "outputs token for token the same as without a drafter", _verdict(is_same))
    return tile("Lossless", "not checked", "<code>--check-lossless</code> compares with no drafter", " words none")


def _distribution_tile(page: Page, passed: bool | None) -> str:
    def figure(key: str, form: str) -> str:
        return page.show(lambda value: format(value, form), "checks", "lossless", key, reason="none so surely")

    caption = (
        f"distribution: p = {figure('p_value', '.3g')}, {figure('num_tokens', ',')} tokens; would have found a total "
        f"variation distance of {figure('detectable_total_variation', '.2g')} with {figure('power', '.0%')}"
    )
    if passed is None:
        return tile("Lossless", "too little to tell", caption, " words none")
    return tile("Lossless", "passed" if passed else "FAILED", caption, _verdict(passed))


def _verdict(is_good: bool) -> str:
    return " words good" if is_good else " words bad"


def _system_table(page: Page) -> str:
    names = list(page.document["systems"])

    def row(label: str, form: Callable[[Any], str], *keys: str) -> list[str]:
        return [label, *(page.show(form, "systems", name, *keys, reason=reason(name, keys[-1])) for name in names)]

    def reason(name: str, key: str) -> str:
        if name == "hf" and key not in ROUGE_TYPES:
            return "Hugging Face has no drafts, and its steps are not counted"
        return {"median_tpot_s": "outputs of one token"}.get(key, "no references" if key in ROUGE_TYPES else NO_DRAFTS)

    rows = [
        *(row(name.replace("rouge", "ROUGE-"), number, "rouge", name) for name in ROUGE_TYPES),
        row("latency, mean", request_time, "mean_latency_s"),
        row("TTFT, median", request_time, "median_ttft_s"),
        row("TPOT, median", request_time, "median_tpot_s"),
        row("tokens", integer, "total", "num_generated_tokens"),
        row("tokens/s", tenths, "total", "output_tokens_per_second"),
        row("steps", integer, "total", "num_steps"),
        row("tokens per step", number, "total", "tokens_per_step"),
        row("draft tokens", integer, "total", "num_draft_tokens"),
        row("accepted", integer, "total", "num_accepted_draft_tokens"),
        row("acceptance rate", percent, "total", "draft_acceptance_rate"),
        row("mean acceptance length", number, "total", "mean_acceptance_length"),
    ]
    same = page.at("checks", "identical_to_hf")
    lines = [f"speedup over Hugging Face {page.show(times, 'speedup_over_hf')}"] if page.at("speedup_over_hf") else []
    if same is not None:
        num_identical, num_samples = (
            page.show(integer, "checks", "identical_to_hf", key) for key in ("num_identical", "num_samples")
        )
        lines.append(f"token for token the same as Hugging Face: {num_identical} of {num_samples}")
    if differences := page.at("hf_differences"):
        lines.append(
            f"Hugging Face ran another model than the engine's, not compared: {escaped('; '.join(differences))}"
        )
    note = f'<p class="note">{"; ".join(lines)}</p>\n' if lines else ""
    return f"<h2>Systems side by side</h2>\n{note}{table(['', *(_SYSTEMS[name] for name in names)], rows)}"


def _category_table(page: Page) -> str:
    system = next(iter(page.document["systems"]))
    heads = ("category", "samples", "tokens per step", "acceptance rate", "ROUGE-1", "ROUGE-L", "TPOT", "speedup")
    rows = [
        [
            escaped(name),
            page.show(integer, "categories", name, "num_samples"),
            page.show(number, "categories", name, "tokens_per_step"),
            page.show(percent, "categories", name, "draft_acceptance_rate", reason=NO_DRAFTS),
            page.show(number, "categories", name, "rouge", system, "rouge1", reason="no references"),
            page.show(number, "categories", name, "rouge", system, "rougeL", reason="no references"),
            page.show(request_time, "categories", name, "median_tpot_s", system, reason="outputs of one token"),
            page.show(times, "categories", name, "speedup", reason="no drafter"),
        ]
        for name in page.document["categories"]
    ]
    return f"<h2>By category</h2>\n{table(heads, rows)}"


def _settings(document: dict[str, Any]) -> str:
    engine = dict(document["engine"])
    environment = {"specdec": document["specdec_version"], **engine.pop("environment")}
    cards = [
        ("Settings", document["settings"]),
        ("Engine", engine),
        ("Environment", environment),
        *([("Draft engine", document["draft_engine"])] if document["draft_engine"] else []),
    ]
    return facts_section(cards)
