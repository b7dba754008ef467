"""Compilation of a step by `aot`. Modules that only open an engine import `runtime.compiler.package` instead.

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.fx.config
from torch import Tensor, nn

from runtime.checkpoint.bundle import PACKAGE
from runtime.checkpoint.config import ARITHMETICS, Arithmetic, StepShape
from runtime.compiler.capture import Inputs, NoTokenProgram, Sizes, StepForm
from runtime.compiler.cutting import CutStep, cut_step, whole_step
from runtime.compiler.package import write_package
from runtime.compiler.token_program import lower
from runtime.core.kv_cache import kv_dtype
from runtime.kernels.memory import trim
from runtime.model.experts import experts_by_kernel
from runtime.model.model import Step
from runtime.model.quantized import tied_output
from runtime.model.weights import num_bytes_of, write_weights


@dataclass(frozen=True)
class TokenStep:
    """Token programs that compute a step, or another module's forward."""

    cut: CutStep
    codes: list[bytes]
    """JSON of each program."""


@dataclass(frozen=True)
class Written:
    """A step that `compile_aot` has written."""

    why_whole: str | None
    """Reason why the step is a single program; None if it is cut into layers."""


def compile_aot(
    step: Step,
    shape: StepShape,
    directory: Path,
    arithmetic: Arithmetic,
    known: Mapping[str, Tensor] | None = None,
    rank: int = 0,
) -> Written | NoTokenProgram:
    """Write the step's token programs as a package, and the weights that the programs need. Linear layers are computed
    in `arithmetic`. Nothing is written if the step has no token program.

    Weights that are among the `known` weights of another step are not written again. With several ranks the package of
    rank 0 serves all; for the other ranks only weights are written.
    """
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


def token_step_of(module: nn.Module, inputs: Inputs, sizes: Sizes, arithmetic: int) -> TokenStep | NoTokenProgram:
    """A step of one token program, which computes `module.forward` for inputs of these sizes; or the reason why the
    module has no token program.
    """
    with _tracing():
        return _lowered(whole_step(module, inputs, sizes, arithmetic))


def _lowered(cut: CutStep | NoTokenProgram) -> TokenStep | NoTokenProgram:
    """The step with its token programs."""
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
    if rank == 0:
        calls = [(call.program, call.inputs, call.outputs) for call in step.cut.calls]
        write_package(directory / PACKAGE, step.codes, calls, step.cut.twins, step.cut.layout, shape)


@contextmanager
def _tracing() -> Iterator[None]:
    """Context for a trace: without gradients, without stack traces of a graph's nodes, which take time, and without
    torch's warnings, which concern its developers.
    """
    config = torch.fx.config
    before = config.do_not_emit_stack_traces
    config.do_not_emit_stack_traces = True
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        config.do_not_emit_stack_traces = before
