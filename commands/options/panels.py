"""The panels of `--help`, in the order of all commands."""

from typing import Any

INPUT, OUTPUT, SPECULATION, SAMPLING = "Input", "Output", "Speculation", "Sampling"
KV_CACHE, RUNTIME, LEADER = "KV cache", "Runtime", "Leader mode (V2)"
PANELS = (INPUT, RUNTIME, SPECULATION, SAMPLING, KV_CACHE, LEADER, OUTPUT)


def sort_by_panel(params: list[Any]) -> list[Any]:
    """A command's parameters in the order of their panels; arguments and what has no panel first."""
    places = {panel: i for i, panel in enumerate(PANELS)}
    return sorted(params, key=lambda param: places.get(getattr(param, "rich_help_panel", None) or "", -1))
