"""Profiles: what `tune` recommends for an engine, in a file that `run` and `summarize` read."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from runtime.bundle import Bundle
from runtime.cache import digest
from runtime.checksums import document_digest
from runtime.config import Between, EngineConfig, Measure, Size, as_json, parse
from runtime.drafters.settings import (
    ChainDrafter,
    DrafterSettings,
    DraftLenMode,
    DraftTargetDrafter,
    NgramDrafter,
    OneDrafter,
    SelfDrafter,
    SuffixDrafter,
)
from runtime.errors import SpecDecError, UsageError
from runtime.files import write_json
from runtime.reading import parse_json, read_utf8
from runtime.version import specdec_version

PROFILE_FORMAT_VERSION = 3  # 2: without a digest
_IDENTITY = ("pretrained_config", "dtype", "build_config", "environment", "vocab_size")
_KINDS: dict[str, type[OneDrafter]] = {
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
    "draft-target": DraftTargetDrafter,
    "self": SelfDrafter,
}
_CHAIN = "chain"
_PATHS = ("corpus", "model")
_AGAIN = "tune again"


@dataclass(frozen=True)
class ProfileEngine:
    """Which engine it is for; the directory is for messages only."""

    engine_dir: str
    digest: str


@dataclass(frozen=True)
class Figures:
    """What the recommendation was worth when it was made, on how many prompts at a time."""

    num_prompts: Size
    batch_size: Size
    tokens_per_step: Measure
    draft_acceptance_rate: Annotated[float, Between(0, 1)] | None
    predicted_s: Measure | None
    """None where it could only be run."""
    predicted_speedup: Measure | None
    measured_s: Measure
    measured_speedup: Measure


@dataclass(frozen=True)
class _Rest:
    """A profile's file without its drafter, whose form depends on its name."""

    engine: ProfileEngine
    draft_len_mode: DraftLenMode
    figures: Figures
    specdec_version: str | None
    digest: str = ""
    """Of all the rest, as it was written."""
    format_version: int = PROFILE_FORMAT_VERSION


@dataclass(frozen=True)
class Profile:
    """A recommended drafter, or None for none, and the length of its drafts."""

    engine: ProfileEngine
    drafter: DrafterSettings | None
    draft_len_mode: DraftLenMode
    figures: Figures


def engine_digest(config: EngineConfig) -> str:
    """The same for engines of the same model's shape, built alike for the same machine. Measured times do not count."""
    record = as_json(config)
    return digest([json.dumps({key: record[key] for key in _IDENTITY}, sort_keys=True)])


def write_profile(path: Path, profile: Profile) -> None:
    rest = _Rest(profile.engine, profile.draft_len_mode, profile.figures, specdec_version())
    record = dataclasses.asdict(rest) | {"drafter": drafter_record(profile.drafter)}
    write_json(path, record | {"digest": document_digest(record, "digest")})


def drafter_record(drafter: DrafterSettings | None) -> dict[str, Any] | None:
    """Its name and settings, for JSON; those of each drafter of a chain."""
    if drafter is None:
        return None
    if isinstance(drafter, ChainDrafter):
        return {"name": _CHAIN, "drafters": [drafter_record(one) for one in drafter.drafters]}
    name = next(name for name, kind in _KINDS.items() if isinstance(drafter, kind))
    record = {"name": name, **dataclasses.asdict(drafter)}
    # Whoever reads it may be elsewhere.
    return record | {key: str(Path(record[key]).absolute()) for key in _PATHS if record.get(key) is not None}


def read_profile(path: Path) -> Profile:
    """SpecDecError for a file that is missing, damaged, of another format or something else."""
    data = parse_json(read_utf8(path), path)
    if not isinstance(data, dict) or "engine" not in data or "format_version" not in data:
        raise SpecDecError(f"not a profile: {path}", hint=_AGAIN, fact="profile")
    recorded, found = data.get("digest"), document_digest(data, "digest")
    record = data.pop("drafter", {})
    try:
        rest = parse(_Rest, data, str(path))
        drafter = _parse_drafter(record, f"{path}: drafter")
    except SpecDecError as error:
        raise SpecDecError(error.message, hint=_AGAIN, fact="profile") from error
    if recorded != found:
        raise SpecDecError(f"the profile has changed since it was written: {path}", hint=_AGAIN, fact="profile")
    if rest.draft_len_mode == "auto" and drafter is None:
        raise SpecDecError(
            f"the profile has no drafter for its draft_len_mode, auto: {path}", hint=_AGAIN, fact="profile"
        )
    return Profile(rest.engine, drafter, rest.draft_len_mode, rest.figures)


def _parse_drafter(record: Any, where: str) -> DrafterSettings | None:
    if record is None:
        return None
    if isinstance(record, dict) and record.get("name") == _CHAIN:
        drafters = record.get("drafters")
        if set(record) != {"name", "drafters"} or not isinstance(drafters, list) or not drafters:
            raise SpecDecError(f"`{where}` is a chain without a list of drafters: {drafters!r}")
        return ChainDrafter(_parse_one(one, f"{where} {i}") for i, one in enumerate(drafters, 1))
    return _parse_one(record, where)


def _parse_one(record: Any, where: str) -> OneDrafter:
    kind = _KINDS.get(str(record.get("name"))) if isinstance(record, dict) else None
    if kind is None:
        name = record.get("name") if isinstance(record, dict) else record
        raise SpecDecError(f"`{where}` names no drafter that a profile can have ({', '.join(_KINDS)}): {name}")
    missing = [field.name for field in dataclasses.fields(kind) if field.name not in record]
    if missing:
        raise SpecDecError(f"`{where}` lacks the key: {missing[0]}")
    settings = {key: value for key, value in record.items() if key != "name"}
    try:
        return parse(kind, settings, where)
    except UsageError as error:
        raise SpecDecError(f"`{where}` has numbers that no drafter can have: {settings}") from error


def profile_for(path: str | Path, bundle: Bundle) -> Profile:
    """The profile, if it is of this engine; SpecDecError otherwise."""
    profile = read_profile(Path(path))
    if profile.engine.digest != engine_digest(bundle.config):
        raise SpecDecError(
            f"the profile is of another engine, {profile.engine.engine_dir}, and not of {bundle.directory}: {path}",
            hint="tune this one",
            fact="profile_of_another_engine",
            engine_dir=bundle.directory,
            profile=path,
        )
    return profile
