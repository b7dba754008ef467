"""The flags of drafters, made of their descriptions (`runtime/drafters/specs.py`), and written as `tune` recommends."""

import dataclasses
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from commands.options.shared import LEADER, SPECULATION, option
from runtime.drafters.spec import DrafterSpec, Setting, fields_of
from runtime.drafters.specs import DRAFTERS
from runtime.drafters.speculation import Speculation


def as_flag(name: str) -> str:
    """`ngram_config` as it is written on the command line."""
    return f"--{name.replace('_', '-')}"


def config_flag(spec: type[DrafterSpec]) -> str:
    """The flag that chooses the drafter."""
    return as_flag(spec.description.flag)


def example_of(spec: type[DrafterSpec]) -> str:
    """The flag that chooses the drafter, with a value: `--ngram-config [10,2,[0]]`."""
    return f"{config_flag(spec)} {spec.description.form.example}"


def algorithm_flag(spec: type[DrafterSpec]) -> str:
    """The flag that chooses the drafter in leader mode, with its value."""
    return f"--spec-decode-algo {spec.description.algorithm}"


def users_of(flag: str) -> list[type[DrafterSpec]]:
    """The drafters that have a setting with this flag, `ngram_pool`."""
    return [spec for spec in DRAFTERS.values() if any(one.flag == flag for one in spec.settings().values())]


def leader_users(flag: str) -> list[type[DrafterSpec]]:
    """The drafters that have a setting with this flag of leader mode, `max_matching_ngram_size`."""
    return [spec for spec in DRAFTERS.values() if any(one.leader_flag == flag for one in spec.settings().values())]


def leader_settings() -> dict[str, Setting]:
    """The flags of leader mode, each with a setting that has it."""
    settings = [setting for spec in DRAFTERS.values() for setting in spec.settings().values()]
    return {flag: one for one in reversed(settings) if (flag := one.leader_flag) is not None}


def _make_group(name: str, flags: dict[str, Any]) -> Any:
    """A group of options, each None if it is not given."""
    fields = [(flag, kind, dataclasses.field(default=None)) for flag, kind in flags.items()]
    return dataclasses.make_dataclass(name, fields, frozen=True, namespace={"__doc__": _make_group.__doc__})


def _flags_of(specs: Iterable[type[DrafterSpec]]) -> dict[str, Any]:
    """Flags of V1: for each drafter the one that chooses it and those of its settings."""
    flags: dict[str, Any] = {}
    for spec in specs:
        flags[spec.description.flag] = Annotated[str | None, _config_option(spec)]
        hints = get_type_hints(spec)
        for field in fields_of(spec):
            setting = spec.settings()[field.name]
            if setting.flag is not None:
                kind = Path | None if setting.is_path else hints[field.name] | None
                flags.setdefault(setting.flag, Annotated[kind, _setting_option(setting, field)])
    return flags


def _leader_flags_of(specs: Iterable[type[DrafterSpec]]) -> dict[str, Any]:
    """Flags of leader mode that give the drafters' settings."""
    flags: dict[str, Any] = {}
    for spec in specs:
        hints = get_type_hints(spec)
        for field in fields_of(spec):
            setting = spec.settings()[field.name]
            if setting.leader is not None:
                kind = str | None if setting.is_path else hints[field.name] | None
                flags.setdefault(setting.leader.name, Annotated[kind, _leader_option(setting, field)])
    return flags


def _config_option(spec: type[DrafterSpec]) -> Any:
    described = spec.description
    return option(
        SPECULATION,
        f"{described.help}: {described.form.help}{described.note}",
        shown="no drafter",
        metavar=described.form.metavar,
    )


def _setting_option(setting: Setting, field: "dataclasses.Field[Any]") -> Any:
    bounds = {"metavar": "NAME"} if setting.at_least is None and not setting.is_path else {"min": setting.at_least}
    return option(SPECULATION, setting.help, shown=not setting.is_path and str(field.default), **bounds)


def _leader_option(setting: Setting, field: "dataclasses.Field[Any]") -> Any:
    assert setting.leader is not None
    shown = setting.leader.shown or (not setting.is_path and str(field.default))
    return option(LEADER, setting.leader.help, shown=shown, min=setting.at_least, max=setting.leader.at_most)


if TYPE_CHECKING:

    class DrafterFlags:
        """Flags of all drafters, by their Python names."""

        def __getattr__(self, name: str) -> Any: ...

    class TunedFlags(DrafterFlags):
        """Without drafters of the user's own."""

    class LeaderDrafterFlags(DrafterFlags):
        """Flags of leader mode (V2)."""
else:
    DrafterFlags = _make_group("DrafterFlags", _flags_of(DRAFTERS.values()))
    TunedFlags = _make_group("TunedFlags", _flags_of(spec for spec in DRAFTERS.values() if spec.description.is_tuned))
    LeaderDrafterFlags = _make_group("LeaderDrafterFlags", _leader_flags_of(DRAFTERS.values()))


def chooses_drafter(flags: Any) -> bool:
    """True if one of these flags chooses a drafter."""
    given = {field.name for field in dataclasses.fields(flags) if getattr(flags, field.name) is not None}
    return any(spec.description.flag in given for spec in DRAFTERS.values())


def written_flags(speculation: Speculation, device_ids: tuple[int, ...]) -> str:
    """Flags with which `run` drafts in this way, with the target on these devices."""
    flags: dict[str, str] = {}
    for drafter in speculation:
        own: dict[str, str] = {}
        for field in fields_of(drafter):
            setting, value = drafter.settings()[field.name], getattr(drafter, field.name)
            if setting.flag is not None and value != field.default:
                (flags if field.default is dataclasses.MISSING else own)[setting.flag] = str(value)  # a model first
        flags[drafter.description.flag] = drafter.description.form.write(drafter, device_ids)
        flags |= own
    if len(speculation.drafters) > 1:
        flags["drafters"] = ",".join(speculation.names)
    if speculation.draft_len_mode == "auto":
        flags["draft_len_mode"] = "auto"
    return " ".join(f"{as_flag(name)} {shlex.quote(value)}" for name, value in flags.items())
