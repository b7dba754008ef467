"""Profiles: `tune`'s recommendation for an engine, in a file that other commands and `LLM` read."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime import specdec_version
from runtime.checkpoint.bundle import Bundle
from runtime.checkpoint.checksums import document_digest
from runtime.checkpoint.config import EngineConfig, Measure, Share, Size, as_json, parse
from runtime.checkpoint.resolve import files_of_model, resolve_model
from runtime.drafters.spec import DrafterSpec, DraftLenMode, fields_of
from runtime.drafters.specs import DRAFTERS, AnySpec
from runtime.drafters.speculation import Speculation
from runtime.util.cache import PROFILES, cache_dir, make_cache_dir, unwritable
from runtime.util.digests import digest, file_digest
from runtime.util.errors import SpecDecError, UsageError
from runtime.util.files import write_json
from runtime.util.reading import parse_json, read_utf8

PROFILE_FORMAT_VERSION = 3  # 2: without a digest
_IDENTITY = ("pretrained_config", "dtype", "build_config", "environment", "vocab_size")
_CHAIN = "chain"
_AGAIN = "tune again"


@dataclass(frozen=True)
class ProfileEngine:
    """The engine that the profile was made for; its directory is for messages only."""

    engine_dir: str
    digest: str


@dataclass(frozen=True)
class ProfileModel:
    """Model from which the profile's engine was made; the name is for messages only."""

    name: str
    digest: str
    """Digest of the model's files (`model_digest`)."""


@dataclass(frozen=True)
class Figures:
    """Measured benefit of the recommendation, and the number of prompts that ran at a time."""

    num_prompts: Size
    batch_size: Size
    tokens_per_step: Measure
    draft_acceptance_rate: Share | None
    predicted_s: Measure | None
    """Predicted seconds; None if the drafter can only be run."""
    predicted_speedup: Measure | None
    measured_s: Measure
    measured_speedup: Measure


@dataclass(frozen=True)
class _Rest:
    """A profile's file without the drafter, whose keys depend on the drafter's name."""

    engine: ProfileEngine
    draft_len_mode: DraftLenMode
    figures: Figures
    specdec_version: str | None
    model: ProfileModel | None = None
    """Model of the engine; None if `build` made the engine that was tuned."""
    digest: str = ""
    """Digest of all other fields, as they are written."""
    format_version: int = PROFILE_FORMAT_VERSION


@dataclass(frozen=True)
class Profile:
    """Recommended speculation for an engine; without drafters, speculation does not pay."""

    engine: ProfileEngine
    speculation: Speculation
    figures: Figures
    model: ProfileModel | None = None

    @property
    def drafter(self) -> AnySpec | None:
        """Drafter for `LLM.generate`."""
        return self.speculation.drafter

    @property
    def draft_len_mode(self) -> DraftLenMode:
        return self.speculation.draft_len_mode or "fixed"


def engine_digest(config: EngineConfig) -> str:
    """A digest, without measured times, that is equal for engines of one shape, built alike for one machine."""
    record = as_json(config)
    return digest([json.dumps({key: record[key] for key in _IDENTITY}, sort_keys=True)])


def write_profile(path: Path, profile: Profile) -> None:
    speculation = profile.speculation
    mode = speculation.draft_len_mode or "fixed"
    rest = _Rest(profile.engine, mode, profile.figures, specdec_version(), profile.model)
    record = dataclasses.asdict(rest) | {"drafter": drafter_record(speculation)}
    write_json(path, record | {"digest": document_digest(record, "digest")})


def drafter_record(speculation: Speculation) -> dict[str, Any] | None:
    """Name and settings of the drafter for JSON; for several drafters a list."""
    records = [_one_record(drafter) for drafter in speculation]
    if len(records) > 1:
        return {"name": _CHAIN, "drafters": records}
    return records[0] if records else None


def _one_record(drafter: DrafterSpec) -> dict[str, Any]:
    """One drafter's record. Paths are absolute, because the reader may work in another directory."""
    record = dataclasses.asdict(drafter)  # type: ignore[call-overload]  # every spec is a dataclass
    for name, setting in drafter.settings().items():
        if setting.is_path and record[name] is not None:
            record[name] = str(Path(record[name]).absolute())
    return {"name": drafter.name, **record}


def read_profile(path: Path) -> Profile:
    """Read a profile; SpecDecError for a file that is missing, damaged, of another format or not a profile."""
    data = parse_json(read_utf8(path), path)
    if not isinstance(data, dict) or "engine" not in data or "format_version" not in data:
        raise SpecDecError(f"not a profile: {path}", hint=_AGAIN, code="profile")
    recorded, found = data.get("digest"), document_digest(data, "digest")
    record = data.pop("drafter", {})
    try:
        rest = parse(_Rest, data, str(path))
        drafters = _parse_drafters(record, f"{path}: drafter")
    except SpecDecError as error:
        raise SpecDecError(error.message, hint=_AGAIN, code="profile") from error
    if recorded != found:
        raise SpecDecError(f"the profile has changed since it was written: {path}", hint=_AGAIN, code="profile")
    if rest.draft_len_mode == "auto" and not drafters:
        raise SpecDecError(
            f"the profile has no drafter for its draft_len_mode, auto: {path}", hint=_AGAIN, code="profile"
        )
    return Profile(rest.engine, Speculation(drafters, rest.draft_len_mode), rest.figures, rest.model)


def _parse_drafters(record: Any, where: str) -> tuple[DrafterSpec, ...]:
    if record is None:
        return ()
    if isinstance(record, dict) and record.get("name") == _CHAIN:
        drafters = record.get("drafters")
        if set(record) != {"name", "drafters"} or not isinstance(drafters, list) or not drafters:
            raise SpecDecError(f"`{where}` is a chain without a list of drafters: {drafters!r}")
        return tuple(_parse_one(one, f"{where} {i}") for i, one in enumerate(drafters, 1))
    return (_parse_one(record, where),)


def _parse_one(record: Any, where: str) -> DrafterSpec:
    kinds = {name: spec for name, spec in DRAFTERS.items() if spec.description.is_tuned}
    name = record.get("name") if isinstance(record, dict) else record
    kind = kinds.get(str(name)) if isinstance(record, dict) else None
    if kind is None:
        raise SpecDecError(f"`{where}` names no drafter that a profile can have ({', '.join(kinds)}): {name}")
    missing = [field.name for field in fields_of(kind) if field.name not in record]
    if missing:
        raise SpecDecError(f"`{where}` lacks the key: {missing[0]}")
    settings = {key: value for key, value in record.items() if key != "name"}
    try:
        drafter = parse(kind, settings, where)
        # JSON has no paths: the draft model of a profile is always a directory.
        return drafter if drafter.draft_model is None else drafter.with_draft_model(Path(drafter.draft_model))
    except UsageError as error:
        raise SpecDecError(f"`{where}` has numbers that no drafter can have: {settings}") from error


def model_digest(name: str) -> str:
    """A digest that is the same for a model wherever its files lie; SpecDecError if there is no such model."""
    return digest(file_digest(path) for path in files_of_model(resolve_model(name)))


def profile_for_model(path: Path, name: str) -> Profile:
    """The profile, if it was made for this model; the engine's limits may differ. SpecDecError for another model's."""
    profile = read_profile(path)
    if profile.model is None:
        raise SpecDecError(
            f"the profile was made for an engine, {profile.engine.engine_dir}, not for a model: {path}",
            hint="tune the model",
            code="profile_of_an_engine",
            engine_dir=profile.engine.engine_dir,
            model=name,
            profile=path,
        )
    if profile.model.digest != model_digest(name):
        raise SpecDecError(
            f"the profile was made for another model, {profile.model.name}, not for {name}: {path}",
            hint="tune this one",
            code="profile_of_another_model",
            model=name,
            profile=path,
        )
    return profile


def saved_profile(name: str) -> Path:
    """Path in the cache of a model's default profile, which need not exist. SpecDecError if there is no such model."""
    return cache_dir() / PROFILES / f"{model_digest(name)[:32]}.json"


def find_saved_profile(name: str) -> Path | None:
    """Path of the model's default profile, if `tune` saved one; None also for a model that does not exist."""
    if not any((cache_dir() / PROFILES).glob("*.json")):  # before any file of the model is read
        return None
    path = saved_profile(name)
    return path if path.is_file() else None


def save_profile(name: str, profile: Profile) -> Path:
    """Make the profile the model's default; returns its path. SpecDecError if the cache cannot be written."""
    path = saved_profile(name)
    try:
        make_cache_dir()
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_profile(path, profile)
    except OSError as error:
        raise unwritable(error) from error
    return path


def profile_for(path: str | Path, bundle: Bundle) -> Profile:
    """The profile, if it was made for this engine; SpecDecError otherwise."""
    profile = read_profile(Path(path))
    if profile.engine.digest != engine_digest(bundle.config):
        raise SpecDecError(
            f"the profile was made for another engine, {profile.engine.engine_dir}, not for {bundle.directory}: {path}",
            hint="tune this one",
            code="profile_of_another_engine",
            engine_dir=bundle.directory,
            profile=path,
        )
    return profile
