"""Engine directories: `config.json`, the compiled step of each rank and the tokenizer's files.

What stands for the step depends on the compiler: `rank0.pt2` with `rank0.safetensors`, the weights as it wants them
(aot); the model's own weights with `rank0.cache`, the compiler's cache (torch-compile); or the weights alone (none).
A compiled step is machine code: open only bundles you would run as a program.
"""

import atexit
import platform
import shutil
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from runtime.compiler.compilation import StepFunction, open_aot, torch_compile
from runtime.compiler.kernels import LIBRARY, load_kernels
from runtime.compiler.weights import open_weights
from runtime.config import Compiler, Dtype, EngineConfig, Environment, parse
from runtime.errors import SpecDecError
from runtime.files import read_json

_BUILD_AGAIN = "build it again"


def current_environment(device: torch.device) -> Environment:
    """What a step compiled here, for `device`, depends on."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        capability = f"{torch.cuda.get_device_name(device)} sm_{major}{minor}"
    else:
        capability = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return Environment(
        torch=torch.__version__,
        transformers=metadata.version("transformers"),
        device="cuda" if device.type == "cuda" else "cpu",
        capability=capability,
    )


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


def check_environment(config: EngineConfig, engine_dir: Path, device: torch.device) -> None:
    """SpecDecError if the engine was built for another torch, transformers or device."""
    here = current_environment(device)
    for name in ("device", "capability", "torch", "transformers"):
        built, now = getattr(config.environment, name), getattr(here, name)
        if built != now:
            raise SpecDecError(
                f"`{engine_dir}` was built for another {name}: it needs {built}, here is {now}",
                hint="build it again here, from its checkpoint",
                fact="other_environment",
                engine_dir=engine_dir,
                build=config.build_config,
            )


def open_step(
    compiler: Compiler, pretrained_config: dict[str, Any], dtype: Dtype, engine_dir: Path, device: torch.device
) -> StepFunction:
    """The compiled step of an engine directory, ready to be called on `device`."""
    weights = engine_dir / "rank0.safetensors"
    with_kernels = uses_kernels(compiler, device.type)
    if with_kernels:
        load_kernels(engine_dir / LIBRARY)
    if compiler == "aot":
        try:
            constants = open_weights(weights)
        except SafetensorError as error:
            raise SpecDecError(f"`{weights}` is damaged: {error}", hint=_BUILD_AGAIN, fact="engine") from error
        try:
            return open_aot(engine_dir / "rank0.pt2", constants, device)
        except Exception as error:  # torch raises RuntimeError, OSError or zip errors; all mean the same
            raise SpecDecError(
                f"`{engine_dir / 'rank0.pt2'}` cannot be opened: {str(error).splitlines()[0]}",
                hint=_BUILD_AGAIN,
                fact="engine",
            ) from error
    # Only here does an engine need model code.
    from runtime.compiler.attention import KERNEL, PAGED
    from runtime.compiler.kernels import describe_kernels
    from runtime.compiler.model import Step, load_model, parse_pretrained_config

    pretrained = parse_pretrained_config(pretrained_config, str(engine_dir / "config.json"))
    if with_kernels:
        describe_kernels()
    step = Step(load_model(pretrained, weights, getattr(torch, dtype), KERNEL if with_kernels else PAGED)).to(device)
    if compiler == "none":
        return step
    # A copy, because the compiler writes to its cache and the bundle may be shared or read-only.
    cache_dir = Path(tempfile.mkdtemp(prefix="specdec-"))
    atexit.register(shutil.rmtree, cache_dir, ignore_errors=True)
    shutil.copytree(engine_dir / "rank0.cache", cache_dir, dirs_exist_ok=True)
    return torch_compile(step, cache_dir)
