"""The compiled step of an engine's directory, opened: on the machine that it was built for, and only there."""

import dataclasses
import json
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from runtime.checkpoint.bundle import (
    COMPILER_CACHE,
    COPY_DIR,
    LIBRARY,
    PACKAGE,
    STEP_WEIGHTS,
    uses_kernels,
    weights_files,
)
from runtime.checkpoint.config import (
    ALONE,
    Compiler,
    Dtype,
    EngineConfig,
    Environment,
    Mapping,
    Quantization,
    Shapes,
    StepShape,
    as_json,
)
from runtime.compiler.package import (
    PackagedStep,
    StepFunction,
    open_aot,
    shape_of_package,
    wanted_layout,
)
from runtime.compiler.torch_compile import CompiledStep
from runtime.kernels.library import instructions
from runtime.kernels.memory import keep_freed_memory
from runtime.kernels.ops import choose_vector_math, load_kernels
from runtime.model.weights import open_weights
from runtime.util.errors import SpecDecError
from runtime.util.temporary import temporary_dir

_BUILD_AGAIN = "build it again"


def current_environment(device: torch.device) -> Environment:
    """This machine's properties that compiled steps depend on: processor or GPU, torch, operating system."""
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
        instructions=() if device.type == "cuda" else instructions(),
    )


def check_environment(config: EngineConfig, engine_dir: Path, device: torch.device) -> None:
    """SpecDecError if the engine was built for another torch, transformers, device or processor."""
    here = current_environment(device)
    properties = ("device", "capability", "torch", "transformers")
    pairs = [(name, getattr(config.environment, name), getattr(here, name)) for name in properties]
    differences = [f"another {name}: it needs {built}, here is {now}" for name, built, now in pairs if built != now]
    missing = sorted(set(config.environment.instructions) - set(here.instructions))
    if missing:
        differences.append(f"a processor with instructions that this one lacks: {', '.join(missing)}")
    if differences:
        raise SpecDecError(
            f"`{engine_dir}` was built for {differences[0]}",
            hint="build it again here, from its checkpoint",
            code="other_environment",
            engine_dir=engine_dir,
            build=config.build_config,
        )


@dataclasses.dataclass(frozen=True)
class StepKind:
    """Properties of an engine that decide how its step is opened."""

    compiler: Compiler
    pretrained_config: dict[str, Any]
    dtype: Dtype
    quantization: Quantization | None = None
    hidden_states: tuple[int, ...] = ()
    """Hidden states that the step returns for a trained drafter (`BuildConfig`)."""


_left: dict[Path, StepFunction] = {}


def leave_step(engine_dir: Path, step: StepFunction) -> None:
    """Keep an open, checked step for the next `open_step` of its directory."""
    _left[engine_dir] = step


def take_step(engine_dir: Path) -> StepFunction | None:
    """The step that `leave_step` kept for the directory; None if there is none, or it was taken."""
    return _left.pop(engine_dir, None)


def open_step(kind: StepKind, engine_dir: Path, device: torch.device, mapping: Mapping = ALONE) -> StepFunction:
    """The compiled step of an engine directory, or of one of its ranks. SpecDecError if a file is damaged."""
    if mapping == ALONE and (left := take_step(engine_dir)) is not None:
        return left
    compiler = kind.compiler
    if device.type == "cpu":
        keep_freed_memory()
        choose_vector_math()
    weights = engine_dir / weights_files(mapping)[mapping.rank]
    with_kernels = uses_kernels(compiler, device.type)
    if with_kernels:
        load_kernels(engine_dir / LIBRARY)
    if mapping.tp_size > 1:
        import runtime.kernels.collectives  # noqa: F401  (declares operations that the step calls)
    if compiler == "aot":
        return _open_package(engine_dir / PACKAGE, weights)
    # Only here does an engine need model code.
    from runtime.kernels.ops import describe_kernels
    from runtime.model.attention import KERNEL, PAGED
    from runtime.model.model import ModelKind, Step, load_model, split_config
    from runtime.model.pretrained import parse_pretrained_config
    from runtime.model.quantized import pack_layers

    pretrained = parse_pretrained_config(kind.pretrained_config, str(engine_dir / "config.json"))
    if with_kernels:
        describe_kernels()
    splitting = split_config(pretrained, mapping.tp_size)
    attention = KERNEL if with_kernels else PAGED
    own = ModelKind(pretrained, getattr(torch, kind.dtype), attention, kind.quantization, splitting)
    step = Step(load_model(own, weights), kind.hidden_states).to(device)
    if compiler == "none":
        return step
    pack_layers(step)
    return CompiledStep(step, _own_cache(engine_dir))


def open_copy(step: StepFunction, engine_dir: Path, device: torch.device, ids: Tensor | None = None) -> StepFunction:
    """The step of the self-draft copy, which shares the memory of the target's step. `ids` as in `copy_of`."""
    directory = engine_dir / COPY_DIR
    if isinstance(step, PackagedStep):
        return _open_package(directory / PACKAGE, directory / STEP_WEIGHTS, step.weights)
    from runtime.compiler.quantized_copy import copy_of, read_layers
    from runtime.model.model import Step
    from runtime.model.quantized import pack_layers

    assert isinstance(step, CompiledStep | Step)
    copied = Step(copy_of(step.model, read_layers(directory), ids))
    if not isinstance(step, CompiledStep):
        return copied
    pack_layers(copied)
    return CompiledStep(copied, _own_cache(directory))


def _open_package(package: Path, weights: Path, known: dict[str, Tensor] | None = None) -> StepFunction:
    with _package_errors(package):
        layout = wanted_layout(package)
    try:
        constants = open_weights(weights, layout, known)
    except SafetensorError as error:
        raise SpecDecError(f"`{weights}` is damaged: {error}", hint=_BUILD_AGAIN, code="engine") from error
    with _package_errors(package):
        return open_aot(package, constants)


def _own_cache(directory: Path) -> Path:
    """A copy of the compiler's cache: the compiler writes to it, and the bundle may be shared or read-only."""
    cache_dir = Path(tempfile.mkdtemp(dir=temporary_dir()))
    shutil.copytree(directory / COMPILER_CACHE, cache_dir, dirs_exist_ok=True)
    return cache_dir


def check_shape(config: EngineConfig, engine_dir: Path) -> None:
    """SpecDecError if `config.json` states other shapes than the step was made for, with which it would read and write
    beyond its memory. The files must be those that `config.json` has recorded.
    """
    where = engine_dir / "config.json"
    if config.build_config.compiler == "aot":
        names = [PACKAGE] if config.build_config.self_draft is None else [PACKAGE, f"{COPY_DIR}/{PACKAGE}"]
        digests = {record.name: record.sha256 for record in config.files}
        shapes = [_shape_of_package(engine_dir / name, digests[name]) for name in names]
    else:
        shapes = [_shape_by_model(config, where)]
    for made_for in shapes:
        _check_is_shape(made_for, config, where)


@lru_cache(maxsize=16)
def _shape_of_package(package: Path, sha256: str) -> StepShape:
    """Shape that a compiled package was made for. It is cached, because an engine is often opened again."""
    with _package_errors(package):
        return shape_of_package(package)


def _check_is_shape(made_for: StepShape, config: EngineConfig, where: Path) -> None:
    if made_for == config.step_shape:
        return
    said, values = dict(_named_values(as_json(config.step_shape))), _named_values(as_json(made_for))
    name, value = next((name, value) for name, value in values if said.get(name) != value)
    raise SpecDecError(
        f"`{where}` does not match the compiled step, which was made for {name} {value}: {said.get(name)}",
        hint=_BUILD_AGAIN,
        code="engine",
    )


def _shape_by_model(config: EngineConfig, where: Path) -> StepShape:
    """Shape of a step as far as the model determines it, for an engine without a package."""
    from runtime.model.pretrained import num_positions, parse_pretrained_config, why_positions_end

    pretrained = parse_pretrained_config(config.pretrained_config, str(where))
    positions, asked = num_positions(pretrained), config.build_config.max_request_len
    if positions is not None and asked > positions:
        raise SpecDecError(
            f"`{where}` asks for more than the {positions} positions {why_positions_end(pretrained)}: {asked}",
            hint=_BUILD_AGAIN,
            code="engine",
        )
    shapes = _shapes_by_model(json.dumps(config.pretrained_config), config.mapping.tp_size)
    shape = config.step_shape  # the parts that the model does not determine
    return dataclasses.replace(shape, vocab_size=pretrained.vocab_size, layers=shapes.layers, states=shapes.states)


@lru_cache(maxsize=16)
def _shapes_by_model(pretrained_config: str, tp_size: int) -> Shapes:
    """Shapes as far as the model determines them. Cached: they take most of the time of opening a small engine."""
    from runtime.model.model import probe_config, split_config
    from runtime.model.pretrained import parse_pretrained_config

    pretrained = parse_pretrained_config(json.loads(pretrained_config), "config.json")
    return probe_config(pretrained, split_config(pretrained, tp_size))


def _named_values(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Each number and text of a JSON document by its path, such as `layers[0].num_kv_heads`."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _named_values(item, f"{name}.{key}" if name else key)
    elif isinstance(value, list | tuple):
        yield f"number of {name}", len(value)
        for i, item in enumerate(value):
            yield from _named_values(item, f"{name}[{i}]")
    else:
        yield name, value


@contextmanager
def _package_errors(package: Path) -> Iterator[None]:
    try:
        yield
    except SpecDecError:
        raise
    except Exception as error:  # RuntimeError from a program; OSError, KeyError or zip's errors from the file
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise SpecDecError(f"`{package}` cannot be opened: {said}", hint=_BUILD_AGAIN, code="engine") from error
