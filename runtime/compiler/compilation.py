"""Compilation of a step by `aot`, and the package that `aot` writes.

There are three compilers:

- `aot`, on CPUs: token programs and packed weights, which are opened without the model's Python code and without
  compiling.
- `torch-compile` (`runtime.compiler.torch_compile`): torch.compile, for models with operations that token programs
  lack, and for GPUs.
- `none`: the model in torch, uncompiled.
"""

import dataclasses
import json
import warnings
import weakref
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from runtime.checkpoint.config import ARITHMETICS, Arithmetic, StepShape, as_json, parse
from runtime.core.kv_cache import kv_dtype
from runtime.kernels.memory import give_back, trim
from runtime.model.weights import Layout, num_bytes_of, write_weights

if TYPE_CHECKING:
    from runtime.compiler.capture import Inputs, NoTokenProgram, Sizes
    from runtime.compiler.cutting import CutStep
    from runtime.model.model import Step  # opening an engine must not import model code

StepOutput = Tensor | tuple[Tensor, Tensor]
"""Logits [tokens, vocab], and hidden states [tokens, width] if a trained drafter reads them."""
StepFunction = Callable[..., StepOutput]
"""Signature of `Step.forward`."""


def logits_of(output: StepOutput) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


PACKAGE, WEIGHTS = "rank0.pt2", "rank0.safetensors"
_LAYOUT, _SHAPE, _CALLS, _TWINS = "weights.json", "step.json", "calls.json", "twins.json"
_PROGRAM = "tokenwise.json"


@dataclass(frozen=True)
class TokenStep:
    """Token programs that compute a step, or another module's forward."""

    cut: "CutStep"
    codes: list[bytes]
    """JSON of each program."""


@dataclass(frozen=True)
class Written:
    """A step that `compile_aot` has written."""

    why_whole: str | None
    """Reason why the step is a single program; None if it is cut into layers."""


def compile_aot(
    step: "Step",
    shape: StepShape,
    directory: Path,
    arithmetic: Arithmetic,
    known: Mapping[str, Tensor] | None = None,
    rank: int = 0,
) -> "Written | NoTokenProgram":
    """Write the step's token programs as a package, and the weights that the programs need. Linear layers are computed
    in `arithmetic`. Nothing is written if the step has no token program.

    Weights that are among the `known` weights of another step are not written again. With several ranks the package of
    rank 0 serves all; for the other ranks only weights are written.
    """
    from runtime.compiler.capture import NoTokenProgram, StepForm  # not to open an engine
    from runtime.compiler.cutting import cut_step
    from runtime.model.experts import experts_by_kernel
    from runtime.model.quantized import tied_output

    build = shape.build_config
    # Heads and copies read the embeddings by themselves.
    tied = None if build.hidden_states or build.self_draft else tied_output(step.model)
    form = StepForm(step, shape.shapes, build.tokens_per_block, kv_dtype(shape.dtype, shape.kv_cache), tied)
    with experts_by_kernel(step.model):
        with _tracing():
            found = _lowered(cut_step(form, ARITHMETICS.index(arithmetic)))
        if isinstance(found, NoTokenProgram):
            return found
        _write(found, shape, directory, known, rank)
    return Written(found.cut.why_whole)


def token_step_of(module: nn.Module, inputs: "Inputs", sizes: "Sizes", arithmetic: int) -> "TokenStep | NoTokenProgram":
    """A module's forward as one token program."""
    from runtime.compiler.cutting import whole_step  # not to open an engine

    with _tracing():
        return _lowered(whole_step(module, inputs, sizes, arithmetic))


def _lowered(cut: "CutStep | NoTokenProgram") -> "TokenStep | NoTokenProgram":
    """The step with its token programs."""
    from runtime.compiler.capture import NoTokenProgram  # not to open an engine
    from runtime.compiler.token_program import lower

    if isinstance(cut, NoTokenProgram):
        return cut
    codes = list[bytes]()
    for graph in cut.programs:
        program = lower(graph)
        if isinstance(program, NoTokenProgram):
            return program
        codes.append(json.dumps(dataclasses.asdict(program)).encode())
    return TokenStep(cut, codes)


def _write(step: TokenStep, shape: StepShape, directory: Path, known: Mapping[str, Tensor] | None, rank: int) -> None:
    trim(num_bytes_of(step.cut.layout))
    with torch.no_grad():
        write_weights(directory / f"rank{rank}.safetensors", step.cut.layout, step.cut.weights, known)
    if rank > 0:
        return
    calls = [[call.program, call.inputs, call.outputs] for call in step.cut.calls]
    extras = {_LAYOUT: step.cut.layout, _SHAPE: as_json(shape), _CALLS: calls, _TWINS: step.cut.twins}
    members = [(f"extra/{name}", json.dumps(extra).encode()) for name, extra in extras.items()]
    members += [(f"{number}/{_PROGRAM}", code) for number, code in enumerate(step.codes)]
    with zipfile.ZipFile(directory / PACKAGE, "w") as archive:
        for name, content in members:  # with the date that ZipInfo has: equal steps are equal files
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)


@dataclass(frozen=True)
class PackagedStep:
    """An opened package, and its weights. Its inputs are those of `Step.forward`."""

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


@contextmanager
def _tracing() -> Iterator[None]:
    """Context for a trace: without gradients, without stack traces of a graph's nodes, which take time, and without
    torch's warnings, which concern its developers.
    """
    import torch.fx.config as config  # torch itself imports no name from it

    before = config.do_not_emit_stack_traces
    config.do_not_emit_stack_traces = True
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        config.do_not_emit_stack_traces = before
