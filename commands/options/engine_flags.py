"""Flags of a model's engine, made of its options' descriptions (`runtime/builder/engine_options.py`)."""

from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args, get_origin

from commands.output.help import LEADER, SPECULATION, option
from runtime.builder.engine_options import (
    OPTIONS,
    EngineOptions,
    FlagGroup,
    bounds_of,
    draft_output_of,
    value_of,
    words_of,
)
from runtime.checkpoint.config import IntFormat, QuantFormat
from runtime.drafters.heads.head_config import DraftOutputSettings
from runtime.util.errors import UsageError


def engine_flag(name: str, panel: str, *, shown: str | bool | None = None, more: str = "", **others: Any) -> Any:
    """The flag of an option, with its help, its range and its default. `more` is added to the help, and says what a
    command does if the flag is not given.
    """
    described, bounds = OPTIONS[name][1], bounds_of(name)
    limits: dict[str, Any] = {"metavar": described.metavar or ("NAME" if words_of(name) else None)}
    if bounds is not None:
        limits |= {"min": int(bounds.least), "max": None if bounds.most > 2**53 else int(bounds.most)}
    return option(
        panel, described.help + more, shown=described.shown_default if shown is None else shown, **limits | others
    )


def _kind(name: str) -> Any:
    """Type of an option's flag: a set of words, a number or a text."""
    hint = OPTIONS[name][0]
    if words := tuple(words_of(name)):
        return Literal[words]
    (kind,) = (one for one in (_plain(one) for one in _members(hint)) if one not in (NoneType, Path))
    return kind


def _members(hint: Any) -> tuple[Any, ...]:
    """The members of a type: `(int, None)` for `int | None`, also if the type has metadata."""
    inner = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return get_args(inner) or (inner,)


def _plain(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _make_flags(group: FlagGroup, panel: str, more: str = "") -> Any:
    """A group of options: the flags of a group of the descriptions; None if not given."""
    flags = [
        (name, Annotated[_kind(name) | None, engine_flag(name, panel, more=more)], field(default=None))
        for name, (_, described) in OPTIONS.items()
        if described.flags == group
    ]
    return make_dataclass("EngineFlags", flags, frozen=True)


def _given(group: Any) -> dict[str, Any]:
    """The options whose flags are given, by the names that `LLM` has for them."""
    return {name: value_of(name, value) for name, value in vars(group).items() if name in OPTIONS and value is not None}


if TYPE_CHECKING:

    @dataclass(frozen=True)
    class _EngineFlags:
        def __getattr__(self, name: str) -> Any: ...

    _DraftFlags = _EngineFlags
else:
    _EngineFlags = _make_flags("engine", LEADER, " For `--model-dir`'s engine.")
    _DraftFlags = _make_flags("drafts", SPECULATION)


@dataclass(frozen=True)
class ModelEngineOptions(_EngineFlags):
    """Options of the engine that is made from a model; None if not given."""

    no_cache: Annotated[bool, option(LEADER, "Build a new engine for `--model-dir` and discard it.", "--no-cache")] = (
        False
    )

    def check(self) -> None:
        """UsageError for formats that do not fit together."""
        check_activations("`--quantization`", self.options.get("quantization"), self.activations)

    def changed(self, **options: Any) -> "ModelEngineOptions":
        """A copy with other values for some of these options."""
        return replace(self, **options)

    @property
    def options(self) -> EngineOptions:
        """The options that are not None."""
        return cast(EngineOptions, _given(self))

    @property
    def copy(self) -> IntFormat | None:
        """Format of the copy for self-drafting; None where none is asked for."""
        return self.options.get("self_draft")


@dataclass(frozen=True)
class DraftOutputOptions(_DraftFlags):
    """Options of the output layer that drafts; None if not given."""

    @property
    def options(self) -> EngineOptions:
        """The options that are not None."""
        return cast(EngineOptions, _given(self))

    @property
    def settings(self) -> DraftOutputSettings:
        return draft_output_of(self.options)


def check_activations(flag: str, qformat: QuantFormat | None, activations: str | None) -> None:
    """UsageError for integer activations with weights that are not integers; `flag` sets the weights' format."""
    if qformat == "fp8" and activations not in (None, "float"):
        raise UsageError(
            f"`--activations {activations}` needs weights that are integers: {flag} fp8", hint="leave it out"
        )
