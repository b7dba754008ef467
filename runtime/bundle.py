"""Engine directories: `config.json`, the compiled step of each rank and the tokenizer's files.

What stands for the step depends on the compiler: `rank0.pt2` with `rank0.safetensors`, the weights as it wants them
(aot); the model's own weights with `rank0.cache`, the compiler's cache (torch-compile); or the weights alone (none).
A compiled step is machine code: open only bundles you would run as a program.

Nothing here needs torch: what is wrong with a directory is said before torch is imported.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from runtime.cache import digest, file_digest
from runtime.config import Compiler, EngineConfig, FileRecord, parse
from runtime.errors import SpecDecError
from runtime.files import read_json
from runtime.tokenizer import SAVED, TOKENIZER_FILES

LIBRARY = "kernels.so"
_OF_TOKENIZER = frozenset({*TOKENIZER_FILES, SAVED})
# People change them: how an output ends, and how a conversation is written.
_NOT_RECORDED = frozenset({"config.json", "generation_config.json", "chat_template.jinja"})
_BUILD_AGAIN = "build it again"


def step_files(config: EngineConfig) -> list[str]:
    build = config.build_config
    kernels = [LIBRARY] if uses_kernels(build.compiler, config.environment.device) else []
    match build.compiler:
        case "aot":
            return ["rank0.pt2", "rank0.safetensors", *kernels]
        case "torch-compile":
            return ["rank0.safetensors", "rank0.cache", *kernels]
        case "none":
            return ["rank0.safetensors"]


def uses_kernels(compiler: Compiler, device: str) -> bool:
    """Whether attention is our kernel: where the step is compiled, on the CPU."""
    return compiler != "none" and device == "cpu"


@dataclass(frozen=True)
class Bundle:
    """An engine's directory, and its configuration: read once, and checked."""

    directory: Path
    config: EngineConfig


def read_bundle(engine_dir: Path) -> Bundle:
    """SpecDecError names what is missing or wrong."""
    return Bundle(engine_dir, read_engine_config(engine_dir))


def is_engine_dir(directory: Path) -> bool:
    """Whether the directory says that it is an engine's, whatever else may be wrong with it."""
    try:
        return "build_config" in read_json(directory / "config.json")
    except SpecDecError:
        return False


def read_engine_config(engine_dir: Path) -> EngineConfig:
    """Parse and check an engine directory; SpecDecError names what is missing or wrong."""
    if not engine_dir.is_dir():
        raise SpecDecError(f"engine directory does not exist: {engine_dir}", hint="build it", fact="no_engine")
    data = read_json(engine_dir / "config.json")
    if "build_config" not in data:
        raise SpecDecError(f"this is not an engine directory: {engine_dir}", hint="build one", fact="not_an_engine")
    config = parse(EngineConfig, data, str(engine_dir / "config.json"))
    if not isinstance(config.pretrained_config.get("model_type"), str):
        raise SpecDecError(f"`{engine_dir / 'config.json'}` names no `model_type`", hint=_BUILD_AGAIN, fact="engine")
    recorded = {record.name.partition("/")[0] for record in config.files}
    for name in step_files(config):
        if name not in recorded:
            raise SpecDecError(
                f"`{engine_dir / 'config.json'}` has no record of the file: {name}", hint=_BUILD_AGAIN, fact="engine"
            )
    for record in config.files:
        if record.name not in _OF_TOKENIZER:
            _check_size(engine_dir, record)
    if config.config_digest != (found := config_digest(data)):
        _raise_changed(
            engine_dir / "config.json", f"digest {found[:12]}…, built with {config.config_digest[:12] or 'none'}…"
        )
    return config


def config_digest(data: dict[str, Any]) -> str:
    """Of what `config.json` says, whatever its layout."""
    return digest([json.dumps({key: value for key, value in data.items() if key != "config_digest"}, sort_keys=True)])


def record_files(engine_dir: Path) -> tuple[FileRecord, ...]:
    """The files that are there, as they are now."""
    paths = sorted(path for path in engine_dir.rglob("*") if path.is_file())
    names = {path.relative_to(engine_dir).as_posix(): path for path in paths}
    return tuple(
        FileRecord(name, path.stat().st_size, file_digest(path))
        for name, path in names.items()
        if name not in _NOT_RECORDED
    )


def check_step_files(bundle: Bundle) -> None:
    """SpecDecError unless the step's files are what was built. A file that is the same as last time is not read."""
    for record in bundle.config.files:
        if record.name not in _OF_TOKENIZER:
            _check_content(bundle.directory, record)


def check_tokenizer_files(bundle: Bundle) -> None:
    """SpecDecError unless the tokenizer is what the engine was built with."""
    for record in bundle.config.files:
        if record.name in _OF_TOKENIZER:
            _check_size(bundle.directory, record)
            _check_content(bundle.directory, record)


def _check_size(engine_dir: Path, record: FileRecord) -> None:
    path = engine_dir / record.name
    if not path.is_file():
        raise SpecDecError(f"file is missing: {path}", hint=_BUILD_AGAIN, fact="engine")
    if path.stat().st_size != record.num_bytes:
        _raise_changed(path, f"{path.stat().st_size:,} bytes, built with {record.num_bytes:,}")


def _check_content(engine_dir: Path, record: FileRecord) -> None:
    found = file_digest(engine_dir / record.name)
    if found != record.sha256:
        _raise_changed(engine_dir / record.name, f"SHA-256 {found[:12]}…, built with {record.sha256[:12]}…")


def _raise_changed(path: Path, how: str) -> NoReturn:
    raise SpecDecError(f"`{path}` has changed since the engine was built: {how}", hint=_BUILD_AGAIN, fact="engine")
