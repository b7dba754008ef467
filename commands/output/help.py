"""Help: the panels of `--help`, in the order of all commands, and how a flag is declared and written."""

from collections.abc import Callable
from typing import Any

import typer

from runtime.drafters.spec import DrafterSpec

INPUT, MODEL, OUTPUT, SPECULATION, SAMPLING = "Input", "Model", "Output", "Speculation", "Sampling"
KV_CACHE, RUNTIME, LEADER, SERVER = "KV cache", "Runtime", "Leader mode (V2)", "Server"
QUANTIZATION, CLUSTER = "Quantization", "Cluster"
PANELS = (INPUT, MODEL, SERVER, CLUSTER, RUNTIME, QUANTIZATION, SPECULATION, SAMPLING, KV_CACHE, LEADER, OUTPUT)


def option(
    panel: str,
    help_text: str,
    *names: str,
    shown: str | bool = True,
    check: Callable[[str], object] | None = None,
    **others: Any,
) -> Any:
    """A flag in a panel of `--help`. `shown` is displayed in place of the default. `check` raises UsageError for a text
    that is no value of the flag, also from a variable or a file: `config show` then says the same as the command.

    Words of a choice are taken in any case, and with `-` or `_`, as `runtime.util.words` takes them from Python.
    """
    others.setdefault("case_sensitive", False)
    if check is not None:
        others["callback"] = _checked_by(check)
    return typer.Option(*names, help=help_text, rich_help_panel=panel, show_default=shown, **others)


def _checked_by(check: Callable[[str], object]) -> Callable[[str | None], str | None]:
    def checked(value: str | None) -> str | None:
        if value is not None:
            check(value)
        return value

    return checked


def sort_by_panel(params: list[Any]) -> list[Any]:
    """A command's parameters in the order of their panels; arguments and parameters without a panel come first."""
    places = {panel: i for i, panel in enumerate(PANELS)}
    return sorted(params, key=lambda param: places.get(getattr(param, "rich_help_panel", None) or "", -1))


def as_flag(name: str) -> str:
    """A setting's name as a flag: `--ngram-config` for `ngram_config`."""
    return f"--{name.replace('_', '-')}"


def config_flag(spec: type[DrafterSpec]) -> str:
    """The flag that chooses the drafter."""
    return as_flag(spec.description.flag)
