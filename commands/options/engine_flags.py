"""Flags of a model's engine, made from its options' descriptions (`runtime/builder/engine_options.py`)."""

from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args, get_origin

from commands.output.help import KV_CACHE, MODEL, QUANTIZATION, RUNTIME, SPECULATION, option
from runtime.builder.engine_options import (
    OPTIONS,
    EngineOptions,
    FlagGroup,
    bounds_of,
    draft_output_of,
    value_of,
    words_of,
)
from runtime.checkpoint.config import MAX_SEQ_LEN, USUAL_MAX_DRAFT_LEN, IntFormat
from runtime.drafters.heads.head_config import DraftOutputSettings
from runtime.util.errors import UsageError

_PANELS = {
    "quantization": QUANTIZATION,
    "activations": QUANTIZATION,
    "kv_cache_dtype": KV_CACHE,
    "max_draft_len": SPECULATION,
    "self_draft": SPECULATION,
}
"""Panels of flags in the help of `convert` and `build`, where that is not Runtime."""


def engine_flag(name: str, panel: str, *, shown: str | bool | None = None, **others: Any) -> Any:
    """The flag of an option, with its help, its range and its default. `others` are Typer's settings in which a command
    differs.
    """
    described, bounds = OPTIONS[name][1], bounds_of(name)
    limits: dict[str, Any] = {"metavar": described.metavar or ("NAME" if words_of(name) else None)}
    if bounds is not None:
        limits |= {"min": int(bounds.least), "max": None if bounds.most > 2**53 else int(bounds.most)}
    shown = described.shown_default if shown is None else shown
    return option(panel, described.help, shown=shown, **limits | others)


def _kind(name: str) -> Any:
    """Type of an option's flag: a set of words, a number or a text."""
    hint = OPTIONS[name][0]
    if words := tuple(words_of(name)):
        return Literal[words]
    inner = _plain(hint)
    (kind,) = (one for one in map(_plain, get_args(inner) or (inner,)) if one not in (NoneType, Path))
    return kind


def _plain(hint: Any) -> Any:
    """A type without its metadata."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


class _Options:
    """A group of flags of an engine's options; a flag is None if not given."""

    def check(self) -> None:
        """UsageError for activations in int8 or int16 beside `--quantization fp8`, whose weights are no integers."""
        options = self.options
        activations = options.get("activations")
        if options.get("quantization") == "fp8" and activations not in (None, "float"):
            raise UsageError(
                f"`--activations {activations}` needs weights that are integers: `--quantization` fp8",
                hint="leave it out",
            )

    @property
    def options(self) -> EngineOptions:
        """The options whose flags are given, with the values that `LLM` has for their words."""
        given = {name: value_of(name, value) for name, value in vars(self).items() if name in OPTIONS}
        return cast(EngineOptions, {name: given[name] for name in given if getattr(self, name) is not None})


def _make_flags(group: FlagGroup, panel: str | None, **differing: dict[str, Any]) -> Any:
    """A group of options: the flags of a group of the descriptions; None if not given. They are in one panel, or in the
    panels of `_PANELS`. `differing` are arguments of `engine_flag`, by the name of the option.
    """
    flags = []
    for name, (_, described) in OPTIONS.items():
        if group in described.flags:
            place = panel or _PANELS.get(name, RUNTIME)
            flag = engine_flag(name, place, **differing.get(name, {}))
            flags.append((name, Annotated[_kind(name) | None, flag], field(default=None)))
    return make_dataclass("EngineFlags", flags, bases=(_Options,), frozen=True)


if TYPE_CHECKING:

    @dataclass(frozen=True)
    class _ModelFlags(_Options):
        def __getattr__(self, name: str) -> Any: ...

    _DraftFlags = _ModelFlags
    ConvertEngineOptions = _ModelFlags
    BuildEngineOptions = _ModelFlags
else:
    _ModelFlags = _make_flags("model", MODEL)
    _DraftFlags = _make_flags("drafts", SPECULATION)
    ConvertEngineOptions = _make_flags("convert", None)
    BuildEngineOptions = _make_flags(
        "build",
        None,
        max_seq_len={"max": MAX_SEQ_LEN},
        max_draft_len={"shown": f"{USUAL_MAX_DRAFT_LEN}; 0 with `--speculative-decoding-mode none`"},
        self_draft={"shown": "none"},
    )


@dataclass(frozen=True)
class ModelEngineOptions(_ModelFlags):
    """Options of the engine that is made from a model; None if not given."""

    no_cache: Annotated[bool, option(MODEL, "Build a new engine for the model and discard it.", "--no-cache")] = False

    def changed(self, **options: Any) -> "ModelEngineOptions":
        """A copy with other values for some of these options."""
        return replace(self, **options)

    @property
    def copy(self) -> IntFormat | None:
        """Number format of the self-draft copy; None if no copy is asked for."""
        return self.options.get("self_draft")


@dataclass(frozen=True)
class DraftOutputOptions(_DraftFlags):
    """Options of the output layer that drafts; None if not given."""

    @property
    def settings(self) -> DraftOutputSettings:
        return draft_output_of(self.options)
