"""The page of `specdec tune --report`."""

from typing import Any

from commands.output.html.page import Bars, page, with_bits
from runtime.checkpoint.config import InEightBits

_MOST_SHOWN = 12
_DEFINITIONS = {
    "replayed": "recorded outputs run through a drafter, without a model: it counts what would have been accepted",
    "predicted": "time by the counts of the replay and the engine's step costs, scaled by measured ÷ predicted without "
    "a drafter",
    "measured": "wall time on the engine: the sum over batches of the median over rounds",
    "speedup": "measured time without a drafter ÷ with this one: same engine, same requests, taking turns",
    "tokens per step": "generated tokens ÷ steps of the target, the one that computes the prompt included",
    "acceptance rate": "draft tokens kept ÷ draft tokens sent to the target",
}


def tune_page(document: dict[str, Any], use: str | None, in_eight_bits: InEightBits | None = None) -> str:
    """The page. `use` is the command with the recommended drafter; None if nothing was timed."""
    engine, timed = document["engine"], document["timed"] or []
    return page(
        "tune.html",
        document,
        f"{with_bits(engine)}: {_finding(document)}" if engine else _finding(document),
        cards={"Settings": document["settings"]} | ({"Engine": engine} if engine else {}),
        definitions=_DEFINITIONS,
        use=use,
        in_eight_bits=in_eight_bits,
        best=_place_of_best(document),
        timed=[_bars(one, timed[0]) for one in timed],
        num_shown=min(len(document["candidates"]), _MOST_SHOWN),
    )


def _place_of_best(document: dict[str, Any]) -> int | None:
    """Index in `timed` of the recommended candidate."""
    if document["recommended"] is None:
        return None
    return next(i for i, one in enumerate(document["timed"]) if one["flags"] == document["recommended"]["flags"])


def _finding(document: dict[str, Any]) -> str:
    place = _place_of_best(document)
    if place is None:
        return f"{len(document['candidates']):,} candidates, replayed and not timed"
    best = document["timed"][place]
    if best["drafter"] is None:
        return "no drafter is faster by more than noise"
    return f"{best['label']} is {best['measured_speedup']:.2f}x as fast as no drafter"


def _bars(one: dict[str, Any], none: dict[str, Any]) -> Bars:
    """Bars of the predicted and the measured time of a timed candidate, beside the time without a drafter (`none`)."""
    times = [("predicted", one["predicted_s"]), ("measured", one["measured_s"])]
    shown = [
        (name, name, seconds, f"{seconds:,.2f} s ({none[f'{name}_s'] / seconds:.2f}x)")
        for name, seconds in times
        if seconds is not None
    ]
    return Bars(one["label"], shown, "" if one["predicted_s"] is not None else "cannot be predicted: it was run")
