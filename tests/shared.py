"""Files that are made once in a test run, for all of its workers: by whichever asks first, while the others wait."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from tiny import build_tiny

from runtime.checkpoint.checksums import config_digest, record_files
from runtime.checkpoint.config import as_json


def shared_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of this test run, the same for all of its workers."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None takes one out. `a__b` is key `b` in the object `a`."""
    data = json.loads(path.read_text())
    for key, value in changes.items():
        *outer, last = key.split("__")
        target = data
        for name in outer:
            target = target[name]
        if value is None:
            del target[last]
        else:
            target[last] = value
    if "config_digest" in data:  # an engine that was built so
        data["config_digest"] = config_digest(data)
    path.write_text(json.dumps(data))


MakeEngineDir = Callable[..., Path]
"""Type of the fixture `make_engine_dir`."""


def record_anew(engine_dir: Path) -> None:
    """Have an engine that a test has changed pass for one that was built so."""
    config = json.loads((engine_dir / "config.json").read_text())
    config["files"] = [as_json(record) for record in record_files(engine_dir)]
    config["config_digest"] = config_digest(config)
    (engine_dir / "config.json").write_text(json.dumps(config))


def once(directory: Path, make: Callable[[Path], object]) -> Path:
    """`directory`, made elsewhere by `make` and put there whole. It belongs to everybody: copy it to change it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{directory}.lock"):
        if not directory.exists():
            with tempfile.TemporaryDirectory(dir=directory.parent) as work_dir:
                make(Path(work_dir) / directory.name)
                (Path(work_dir) / directory.name).rename(directory)
    return directory


def shared_engine(engines_dir: Path, model_dir: Path, **build: Any) -> Path:
    """The engine directory of a model's files, named after them and the settings, which are `build_tiny`'s.

    A copy of the model is beside it.
    """
    name = hashlib.sha256(repr(sorted(build.items())).encode())
    for path in sorted(model_dir.iterdir()):
        name.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())

    def make(directory: Path) -> None:
        shutil.copytree(model_dir, directory / "model")
        build_tiny(directory / "model", directory, **build)

    return once(engines_dir / name.hexdigest()[:16], make) / "engine"
