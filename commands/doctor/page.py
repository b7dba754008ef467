"""The page of `specdec doctor --report`."""

from typing import Any

from commands.output.html.page import Bars, page, with_bits

_DEFINITIONS = {
    "finding": "a number on the wrong side of its limit; limits are far from what noise or a busy neighbour does",
    "when built": "time of a step that `specdec build` measured on its machine; the engine predicts by it",
    "now": "the fastest of many such steps today",
}


def doctor_page(document: dict[str, Any]) -> str:
    found = [one for one in document["diagnoses"] if one["status"] == "found"]
    verdict = {0: "nothing found", 1: "1 finding"}.get(len(found), f"{len(found)} findings")
    return page(
        "doctor.html",
        document,
        f"{with_bits(document['engine'])}: {verdict}",
        cards={"Settings": document["settings"], "Engine": document["engine"]},
        definitions=_DEFINITIONS,
        found=found,
        steps=[_bars(step) for step in document["steps"]],
    )


def _bars(step: dict[str, Any]) -> Bars:
    """A step's time when the engine was built, and now."""
    rows = f"{step['batch_size']} x " if step["batch_size"] > 1 else ""
    times = (("predicted", "when built", step["built_s"]), ("measured", "now", step["now_s"]))
    return Bars(
        f"{rows}{step['num_tokens']} token{'' if step['num_tokens'] == 1 else 's'} after {step['context_len']:,}",
        [(style, name, seconds, f"{seconds * 1e3:,.2f} ms") for style, name, seconds in times],
    )
