"""`--report`: an HTML page made from the document that `--json` prints, and from the outputs' tokens."""

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import groupby
from pathlib import Path
from typing import Any

from markupsafe import Markup

from commands.output.html.page import Column, area_chart, column_chart, page, positions_chart, with_bits
from commands.output.output import number, percent
from runtime.drafters.specs import DRAFTERS
from runtime.loop.lossless.results import SYSTEM_TITLES
from runtime.measure.text_steps import TOKEN_KINDS, Piece, tokens_over_time

_DEFINITIONS = {
    "tokens per step": "generated tokens ÷ steps of the target, the one that computes the prompt included",
    "acceptance rate": "draft tokens kept ÷ draft tokens sent to the target, after the cut at end id, stop word and "
    "budget",
    "mean acceptance length": "1 + accepted ÷ steps that carried a draft",
    "acceptance by position": "share of the drafts that reach a position whose token was accepted there",
    "speedup": "wall time without a drafter ÷ with one: same engine, same requests, same run",
    "TTFT, TPOT": "submission to first token; (end − first token) ÷ (generated − 1)",
    **{f"{kind} token": meaning for kind, meaning in TOKEN_KINDS.items()},
}
_FORCED = "forced"
_MAX_RANGES = 40
_PROMPT_START, _PROMPT_END = 3000, 1000  # characters shown of a long prompt

Pieces = list[Piece] | None
"""An output's tokens; None for an output of Hugging Face's, whose steps are not counted."""


def html_report(document: dict[str, Any], outputs: Seq[Pieces]) -> str:
    """The page. `document` is `run`'s or `summarize`'s; `outputs` has the tokens of each of its requests."""
    return page(
        "report.html",
        document,
        _title(document),
        outputs=outputs,
        cards=_cards(document),
        definitions=_DEFINITIONS,
        kinds=TOKEN_KINDS,
        counts=Counter(piece.kind for pieces in outputs for piece in pieces or ()),
        num_forced=sum(_mark(piece) == _FORCED for pieces in outputs for piece in pieces or ()),
        systems={name: SYSTEM_TITLES[name] for name in document.get("systems", ())},
        time_parts=list(_time_parts(document["total"])) if document["total"] else [],
        histogram=_histogram,
        positions=positions_chart(total["acceptance_rate_per_position"], total["num_drafts_per_position"])
        if (total := document["total"])
        else "",
        over_time=_over_time,
        prompt_of=_prompt_of,
        shortened=_shortened,
        runs=_runs,
    )


def _title(document: dict[str, Any]) -> str:
    settings, engine = document["settings"], document["engine"]
    num_requests = len(document["requests"])
    what = (
        f"{Path(settings['dataset']).name}, {num_requests} samples"
        if document["command"] == "summarize"
        else f"{num_requests} request{'s' if num_requests != 1 else ''}"
    )
    drafters = ", then ".join(_drafter(name, settings) for name in settings["drafters"]) or "no drafter"
    return f"{with_bits(engine)}, {drafters}: {what}"


def _drafter(name: str, settings: dict[str, Any]) -> str:
    """The drafter in a few words."""
    described = DRAFTERS[name].description
    record = settings[described.flag]
    if isinstance(record, str):
        return f"{described.title} {record}"
    return f"{described.title}, up to {record['max_draft_len']} tokens"


def _cards(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    engine = dict(document["engine"])
    environment = {"specdec": document["specdec_version"], **engine.pop("environment")}
    cards = {"Settings": document["settings"], "Engine": engine, "Environment": environment}
    return cards | ({"Draft engine": document["draft_engine"]} if document["draft_engine"] else {})


def _time_parts(total: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    """A part's key, its name, and its share of the time."""
    names = {"target": "target", "draft": "drafting", "host": "host", "draft_model": "of drafting, the draft model"}
    for part, name in names.items():
        time_s = total[f"{part}_time_s"]
        if time_s or part in ("target", "host"):
            yield part, name, max(time_s, 0.0) / total["wall_s"] if total["wall_s"] else 0.0


def _histogram(total: dict[str, Any]) -> Markup:
    counts, num_drafts = total["acceptance_histogram"], total["num_spec_steps"]
    titles = [
        f"{i} accepted: {count:,} of {num_drafts:,} drafts ({percent(count / num_drafts)})"
        for i, count in enumerate(counts)
    ]
    columns = [
        Column(count, f"{count:,}", str(i), title) for i, (count, title) in enumerate(zip(counts, titles, strict=True))
    ]
    label = "Steps with a draft by the number of its tokens that were accepted"
    return column_chart(columns, largest=max(counts), axis="accepted tokens of a draft", label=label)


def _over_time(outputs: Seq[Pieces]) -> Markup:
    steps = [list(Counter(p.step for p in pieces).values()) for pieces in outputs if pieces is not None]
    ranges = tokens_over_time(steps, _MAX_RANGES)
    return area_chart(
        values=[r.num_tokens / r.num_steps for r in ranges],
        names=[str(r.first) for r in ranges],
        titles=[
            f"steps {r.first}–{r.last}: {r.num_tokens:,} tokens ÷ {r.num_steps:,} steps = "
            f"{number(r.num_tokens / r.num_steps)}"
            for r in ranges
        ],
        axis="step of a request",
        label="Tokens per step as the outputs grow",
    )


def _prompt_of(request: dict[str, Any]) -> str:
    prompt: str | None = request["prompt"]
    return prompt if prompt is not None else "token ids: " + ", ".join(map(str, request["prompt_ids"]))


def _shortened(text: str) -> str:
    num_left_out = len(text) - _PROMPT_START - _PROMPT_END
    if num_left_out <= 0:
        return text
    return f"{text[:_PROMPT_START]}\n[… {num_left_out:,} characters …]\n{text[-_PROMPT_END:]}"


def _mark(piece: Piece) -> str:
    """Mark of a token: its kind, or `forced` for a drafted token that a grammar forced."""
    return _FORCED if piece.is_forced and piece.kind == "accepted" else piece.kind


def _runs(pieces: Seq[Piece]) -> Iterator[tuple[int, str, str]]:
    """The text of the tokens that belong to the same step and have the same mark."""
    for (step, mark), run in groupby(pieces, key=lambda piece: (piece.step, _mark(piece))):
        yield step, mark, "".join(piece.text for piece in run)
