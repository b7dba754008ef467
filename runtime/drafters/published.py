"""Published draft models and heads by families of models (`published.toml`), and drafters that lie beside a model."""

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from runtime.checkpoint.resolve import name_of, read_model_config, resolve_head, weight_files
from runtime.drafters.heads.head_config import is_head, language_model, read_head
from runtime.drafters.spec import DrafterSpec
from runtime.drafters.speculation import model_drafter
from runtime.util.errors import SpecDecError

_MOST_BESIDE = 4
_SMALLER = 0.5
"""Most bytes that a draft model's weights may have, as a share of the target's."""


@dataclass(frozen=True)
class Published:
    """A drafter on the hub for a family of models."""

    repo: str
    kind: str
    family: str
    source: str
    """Page on which the drafter is published or described."""


def published_for(config: dict[str, Any], name: str) -> list[Published]:
    """Drafters for a target, by its config.json and its name, from the first family that fits."""
    text, lower = language_model(config), name.lower()
    for family in tomllib.loads((files("runtime") / "drafters" / "published.toml").read_text("utf-8"))["family"]:
        is_type = text.get("model_type") in family["model_type"] or config.get("model_type") in family["model_type"]
        is_vocabulary = text.get("vocab_size") in family.get("vocab_size", [text.get("vocab_size")])
        if is_type and is_vocabulary and family.get("target", "") in lower:
            return [
                Published(one["repo"], one["kind"], family["name"], one["source"])
                for one in family["drafters"]
                if one.get("hidden_size") in (None, text.get("hidden_size"))
                and one["repo"].rpartition("/")[2].lower() != lower
            ]
    return []


def drafters_beside(target: Path, named: Iterable[str]) -> Iterator[tuple[str, DrafterSpec]]:
    """The named drafters, and up to four drafters beside the target, each with its name: heads that were trained for a
    target of its sizes, and models, or GGUF files, of at most half its bytes whose vocabulary has its size.
    """
    config = read_model_config(target)
    listed = {target.resolve()}
    for name in named:
        places = {resolve_head(name).resolve(), Path(name).expanduser().resolve()}
        if not places & (listed - {target.resolve()}):
            yield name, model_drafter(name)
        listed |= places
    found = 0
    for path in sorted(target.parent.iterdir()) if target.parent != target else []:
        if found < _MOST_BESIDE and path.resolve() not in listed and _may_draft(path, target, config):
            found += 1
            yield name_of(path), model_drafter(name_of(path))


def _may_draft(path: Path, target: Path, config: dict[str, Any]) -> bool:
    try:
        if is_head(path):
            read_head(path).check_target(config, language_model(config).get("vocab_size"))
            return True
        if not (path.suffix.lower() == ".gguf" or (path / "config.json").is_file()):
            return False
        own = read_model_config(path)
        same = language_model(own).get("vocab_size") == language_model(config).get("vocab_size")
        return same and _num_bytes(path) <= _SMALLER * _num_bytes(target)
    except (SpecDecError, OSError):
        return False


def _num_bytes(model: Path) -> int:
    found = [model] if model.is_file() else weight_files(model)
    return sum(one.stat().st_size for one in found) or 1 << 62
