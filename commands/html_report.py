"""`--report`: one HTML page made of the document that `--json` prints, and of the outputs' tokens.

The page refers to nothing outside itself and has no script. A number of the document is shown by its place there
(`data-path`) and stands beside what is shown in full (`value`), so the page cannot say anything else than the JSON.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from commands.output import milliseconds, number, percent
from commands.rouge import ROUGE_TYPES
from commands.steps import TOKEN_KINDS, Piece
from commands.svg import area_chart, column_chart
from runtime.files import write_file

_SYSTEMS = {"engine": "engine", "engine_no_drafter": "engine, no drafter", "hf": "Hugging Face"}
_NO_DRAFTS = "nothing was drafted"
_MAX_RANGES = 40
_MAX_OPEN_OUTPUTS = 3  # more than these are folded, the first left open
_PROMPT_START, _PROMPT_END = 3000, 1000  # characters shown of a long prompt

Pieces = list[Piece] | None
"""An output's tokens; None for Hugging Face's, whose steps nobody counted."""

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
    write_file(path, html_report(document, outputs).encode())


def html_report(document: dict[str, Any], outputs: Seq[Pieces]) -> str:
    """`document` is one of `run` or `summarize`; `outputs` has the tokens of each of its requests."""
    page = _Page(document)
    title = _title(document)
    body = [
        _header(document, title),
        _tiles(page),
        *([_charts(page, outputs)] if document["total"] and document["requests"] else []),
        *([_system_table(page)] if "systems" in document else []),
        *([_category_table(page)] if document.get("categories") else []),
        _outputs(page, outputs),
        _settings(document),
        _definitions(),
        _footer(document),
    ]
    style = files("commands").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)} – specdec</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


@dataclass(frozen=True)
class _Page:
    """Shows values of the document."""

    document: dict[str, Any]

    def at(self, *keys: str | int) -> Any:
        value: Any = self.document
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else value[key]
            if value is None:
                return None
        return value

    def show(self, form: Callable[[Any], str], *keys: str | int, reason: str = "not measured") -> str:
        """The value at `keys`, shown in this form; a dash with the reason where it is null or missing."""
        value = self.at(*keys)
        if value is None:
            return f'<span class="none" title="{escape(reason)}">–</span>'
        pointer = "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)
        return f'<data value="{escape(json.dumps(value))}" data-path="{escape(pointer)}">{_text(form(value))}</data>'


def _count(value: int) -> str:
    return f"{value:,}"


def _tenths(value: float) -> str:
    return number(value, 1)


def _seconds(value: float) -> str:
    return f"{value:,.2f} s"


def _step_time(seconds: float) -> str:
    """With a thousandth of a millisecond: lookups take no longer."""
    return f"{seconds * 1e3:,.3f} ms"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}×"


def _text(text: str) -> str:
    """Escaped; control characters, which HTML cannot hold, as their pictures."""
    return escape("".join(chr(0x2400 + ord(c)) if c < " " and c not in "\n\t" else c for c in text))


# Header and headline


def _title(document: dict[str, Any]) -> str:
    settings, engine = document["settings"], document["engine"]
    what = settings["dataset"] if document["command"] == "summarize" else f"{len(document['requests'])} requests"
    return f"{engine['model_type']} {engine['dtype']}, {_drafter(settings)}: {what}"


def _drafter(settings: dict[str, Any]) -> str:
    """The drafter in a few words."""
    ngram, draft_target = settings["ngram_config"], settings["draft_target_model_config"]
    if ngram is not None:
        return f"n-gram lookup [{ngram['max_draft_len']},{ngram['max_matching_ngram_size']}]"
    if draft_target is not None:
        return f"draft model, up to {draft_target['max_draft_len']} tokens"
    return f"drafter {settings['drafter']}" if settings["drafter"] is not None else "no drafter"


def _header(document: dict[str, Any], title: str) -> str:
    num_unfinished = document.get("num_unfinished_requests", 0)
    num_requests = len(document["requests"])
    alert = (
        f'\n<p class="alert" role="note"><strong>Interrupted:</strong> {num_requests} of '
        f"{num_requests + num_unfinished} requests had finished, and only they are counted.</p>"
        if num_unfinished
        else ""
    )
    return f"<header>\n<p>specdec {_text(document['command'])}</p>\n<h1>{_text(title)}</h1>{alert}\n</header>"


def _tiles(page: _Page) -> str:
    tiles = [_speedup_tile(page)]
    if page.at("total"):
        tiles += [_tokens_per_step_tile(page), _acceptance_tile(page), _throughput_tile(page)]
    tiles.append(_lossless_tile(page))
    if page.at("rouge"):
        name = next(iter(page.document["rouge"]))
        caption = f"of {page.show(_count, 'settings', 'num_samples')} outputs, × 100 ({_SYSTEMS[name]})"
        tiles.append(_tile("ROUGE-1", page.show(number, "rouge", name, "rouge1", reason="no references"), caption))
    return f'<dl class="tiles">\n{"".join(tiles)}</dl>'


def _tile(name: str, figure: str, caption: str, style: str = "") -> str:
    return (
        f'<div class="tile card"><dt>{name}</dt><dd class="figure{style}">{figure}</dd>'
        f'<dd class="caption">{caption}</dd></div>\n'
    )


def _speedup_tile(page: _Page) -> str:
    speedup = page.at("speedup")
    if speedup is not None:
        caption = "over no drafter" if speedup >= 0.995 else "over no drafter: slower than without one"
    elif _drafter(page.document["settings"]) == "no drafter":
        caption = "there is no drafter to compare"
    elif page.document["command"] == "run":
        caption = "not measured: <code>--check-lossless</code> does"
    else:
        caption = "not measured: the engine was not run"
    return _tile("Speedup", page.show(_times, "speedup", reason="not measured"), caption)


def _tokens_per_step_tile(page: _Page) -> str:
    tokens, steps = page.show(_count, "total", "num_generated_tokens"), page.show(_count, "total", "num_steps")
    figure = page.show(number, "total", "tokens_per_step", reason="no step was made")
    return _tile("Tokens per step", figure, f"{tokens} tokens in {steps} steps")


def _acceptance_tile(page: _Page) -> str:
    figure = page.show(percent, "total", "draft_acceptance_rate", reason=_NO_DRAFTS)
    accepted = page.show(_count, "total", "num_accepted_draft_tokens")
    drafted = page.show(_count, "total", "num_draft_tokens")
    caption = f"{accepted} of {drafted} draft tokens" if page.at("total", "num_draft_tokens") else _NO_DRAFTS
    return _tile("Acceptance rate", figure, caption)


def _throughput_tile(page: _Page) -> str:
    figure = page.show(_tenths, "total", "output_tokens_per_second", reason="no time was measured")
    wall = page.show(_seconds, "total", "wall_s")
    return _tile("Output", f"{figure} <small>tokens/s</small>", f"wall time {wall}, without loading and warm-up")


def _lossless_tile(page: _Page) -> str:
    """The check where it was made, or what is known without it."""
    check, same = page.at("checks", "lossless"), page.at("checks", "identical_to_no_drafter")
    if check is not None:
        caption = (
            f"{page.show(_count, 'checks', 'lossless', 'num_identical')} of "
            f"{page.show(_count, 'checks', 'lossless', 'num_samples')} outputs token for token the same as without a "
            "drafter"
            if check["rule"] == "tokens"
            else f"distribution: p = {page.show(lambda p: f'{p:.3g}', 'checks', 'lossless', 'p_value')}, "
            f"{page.show(_count, 'checks', 'lossless', 'num_tokens')} tokens"
        )
        return _tile("Lossless", "passed" if check["passed"] else "FAILED", caption, _verdict(check["passed"]))
    if same is not None:
        figure = (
            f"{page.show(_count, 'checks', 'identical_to_no_drafter', 'num_identical')} of "
            f"{page.show(_count, 'checks', 'identical_to_no_drafter', 'num_samples')}"
        )
        is_same = same["num_identical"] == same["num_samples"]
        return _tile("Lossless", figure, "outputs token for token the same as without a drafter", _verdict(is_same))
    return _tile("Lossless", "not checked", "<code>--check-lossless</code> compares with no drafter", " words none")


def _verdict(is_good: bool) -> str:
    return " words good" if is_good else " words bad"


# Charts


def _charts(page: _Page, outputs: Seq[Pieces]) -> str:
    cards = []
    if page.at("total", "num_spec_steps"):
        cards += [_histogram(page), _positions(page)]
    else:
        cards.append(_card("Acceptance", f"{_NO_DRAFTS}: no acceptance to show", ""))
    steps = [list(Counter(p.step for p in pieces).values()) for pieces in outputs if pieces is not None]
    cards.append(_over_time(steps))
    cards.append(_time_split(page))
    return f'<h2>Drafts and steps</h2>\n<div class="charts">\n{"".join(cards)}</div>'


def _card(title: str, note: str, content: str) -> str:
    return (
        f'<figure class="card"><figcaption><h3>{title}</h3><p class="note">{note}</p></figcaption>\n'
        f"{content}</figure>\n"
    )


def _histogram(page: _Page) -> str:
    counts, num_drafts = page.at("total", "acceptance_histogram"), page.at("total", "num_spec_steps")
    chart = column_chart(
        values=counts,
        largest=max(counts),
        names=[str(i) for i in range(len(counts))],
        shown=[_count(count) for count in counts],
        titles=[
            f"{i} accepted: {count:,} of {num_drafts:,} drafts ({percent(count / num_drafts)})"
            for i, count in enumerate(counts)
        ],
        axis="accepted tokens of a draft",
        label=f"Steps with a draft by the number of its tokens that were accepted: {_listed(counts)}",
    )
    mean = page.show(number, "total", "mean_acceptance_length", reason=_NO_DRAFTS)
    note = f"{page.show(_count, 'total', 'num_spec_steps')} steps with a draft; mean acceptance length {mean}"
    return _card("Accepted tokens of a draft", note, chart)


def _positions(page: _Page) -> str:
    rates, drafts = page.at("total", "acceptance_rate_per_position"), page.at("total", "num_drafts_per_position")
    shown = ["–" if rate is None else f"{rate * 100:.0f}" for rate in rates]
    chart = column_chart(
        values=[rate or 0.0 for rate in rates],
        largest=1.0,
        names=[str(i) for i in range(1, len(rates) + 1)],
        shown=shown,
        titles=[
            f"position {i}: {percent(rate)} of {num_drafts:,} drafts that are so long"
            for i, (rate, num_drafts) in enumerate(zip(rates, drafts, strict=True), 1)
        ],
        axis="position in the draft",
        label=f"Share of drafts whose token was accepted, by position, in percent: {_listed(shown)}",
        backdrop=True,
    )
    return _card("Acceptance by position", "% of the drafts that are so long whose token there was accepted", chart)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _over_time(steps: Seq[Seq[int]]) -> str:
    from commands.steps import tokens_over_time

    ranges = tokens_over_time(steps, _MAX_RANGES)
    chart = area_chart(
        values=[r.num_tokens / r.num_steps for r in ranges],
        names=[str(r.first) if r.first == r.last else f"{r.first}–{r.last}" for r in ranges],
        titles=[
            f"steps {r.first}–{r.last}: {r.num_tokens:,} tokens ÷ {r.num_steps:,} steps = "
            f"{number(r.num_tokens / r.num_steps)}"
            for r in ranges
        ],
        axis="step of a request",
        label="Tokens per step as the outputs grow",
    )
    note = "all requests together, from the first step of each to the last of the longest"
    return _card("Tokens per step over time", note, chart)


def _time_split(page: _Page) -> str:
    wall_s = page.at("total", "wall_s")
    parts = (("target", "target"), ("draft", "drafting"), ("host", "host"))
    shares = {part: max(page.at("total", f"{part}_time_s"), 0.0) / wall_s if wall_s else 0.0 for part, _ in parts}
    bar = "".join(
        f'<span class="{part}" style="flex:{shares[part]:.6f}" title="{name} {percent(shares[part])}"></span>'
        for part, name in parts
    )
    rows = "".join(_time_row(page, part, name, shares[part]) for part, name in parts)
    if page.at("total", "draft_model_time_s"):
        share = page.at("total", "draft_model_time_s") / wall_s
        rows += _time_row(page, "draft_model", "of drafting, the draft model", share)
    table = (
        '<div class="scroll"><table><thead><tr><th></th><th scope="col">a step</th><th scope="col">in all</th>'
        f'<th scope="col">share</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )
    note = f"{page.show(_count, 'total', 'num_iterations')} iterations of the loop in {page.show(_seconds, 'total', 'wall_s')}"
    return _card("Where the time went", note, f'<div class="split" aria-hidden="true">{bar}</div>\n{table}\n')


def _time_row(page: _Page, part: str, name: str, share: float) -> str:
    swatch = f'<span class="swatch {part}"></span>' if part != "draft_model" else ""
    head = f'<th scope="row"{"" if swatch else " class=inner"}>{swatch}{name}</th>'
    step = page.show(_step_time, "total", f"{part}_time_per_step_s")
    return f"<tr>{head}<td>{step}</td><td>{page.show(_seconds, 'total', f'{part}_time_s')}</td><td>{percent(share)}</td></tr>"


# Tables


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{c}</td>" if i else f'<th scope="row">{c}</th>' for i, c in enumerate(row)) + "</tr>\n"
        for row in rows
    )
    return f'<div class="card scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>'


def _system_table(page: _Page) -> str:
    names = list(page.document["systems"])

    def row(label: str, form: Callable[[Any], str], *keys: str) -> list[str]:
        return [label, *(page.show(form, "systems", name, *keys) for name in names)]

    rows = [
        *(row(name.replace("rouge", "ROUGE-"), number, "rouge", name) for name in ROUGE_TYPES),
        row("latency, mean", milliseconds, "mean_latency_s"),
        row("TTFT, median", milliseconds, "median_ttft_s"),
        row("TPOT, median", milliseconds, "median_tpot_s"),
        row("tokens", _count, "total", "num_generated_tokens"),
        row("tokens/s", _tenths, "total", "output_tokens_per_second"),
        row("steps", _count, "total", "num_steps"),
        row("tokens per step", number, "total", "tokens_per_step"),
        row("draft tokens", _count, "total", "num_draft_tokens"),
        row("accepted", _count, "total", "num_accepted_draft_tokens"),
        row("acceptance rate", percent, "total", "draft_acceptance_rate"),
        row("mean acceptance length", number, "total", "mean_acceptance_length"),
    ]
    same = page.at("checks", "identical_to_hf")
    lines = [f"speedup over Hugging Face {page.show(_times, 'speedup_over_hf')}"] if page.at("speedup_over_hf") else []
    if same is not None:
        num_identical, num_samples = (
            page.show(_count, "checks", "identical_to_hf", key) for key in ("num_identical", "num_samples")
        )
        lines.append(f"token for token the same as Hugging Face: {num_identical} of {num_samples}")
    note = f'<p class="note">{"; ".join(lines)}</p>\n' if lines else ""
    return f"<h2>Beside each other</h2>\n{note}{_table(['', *(_SYSTEMS[name] for name in names)], rows)}"


def _category_table(page: _Page) -> str:
    system = next(iter(page.document["systems"]))
    heads = ("category", "samples", "tokens per step", "acceptance rate", "ROUGE-1", "ROUGE-L", "TPOT", "speedup")
    rows = [
        [
            _text(name),
            page.show(_count, "categories", name, "num_samples"),
            page.show(number, "categories", name, "tokens_per_step"),
            page.show(percent, "categories", name, "draft_acceptance_rate", reason=_NO_DRAFTS),
            page.show(number, "categories", name, "rouge", system, "rouge1", reason="no references"),
            page.show(number, "categories", name, "rouge", system, "rougeL", reason="no references"),
            page.show(milliseconds, "categories", name, "median_tpot_s", system, reason="outputs of one token"),
            page.show(_times, "categories", name, "speedup", reason="no drafter"),
        ]
        for name in page.document["categories"]
    ]
    return f"<h2>By category</h2>\n{_table(heads, rows)}"


# Outputs


def _outputs(page: _Page, outputs: Seq[Pieces]) -> str:
    requests = page.document["requests"]
    if not requests:
        return '<h2>Outputs</h2>\n<p class="note">No request had finished.</p>'
    counts = Counter(piece.kind for pieces in outputs for piece in pieces or ())
    legend = "".join(
        f'<li><span class="t {kind}">{kind}</span> {meaning}: {counts[kind]:,}</li>'
        for kind, meaning in TOKEN_KINDS.items()
    )
    heads = (
        '<div class="row heads" aria-hidden="true"><span>request</span><span>tokens</span><span class="extra">steps</span>'
        '<span>per step</span><span>accepted</span><span class="extra">TTFT</span><span class="extra">TPOT</span>'
        '<span class="extra">end</span></div>\n'
    )
    is_open = len(requests) <= _MAX_OPEN_OUTPUTS
    rows = [
        _output(page, i, request, pieces, is_open=is_open or i == 0)
        for i, (request, pieces) in enumerate(zip(requests, outputs, strict=True))
    ]
    return (
        f'<h2>Outputs</h2>\n{f"""<ul class="legend">{legend}</ul>""" if counts else ""}\n'
        f'<div class="outputs">\n{heads}{"".join(rows)}</div>'
    )


def _output(page: _Page, i: int, request: dict[str, Any], pieces: Pieces, *, is_open: bool) -> str:
    stats = ("requests", i, "stats")
    cells = [
        f"<span>{_label(i, request)}</span>",
        f"<span>{len(request['output_ids']):,}</span>",
        f'<span class="extra">{page.show(_count, *stats, "num_steps")}</span>',
        f"<span>{page.show(number, *stats, 'tokens_per_step')}</span>",
        f"<span>{page.show(percent, *stats, 'draft_acceptance_rate', reason=_NO_DRAFTS)}</span>",
        f'<span class="extra">{page.show(milliseconds, *stats, "ttft_s")}</span>',
        f'<span class="extra">{page.show(milliseconds, *stats, "tpot_s", reason="one token")}</span>',
        f'<span class="extra">{_text(request.get("finish_reason", "–"))}</span>',
    ]
    text = request["output_text"] if request["output_text"] is not None else _listed(request["output_ids"])
    parts = [
        ("Prompt", "prompt", _text(_shortened(_prompt(request)))),
        ("Output", "", _text(text) if pieces is None else _marked(pieces, request["finish_reason"])),
    ]
    if request.get("reference") is not None:
        parts.append(("Reference", "prompt", _text(request["reference"])))
    shown = "".join(
        f'<div class="part"><h4>{name}</h4><p class="text {style}">{content}</p></div>\n'
        for name, style, content in parts
    )
    return (
        f'<details class="output"{" open" if is_open else ""}><summary class="row">{"".join(cells)}</summary>\n'
        f"{shown}</details>\n"
    )


def _label(i: int, request: dict[str, Any]) -> str:
    if "id" in request:
        category = f" · {request['category']}" if request["category"] is not None else ""
        return _text(f"{request['id']}{category}")
    sequence = f" seq {request['return_index']}" if request["return_index"] else ""
    first_line = _prompt(request).strip().partition("\n")[0]
    return f'{i}{sequence} <span class="none">{_text(first_line[:80])}</span>'


def _prompt(request: dict[str, Any]) -> str:
    prompt: str | None = request["prompt"]
    return prompt if prompt is not None else f"token ids: {_listed(request['prompt_ids'])}"


def _shortened(text: str) -> str:
    num_left_out = len(text) - _PROMPT_START - _PROMPT_END
    if num_left_out <= 0:
        return text
    return f"{text[:_PROMPT_START]}\n[… {num_left_out:,} characters …]\n{text[-_PROMPT_END:]}"


def _marked(pieces: list[Piece], finish_reason: str) -> str:
    """The output; tokens of one kind and step are one element, so that the steps are seen."""
    html = []
    for (step, kind), run in groupby(pieces, key=lambda piece: (piece.step, piece.kind)):
        text = _text("".join(piece.text for piece in run))
        if kind == "plain":
            html.append(text)
        elif text:
            html.append(f'<span class="t {kind}" title="step {step + 1}: {kind}">{_with_line_ends(text)}</span>')
    if finish_reason == "end_id" and not pieces[-1].text:
        html.append(f'<span class="t end {pieces[-1].kind}" title="end id: {pieces[-1].kind}">end</span>')
    return "".join(html)


def _with_line_ends(text: str) -> str:
    """A line end is a token too, and would not be seen."""
    return text.replace("\n", "<b></b>\n")


# Settings and the rest


def _settings(document: dict[str, Any]) -> str:
    engine = dict(document["engine"])
    environment = {"specdec": document["specdec_version"], **engine.pop("environment")}
    cards = [
        ("Settings", document["settings"]),
        ("Engine", engine),
        ("Environment", environment),
        *([("Draft engine", document["draft_engine"])] if document["draft_engine"] else []),
    ]
    shown = "".join(
        f'<section class="card"><h3>{name}</h3><dl>{_facts(facts)}</dl></section>\n' for name, facts in cards
    )
    return f'<h2>Settings and versions</h2>\n<div class="facts">\n{shown}</div>'


def _facts(facts: dict[str, Any], prefix: str = "") -> str:
    """Keys as in the JSON, an object's with its own in front; nulls are left out."""
    rows = []
    for key, value in facts.items():
        if isinstance(value, dict):
            rows.append(_facts(value, f"{prefix}{key}."))
        elif value is not None and value != []:
            shown = (
                value if isinstance(value, str) else f"{value:.3g}" if isinstance(value, float) else json.dumps(value)
            )
            rows.append(f"<dt>{_text(prefix + key)}</dt><dd>{_text(shown)}</dd>")
    return "".join(rows)


def _definitions() -> str:
    words = "".join(f"<dt>{name}</dt><dd>{meaning}</dd>" for name, meaning in _DEFINITIONS.items())
    return (
        '<h2>What the words mean</h2>\n<details class="fold"><summary>Definitions</summary>\n'
        f'<dl class="words">{words}</dl></details>'
    )


def _footer(document: dict[str, Any]) -> str:
    version = document["specdec_version"] or "(not installed)"
    return (
        f"<footer>Made by specdec {_text(version)} from the document that "
        f"<code>specdec {_text(document['command'])} --json</code> prints (schema {document['schema_version']}). A dash "
        "stands for what there was nothing to measure of.</footer>"
    )
