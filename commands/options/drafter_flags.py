"""The flags of drafters, made from their descriptions (`runtime/drafters/specs.py`). Also writes a drafter's flags as
`tune` recommends them.
"""

import dataclasses
import shlex
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from commands.output.help import LEADER, SPECULATION, as_flag, config_flag, option
from runtime.drafters.spec import DrafterSpec, Setting, fields_of
from runtime.drafters.specs import DRAFTERS
from runtime.drafters.speculation import Speculation


def example_of(spec: type[DrafterSpec]) -> str:
    """The flag that chooses the drafter, with a value: `--ngram-config [10,2,[0]]`."""
    return f"{config_flag(spec)} {spec.description.form.example}"


def algorithm_flag(spec: type[DrafterSpec]) -> str:
    """The flag that chooses the drafter in leader mode, with its value."""
    return f"--spec-decode-algo {spec.description.algorithm}"


def users_of(flag: str) -> list[type[DrafterSpec]]:
    """The drafters that have a setting with this flag (`ngram_pool`), in either mode."""
    settings = {spec: spec.settings().values() for spec in DRAFTERS.values()}
    return [spec for spec, own in settings.items() if any(one.has_flag(flag) for one in own)]


def leader_settings() -> dict[str, Setting]:
    """The flags of leader mode, each with a setting that it sets."""
    settings = [setting for spec in DRAFTERS.values() for setting in spec.settings().values()]
    return {flag: one for one in reversed(settings) if (flag := one.leader_flag) is not None}


def _make_flags(name: str, specs: Iterable[type[DrafterSpec]], *, is_leader: bool = False) -> Any:
    """A group of options: for each drafter the flag that chooses it, and its settings' flags; None if not given. In
    leader mode only the settings' flags are included: there a single flag chooses among all drafters.
    """
    flags: dict[str, Any] = {}
    for spec in specs:
        if not is_leader:
            flags[spec.description.flag] = Annotated[str | None, _config_option(spec)]
        hints = get_type_hints(spec)
        for field in fields_of(spec):
            setting = spec.settings()[field.name]
            flag, path = (setting.leader_flag, str) if is_leader else (setting.flag, Path)
            if flag is not None:
                shown = _leader_option(setting, field) if is_leader else _setting_option(setting, field)
                flags.setdefault(flag, Annotated[(path if setting.is_path else hints[field.name]) | None, shown])
    fields = [(flag, kind, dataclasses.field(default=None)) for flag, kind in flags.items()]
    return dataclasses.make_dataclass(name, fields, frozen=True, namespace={"__doc__": _make_flags.__doc__})


def _config_option(spec: type[DrafterSpec]) -> Any:
    described = spec.description
    return option(
        SPECULATION,
        f"{described.help}: {described.form.help}{described.note}",
        shown="no drafter",
        check=partial(described.form.parse, flag=config_flag(spec)),
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
        """Flags of all drafters but the user's own."""

    class LeaderDrafterFlags(DrafterFlags):
        """Flags of leader mode (V2)."""
else:
    DrafterFlags = _make_flags("DrafterFlags", DRAFTERS.values())
    TunedFlags = _make_flags("TunedFlags", (spec for spec in DRAFTERS.values() if spec.description.is_tuned))
    LeaderDrafterFlags = _make_flags("LeaderDrafterFlags", DRAFTERS.values(), is_leader=True)


def chooses_drafter(flags: Any) -> bool:
    """True if one of these flags chooses a drafter."""
    given = {field.name for field in dataclasses.fields(flags) if getattr(flags, field.name) is not None}
    return any(spec.description.flag in given for spec in DRAFTERS.values())


def written_flags(speculation: Speculation, device_ids: tuple[int, ...]) -> str:
    """Flags with which `run` drafts by this `speculation`, with the target on these devices."""
    flags: dict[str, str] = {}
    for drafter in speculation:
        own: dict[str, str] = {}
        for field in fields_of(drafter):
            setting, value = drafter.settings()[field.name], getattr(drafter, field.name)
            if setting.flag is not None and value != field.default:
                (flags if setting.names_model else own)[setting.flag] = str(value)  # a model first
        flags[drafter.description.flag] = drafter.description.form.write(drafter, device_ids)
        flags |= own
    if len(speculation.drafters) > 1:
        flags["drafters"] = ",".join(speculation.names)
    if speculation.draft_len_mode == "auto":
        flags["draft_len_mode"] = "auto"
    return " ".join(f"{as_flag(name)} {shlex.quote(value)}" for name, value in flags.items())
