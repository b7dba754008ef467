"""Cut steps in the cache: a model of the same form finds its programs, their calls, and how weights are made.

The form is all that a step is exported of but the numbers of its weights: the model's config, modules and settings, the
shapes and dtypes of its tensors, and the code of all of them. Only steps whose programs are carried out token by token
are kept: what a compiler makes is kept by itself (`runtime.compiler.programs`).
"""

import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from operator import getitem
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from runtime.cache import cache_dir, digest, digests_of_build_code, make_cache_dir, read_sealed, sealed
from runtime.compiler.compilation import TOKENWISE
from runtime.compiler.cutting import IN_LAYER, Call, CutStep, Recipe, attribute_of, layers_of
from runtime.compiler.identity import of_the_model
from runtime.compiler.kernel_library import processor
from runtime.compiler.load import current_environment
from runtime.compiler.model import Step
from runtime.compiler.programs import Files
from runtime.config import StepShape
from runtime.errors import SpecDecError
from runtime.files import write_file

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_MAX_OWN_BYTES = 1 << 16
"""Tensors that an export makes, such as a number, are kept. Large ones are weights that were not found in the model."""


@dataclass(frozen=True)
class _KeptCall:
    program: int
    inputs: list[int]
    outputs: list[int]
    layout: dict[str, tuple[str, list[int]]]
    recipe: int
    layer: int | None


@dataclass(frozen=True)
class _KeptRecipe:
    operations: list[tuple[str | None, Any, Any]]
    """Names in the place of a recipe's operations."""
    made: dict[str, int]
    own: dict[str, Tensor]
    """Attributes that the model does not have."""


@dataclass(frozen=True)
class _KeptStep:
    files: list[Files]
    calls: list[_KeptCall]
    recipes: list[_KeptRecipe]


class _CannotBeKept(Exception):
    pass


ModuleOf = Callable[[int | None], nn.Module]
"""Finds what a call computes: the layer of this number, or where there is none all of it."""


def find_step(step: Step, shape: StepShape, arithmetic: int) -> tuple[CutStep, list[Files]] | None:
    """The step as it was cut of another model of the same form, with the files of its programs; None if it was not."""
    return find_kept(step_entry(step, shape, arithmetic), _module_of(step, shape))


def keep_step(step: Step, shape: StepShape, arithmetic: int, cut: CutStep, files: list[Files]) -> None:
    """Write a step that was cut, with the files of its programs, for others of the same form."""
    keep(step_entry(step, shape, arithmetic), _module_of(step, shape), cut, files)


def _module_of(step: Step, shape: StepShape) -> ModuleOf:
    layers = cache(lambda: layers_of(step.model, shape.shapes))  # looked for once, and not where nothing is kept
    return lambda layer: step if layer is None else layers()[layer]


def find_kept(entry: Path, module_of: ModuleOf) -> tuple[CutStep, list[Files]] | None:
    """The outcome of `keep` for another module of the same form; None if there is none."""
    data = read_sealed(entry)
    if data is None:
        return None
    try:
        kept: _KeptStep = pickle.loads(data)  # of the user's own directory, which has code in it that is run
    except Exception:  # whatever a pickle of another program raises
        return None
    recipes = [Recipe([_operation(*one) for one in recipe.operations], recipe.made) for recipe in kept.recipes]
    calls = []
    for call in kept.calls:
        get = partial(_attribute, module_of(call.layer), kept.recipes[call.recipe].own)
        layout, recipe = call.layout, recipes[call.recipe]
        calls.append(Call(call.program, call.inputs, call.outputs, layout, recipe, get, call.layer))
    return CutStep([], calls), kept.files


def keep(entry: Path, module_of: ModuleOf, cut: CutStep, files: list[Files]) -> None:
    """Write a step that was cut, with the files of its programs, unless it needs a compiler."""
    if any(TOKENWISE not in one for one in files):
        return
    with suppress(_CannotBeKept, OSError, SpecDecError):  # a cache that cannot be written costs time, and nothing else
        data = sealed(pickle.dumps(_kept(module_of, cut, files)))
        make_cache_dir()
        entry.parent.mkdir(mode=0o700, exist_ok=True)
        write_file(entry, data)


def _kept(module_of: ModuleOf, cut: CutStep, files: list[Files]) -> _KeptStep:
    recipes: dict[int, _KeptRecipe] = {}
    calls = []
    for call in cut.calls:
        own = _own(call, module_of(call.layer))
        operations = [(_name(operation), *given) for operation, *given in call.recipe.operations]
        kept = recipes.setdefault(id(call.recipe), _KeptRecipe(operations, call.recipe.made, own))
        if kept.own.keys() != own.keys() or any(not torch.equal(kept.own[name], own[name]) for name in own):
            raise _CannotBeKept
        number = list(recipes).index(id(call.recipe))
        calls.append(_KeptCall(call.program, call.inputs, call.outputs, call.layout, number, call.layer))
    return _KeptStep(files, calls, list(recipes.values()))


def _own(call: Call, module: nn.Module) -> dict[str, Tensor]:
    """Tensors of a call's program that are none of the model's."""
    own = {}
    for name in call.recipe.names:
        tensor = call.get(name)
        if not _is_same(tensor, module, name):
            if tensor.nbytes > _MAX_OWN_BYTES:
                raise _CannotBeKept
            own[name] = tensor.detach().clone()
    return own


def _is_same(tensor: Tensor, module: nn.Module, name: str) -> bool:
    try:
        found = _attribute(module, {}, name)
    except AttributeError:
        return False
    forms = [(one.data_ptr(), one.dtype, one.shape, one.stride()) for one in (tensor, found)]
    return forms[0] == forms[1]


def _attribute(module: nn.Module, own: dict[str, Tensor], name: str) -> Tensor:
    if name in own:
        return own[name]
    return attribute_of(module)(name if isinstance(module, Step) else name.removeprefix(IN_LAYER))


# --- operations by their names ---


def _name(operation: Any) -> str | None:
    if operation is None or operation is getitem:
        return operation and getitem.__name__
    if not isinstance(operation, OpOverload):
        raise _CannotBeKept
    return str(operation)


def _operation(name: str | None, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    operation: Any = getitem if name == getitem.__name__ else None
    if name is not None and operation is None:
        namespace, packet, overload = name.split(".")
        operation = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return operation, args, kwargs


# --- what a step is exported of ---


def step_entry(step: Step, shape: StepShape, arithmetic: int) -> Path:
    of_shape = (shape.dtype, shape.vocab_size, shape.layers, shape.states, shape.kv_cache)
    settings = (*of_shape, shape.build_config.tokens_per_block, arithmetic, step.model.config._attn_implementation)
    return entry_of("step", step, repr(settings), repr(sorted(of_the_model(step.model.config.to_dict()).items())))


def entry_of(kind: str, module: nn.Module, *settings: str) -> Path:
    """Place in the cache of what is exported of a module with these settings."""
    environment = repr(current_environment(torch.device("cpu"))), processor()
    form = [*environment, *digests_of_build_code(), *settings, *_modules(module)]
    return cache_dir() / "programs" / f"{kind}-{digest(form)[:16]}"


def _modules(whole: nn.Module) -> list[str]:
    """Modules by name, with their settings and the forms of their tensors, and the code of their classes."""
    lines, sources = [], dict[str, ModuleType]()
    for name, module in whole.named_modules():
        kind = type(module)
        settings = sorted((key, value) for key, value in vars(module).items() if key[0] != "_" and _is_plain(value))
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        forms = [(key, tensor.dtype, tuple(tensor.shape), tensor.stride()) for key, tensor in tensors]
        lines.append(f"{name} {kind.__module__}.{kind.__qualname__} {settings} {forms}")
        sources[kind.__module__] = sys.modules[kind.__module__]
    files = sorted(str(module.__file__) for name, module in sources.items() if not name.startswith("torch."))
    return [*lines, *(digest([Path(file).read_text()]) for file in files)]


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple | list) else isinstance(value, _PLAIN)
