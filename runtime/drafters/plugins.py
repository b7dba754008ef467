"""Drafters of other packages: classes that installed packages name in the entry point group `specdec.drafters`.

A package with the lines below in its pyproject.toml adds a drafter; its class is described like the classes of
`runtime.drafters.specs`. For a package that cannot be used there is a warning of one sentence, and everything else
works.

    [project.entry-points."specdec.drafters"]
    echo = "specdec_echo:EchoDrafter"
"""

import dataclasses
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from runtime.drafters.lists import Devices, ListForm
from runtime.drafters.spec import DRAFTERS, DrafterSpec
from runtime.util.errors import SpecDecError, SpecDecWarning

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "specdec.drafters"
_NOT_NAMES = {"auto", "chain", "none", "predicted", "corpus"}
"""Words that are not allowed as names: they stand for something else in lists of drafters and in counts by drafter."""
_TYPES = {int, float, bool, str, Path, NoneType}
_problems: list[str] = []


def load_plugins() -> None:
    """Import the drafters of installed packages into `DRAFTERS`; `tell_problems` warns of those left out."""
    for entry in _entry_points():
        module = sys.modules.get(entry.module)
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            continue  # the package is being imported now, and has asked for this module: its classes follow
        before = dict(DRAFTERS)
        try:
            _check_class(entry.load())
            for name in DRAFTERS.keys() - before.keys():
                _check(DRAFTERS[name], before)
        except (Exception, SystemExit) as error:
            DRAFTERS.clear()
            DRAFTERS.update(before)
            _problems.append(f"drafter `{entry.name}` of another package is left out ({entry.value}): {_said(error)}")


def tell_problems() -> None:
    """Warn of each package whose drafter is left out, once."""
    while _problems:
        warnings.warn(_problems.pop(0), SpecDecWarning, stacklevel=2)


def _entry_points() -> "list[EntryPoint]":
    """The entries of the group, sorted by name; without any, `importlib.metadata` is not imported."""
    if not any(_may_name_drafters(path) for path in _entry_files()):
        return []
    from importlib.metadata import entry_points

    return sorted(set(entry_points(group=GROUP)), key=lambda entry: (entry.name, entry.value))


def _entry_files() -> Iterator[Path]:
    """The files of installed packages that list entry points."""
    for directory in map(Path, dict.fromkeys(sys.path)):
        if directory.is_dir():
            yield from directory.glob("*.dist-info/entry_points.txt")
            yield from directory.glob("*.egg-info/entry_points.txt")


def _may_name_drafters(path: Path) -> bool:
    try:
        return GROUP.encode() in path.read_bytes()
    except OSError:
        return False


def _said(error: BaseException) -> str:
    """The error's message, in one line."""
    text = error.message if isinstance(error, SpecDecError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def _check_class(spec: Any) -> None:
    """SpecDecError unless `spec` is a drafter's class."""
    if not isinstance(spec, type) or not issubclass(spec, DrafterSpec) or "description" not in vars(spec):
        raise SpecDecError(f"this is not a `DrafterSpec` with a `description`: {spec!r}")


def _check(spec: type[DrafterSpec], others: dict[str, type[DrafterSpec]]) -> None:
    """SpecDecError for an incomplete class or a bad name, or if one of the `others` has its flags or algorithm."""
    described, abstract = spec.description, sorted(spec.__abstractmethods__)
    if not dataclasses.is_dataclass(spec) or abstract:
        raise SpecDecError(f"the class {spec.__name__} lacks {', '.join(abstract) or '`@dataclass(frozen=True)`'}")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", described.name):
        raise SpecDecError(f"a drafter's name may have small letters, digits and hyphens only: {described.name!r}")
    if described.name in _NOT_NAMES:
        raise SpecDecError(f"a drafter's name is a word that stands for something else: {described.name}")
    if spec.is_lookup and not isinstance(described.form, ListForm):
        raise SpecDecError(f"a lookup's `form` must be a `ListForm`: {described.form}")
    algorithms = {other.description.algorithm for other in others.values()} - {None}
    if described.algorithm in algorithms:
        raise SpecDecError(f"another drafter has this algorithm: {described.algorithm}")
    _check_settings(spec, others)


def _check_settings(spec: type[DrafterSpec], others: dict[str, type[DrafterSpec]]) -> None:
    """SpecDecError for a flag that does not begin with the drafter's name and belongs to no other drafter's setting, or
    for a type that flags or documents do not support.
    """
    start = spec.description.name.replace("-", "_") + "_"
    settings = [one for other in others.values() for one in other.settings().values()]
    shared = {one.flag for one in settings} | {one.leader_flag for one in settings}
    taken = {other.description.flag for other in others.values()}
    own = spec.settings()
    flags = {one.flag for one in own.values()} | {one.leader_flag for one in own.values()}
    for flag in sorted(one for one in flags - shared | {spec.description.flag} if one is not None):
        if not flag.startswith(start) or flag in taken | shared:
            raise SpecDecError(f"a drafter's own flag must begin with `{start}` and belong to no other drafter: {flag}")
    hints = get_type_hints(spec)
    for name in own:
        options = get_args(hints[name]) if get_origin(hints[name]) in (Union, UnionType) else (hints[name],)
        if hints[name] != Devices and not all(map(_has_flag, options)):
            raise SpecDecError(f"the setting `{name}` has a type that no flag can have: {hints[name]}")


def _has_flag(hint: Any) -> bool:
    return hint in _TYPES or (get_origin(hint) is Literal and all(isinstance(value, str) for value in get_args(hint)))
