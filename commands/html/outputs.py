"""The page's outputs, one to fold open each, with their tokens marked by what they are."""

from collections import Counter
from collections.abc import Sequence as Seq
from itertools import groupby
from typing import Any

from commands.html.values import NO_DRAFTS, Page, dashes_note, escaped, integer, listed, request_time
from commands.output import number, percent
from runtime.evaluation.steps import TOKEN_KINDS, Piece

_MAX_OPEN_OUTPUTS = 3  # more than these are folded, the first left open
_HEADS = ("request", "tokens", "steps", "per step", "accepted", "TTFT", "TPOT", "end")
_EXTRA_HEADS = ("steps", "TTFT", "TPOT", "end")  # left out where the page is narrow
_PROMPT_START, _PROMPT_END = 3000, 1000  # characters shown of a long prompt

Pieces = list[Piece] | None
"""An output's tokens; None for Hugging Face's, whose steps nobody counted."""


def outputs_section(page: Page, outputs: Seq[Pieces]) -> str:
    requests = page.document["requests"]
    if not requests:
        return '<h2>Outputs</h2>\n<p class="note">No request had finished.</p>'
    counts = Counter(piece.kind for pieces in outputs for piece in pieces or ())
    legend = "".join(
        f'<li><span class="t {kind}">{kind}</span> {meaning}: {counts[kind]:,}</li>'
        for kind, meaning in TOKEN_KINDS.items()
    )
    heads = "".join(f"<span{' class=extra' if name in _EXTRA_HEADS else ''}>{name}</span>" for name in _HEADS)
    is_open = len(requests) <= _MAX_OPEN_OUTPUTS
    rows = [
        _output(page, i, request, pieces, is_open=is_open or i == 0)
        for i, (request, pieces) in enumerate(zip(requests, outputs, strict=True))
    ]
    return (
        f'<h2>Outputs</h2>\n{f"""<ul class="legend">{legend}</ul>""" if counts else ""}\n'
        f'<div class="outputs">\n<div class="row heads" aria-hidden="true">{heads}</div>\n{"".join(rows)}</div>'
        f"{dashes_note(''.join(rows))}"
    )


def _output(page: Page, i: int, request: dict[str, Any], pieces: Pieces, *, is_open: bool) -> str:
    stats = ("requests", i, "stats")
    cells = [
        f"<span>{_label(i, request)}</span>",
        f"<span>{len(request['output_ids']):,}</span>",
        f'<span class="extra">{page.show(integer, *stats, "num_steps")}</span>',
        f"<span>{page.show(number, *stats, 'tokens_per_step')}</span>",
        f"<span>{page.show(percent, *stats, 'draft_acceptance_rate', reason=NO_DRAFTS)}</span>",
        f'<span class="extra">{page.show(request_time, *stats, "ttft_s")}</span>',
        f'<span class="extra">{page.show(request_time, *stats, "tpot_s", reason="one token")}</span>',
        f'<span class="extra">{escaped(request.get("finish_reason", "–"))}</span>',
    ]
    text = request["output_text"] if request["output_text"] is not None else listed(request["output_ids"])
    parts = [
        ("Prompt", "prompt", escaped(_shortened(_prompt(request)))),
        ("Output", "", escaped(text) if pieces is None else _marked(pieces, request["finish_reason"])),
    ]
    if request.get("reference") is not None:
        parts.append(("Reference", "prompt", escaped(request["reference"])))
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
        return escaped(f"{request['id']}{category}")
    sequence = f" seq {request['return_index']}" if request["return_index"] else ""
    first_line = _prompt(request).strip().partition("\n")[0]
    return f'{i}{sequence} <span class="none">{escaped(first_line[:80])}</span>'


def _prompt(request: dict[str, Any]) -> str:
    prompt: str | None = request["prompt"]
    return prompt if prompt is not None else f"token ids: {listed(request['prompt_ids'])}"


def _shortened(text: str) -> str:
    num_left_out = len(text) - _PROMPT_START - _PROMPT_END
    if num_left_out <= 0:
        return text
    return f"{text[:_PROMPT_START]}\n[… {num_left_out:,} characters …]\n{text[-_PROMPT_END:]}"


def _marked(pieces: list[Piece], finish_reason: str) -> str:
    """The output; tokens of one kind and step are one element, so that the steps are seen."""
    html = []
    for (step, kind), run in groupby(pieces, key=lambda piece: (piece.step, piece.kind)):
        text = escaped("".join(piece.text for piece in run))
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
