"""The page's charts: how drafts fared, tokens per step over time, and where the time went."""

from collections import Counter
from collections.abc import Sequence as Seq

from commands.html.frame import chart_card
from commands.html.outputs import Pieces
from commands.html.svg import Column, area_chart, column_chart
from commands.html.values import NO_DRAFTS, Page, integer, listed, seconds, step_time
from commands.output import number, percent
from runtime.evaluation.steps import tokens_over_time

_MAX_RANGES = 40


def charts_section(page: Page, outputs: Seq[Pieces]) -> str:
    cards = []
    if page.at("total", "num_spec_steps"):
        cards += [_histogram(page), _positions(page)]
    else:
        cards.append(chart_card("Acceptance", f"{NO_DRAFTS}: no acceptance to show", ""))
    steps = [list(Counter(p.step for p in pieces).values()) for pieces in outputs if pieces is not None]
    cards.append(_over_time(steps))
    cards.append(_time_split(page))
    return f'<h2>Drafts and steps</h2>\n<div class="charts">\n{"".join(cards)}</div>'


def _histogram(page: Page) -> str:
    counts, num_drafts = page.at("total", "acceptance_histogram"), page.at("total", "num_spec_steps")
    chart = column_chart(
        [
            Column(
                count,
                integer(count),
                str(i),
                f"{i} accepted: {count:,} of {num_drafts:,} drafts ({percent(count / num_drafts)})",
            )
            for i, count in enumerate(counts)
        ],
        largest=max(counts),
        axis="accepted tokens of a draft",
        label=f"Steps with a draft by the number of its tokens that were accepted: {listed(counts)}",
    )
    mean = page.show(number, "total", "mean_acceptance_length", reason=NO_DRAFTS)
    note = f"{page.show(integer, 'total', 'num_spec_steps')} steps with a draft; mean acceptance length {mean}"
    return chart_card("Accepted tokens of a draft", note, chart)


def _positions(page: Page) -> str:
    rates, drafts = page.at("total", "acceptance_rate_per_position"), page.at("total", "num_drafts_per_position")
    shown = ["–" if rate is None else f"{rate * 100:.0f}" for rate in rates]
    chart = column_chart(
        [
            Column(rate or 0.0, text, str(i), f"position {i}: {percent(rate)} of {num:,} drafts that are so long")
            for i, (rate, text, num) in enumerate(zip(rates, shown, drafts, strict=True), 1)
        ],
        largest=1.0,
        axis="position in the draft",
        label=f"Share of drafts whose token was accepted, by position, in percent: {listed(shown)}",
        backdrop=True,
    )
    return chart_card(
        "Acceptance by position", "% of the drafts that are so long whose token there was accepted", chart
    )


def _over_time(steps: Seq[Seq[int]]) -> str:
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
    return chart_card("Tokens per step over time", note, chart)


def _time_split(page: Page) -> str:
    wall_s = page.at("total", "wall_s")
    drafting = [("draft", "drafting")] if page.at("total", "draft_time_s") else []
    parts = [("target", "target"), *drafting, ("host", "host")]
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
    num_iterations, wall = page.show(integer, "total", "num_iterations"), page.show(seconds, "total", "wall_s")
    note = f"{num_iterations} steps of the loop in {wall}"
    return chart_card("Where the time went", note, f'<div class="split" aria-hidden="true">{bar}</div>\n{table}\n')


def _time_row(page: Page, part: str, name: str, share: float) -> str:
    swatch = f'<span class="swatch {part}"></span>' if part != "draft_model" else ""
    head = f'<th scope="row"{"" if swatch else " class=inner"}>{swatch}{name}</th>'
    step = page.show(step_time, "total", f"{part}_time_per_step_s")
    whole = page.show(seconds, "total", f"{part}_time_s")
    return f"<tr>{head}<td>{step}</td><td>{whole}</td><td>{percent(share)}</td></tr>"
