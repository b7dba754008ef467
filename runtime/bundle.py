"""Engine directories: `config.json`, the compiled step of each rank and the tokenizer's files.

What stands for the step depends on the compiler: `rank0.pt2` with `rank0.safetensors`, the weights as it wants them
(aot); the model's own weights with `rank0.cache`, the compiler's cache (torch-compile); or the weights alone (none).
A compiled step is machine code: open only bundles you would run as a program.

Nothing here needs torch: what is wrong with a directory is said before torch is imported.
"""

from dataclasses import dataclass
from pathlib import Path

from runtime.config import Compiler, EngineConfig, parse
from runtime.errors import SpecDecError
from runtime.files import read_json

LIBRARY = "kernels.so"
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
    for name in step_files(config):
        if not (engine_dir / name).exists():
            raise SpecDecError(f"file is missing: {engine_dir / name}", hint=_BUILD_AGAIN, fact="engine")
    return config
