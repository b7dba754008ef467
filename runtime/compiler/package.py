"""The package that `aot` writes: its files, and the opened step. Neither opening it nor calling it needs the model's
Python code or a compiler.
"""

import json
import weakref
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoint.config import StepShape, as_json, parse
from runtime.kernels.memory import give_back
from runtime.model.weights import Layout

StepOutput = Tensor | tuple[Tensor, Tensor]
"""Logits [tokens, vocab], and hidden states [tokens, width] if a trained drafter reads them."""
StepFunction = Callable[..., StepOutput]
"""Signature of `Step.forward`."""


def logits_of(output: StepOutput) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


_LAYOUT, _SHAPE, _CALLS, _TWINS = "weights.json", "step.json", "calls.json", "twins.json"
_PROGRAM = "tokenwise.json"

Calls = list[tuple[int, list[int], list[int]]]
"""A step's calls of programs: the program's number, and the numbers of the tensors that it reads and writes."""


def write_package(
    package: Path, codes: list[bytes], calls: Calls, twins: Mapping[str, str], layout: Layout, shape: StepShape
) -> None:
    """Write programs and calls, and the weights' names, shapes and dtypes. Equal steps are equal files."""
    extras = {_LAYOUT: layout, _SHAPE: as_json(shape), _CALLS: calls, _TWINS: twins}
    members = [(f"extra/{name}", json.dumps(extra).encode()) for name, extra in extras.items()]
    members += [(f"{number}/{_PROGRAM}", code) for number, code in enumerate(codes)]
    with zipfile.ZipFile(package, "w") as archive:
        for name, content in members:  # with the date that ZipInfo has
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)


@dataclass(frozen=True)
class PackagedStep:
    """A step whose package is opened, with its weights. It is called with the inputs of `Step.forward`."""

    loader: Any
    weights: dict[str, Tensor]

    def __call__(self, *inputs: Tensor | list[Tensor]) -> StepOutput:
        flat: list[Tensor] = []
        for value in inputs:
            flat.extend(value if isinstance(value, list) else [value])
        logits, *states = self.loader.run(flat)
        return (logits, states[0]) if states else logits


def wanted_layout(package: Path) -> Layout:
    """Names, shapes and dtypes of the weights that the packaged step needs."""
    return {name: (dtype, shape) for name, (dtype, shape) in _read_extra(package, _LAYOUT).items()}


def shape_of_package(package: Path) -> StepShape:
    """Shape that the packaged step was compiled for."""
    return parse(StepShape, _read_extra(package, _SHAPE), f"{package}: {_SHAPE}")


def _read_extra(package: Path, extra: str) -> Any:
    with zipfile.ZipFile(package) as archive:
        return json.loads(archive.read(f"extra/{extra}"))


def open_aot(package: Path, weights: dict[str, Tensor]) -> StepFunction:
    """The opened step of a package. The kernels must be loaded. While it runs, Python's other threads go on."""
    own: dict[int, dict[str, Tensor]] = {}
    twins = {name: weights[other] for name, other in _read_extra(package, _TWINS).items()}
    for name, weight in (weights | twins).items():
        call, _, name_there = name.partition(".")
        own.setdefault(int(call), {})[name_there] = weight
    loader: Any = torch.classes.specdec.CutStep()
    calls = _read_extra(package, _CALLS)
    with zipfile.ZipFile(package) as archive:
        codes = {program: archive.read(f"{program}/{_PROGRAM}") for program, *_ in calls}
    for i, (program, *places) in enumerate(calls):
        add_program(loader, codes[program], own.get(i, {}), places)
    step = PackagedStep(loader, weights)
    for one in list(weights.values())[:1]:  # all lie in one piece of memory, which torch would never free
        weakref.finalize(step, give_back, one).atexit = False
    return step


def add_program(step: Any, code: bytes, weights: Mapping[str, Tensor], places: list[list[int]]) -> None:
    """Add a program's call to a step. `places` has the numbers of the tensors that it reads, and writes."""
    program = json.loads(code)
    step.add_tokenwise(program["code"], program["numbers"], [weights[name] for name in program["weights"]], *places)
