"""Trace or export, and compile, the target's step.

`aot` makes an AOTInductor package: the step with its weights, opened without Python model code or compilation.
`torch-compile` serves models that cannot be exported: the compiler's cache is kept, and opening finds it there.
`none` runs the model as it is, for debugging.
"""

import dataclasses
import json
import logging
import os
import tempfile
import warnings
import weakref
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from runtime.checkpoint.bundle import uses_kernels
from runtime.checkpoint.config import ARITHMETICS, Arithmetic, StepShape, as_json, parse
from runtime.compiler.programs import (
    LIBRARY,
    Files,
    compile_programs,
    cpu_options,
    instructions_looked_up,
    named_compiler,
    package_options,
    run_inductor,
)
from runtime.core.batch import Batch, pad_to_min_2
from runtime.core.kv_cache import kv_dtype
from runtime.kernels.memory import give_back, trim
from runtime.kernels.ops import flush_denormals_of_openmp
from runtime.model.weights import Layout, layout_of, num_bytes_of, present, save_weights, write_weights
from runtime.util.temporary import own_temporary_files

if TYPE_CHECKING:
    from runtime.compiler.capture import Inputs, Sizes, StepForm
    from runtime.compiler.cutting import CutStep
    from runtime.model.model import Step  # opening an engine must not import model code

StepOutput = Tensor | tuple[Tensor, Tensor]
"""(T, vocab) logits, and where a trained drafter is to read them (tokens, width) hidden states."""
StepFunction = Callable[..., StepOutput]
"""Signature of `Step.forward`."""


def logits_of(output: StepOutput) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


PACKAGE, WEIGHTS, CACHE = "rank0.pt2", "rank0.safetensors", "rank0.cache"
_LAYOUT, _SHAPE, _CALLS = "weights.json", "step.json", "calls.json"
TOKENWISE = "tokenwise.json"
"""A program that is carried out token by token, and not compiled."""


@dataclass(frozen=True)
class Made:
    """Outcome of a compilation ahead of time."""

    uses_kernels: bool
    """True if all of its linear layers are computed by the CPU's kernels."""
    why_whole: str | None = None
    """Reason why it is one program, on a CPU; None where it is cut into layers."""


def raise_interrupt(error: Exception) -> None:
    """Raise the KeyboardInterrupt of which torch, compiling, has made an error of another kind."""
    if "KeyboardInterrupt" in str(error):
        raise KeyboardInterrupt from error


def compile_aot(
    step: "Step",
    shape: StepShape,
    directory: Path,
    arithmetic: Arithmetic | None,
    known: Mapping[str, Tensor] | None = None,
    rank: int = 0,
) -> Made:
    """Write the step as a package, and the weights it wants to be handed (on a GPU: none).

    Weights that are among the `known` ones of another step are not written again. Where there are several ranks the
    package is the first's; of the others weights are written for it, and nothing is compiled. On the CPU its linear
    layers are computed in `arithmetic`. Whatever keeps a model from being exported is raised as it comes.
    """
    from runtime.compiler.capture import StepForm, by_export  # not to open an engine
    from runtime.compiler.cutting import CannotBeCut, cut_step, whole_step, why_not_cut
    from runtime.compiler.vectors import CannotBeLowered

    form = StepForm(step, shape.shapes, shape.build_config.tokens_per_block, kv_dtype(shape.dtype, shape.kv_cache))
    with _capturing(step, arithmetic):
        if arithmetic is None:
            with present(step.model):
                return _write_whole(form, shape, directory, None, known, rank)
        number = ARITHMETICS.index(arithmetic)
        try:
            cut, files, why_whole = _traced(form, number)
        except (MemoryError, OSError):  # of this moment
            raise
        except Exception as error:  # whatever it is about the model, symbols may do
            raise_interrupt(error)
        else:
            _write_cut(cut, files, shape, directory, known, rank)
            return Made(uses_kernels=True, why_whole=why_whole)
        try:
            cut = cut_step(form, by_export, number)
        except Exception as error:  # whatever it is about the model, the whole may do
            raise_interrupt(error)
            why_whole = why_not_cut(error)
        else:
            _write_cut(cut, _files_of(cut), shape, directory, known, rank)
            return Made(uses_kernels=True)
        try:
            whole = whole_step(form.graph(by_export), number)
            files = _files_without_compiler(whole.programs)
        except (CannotBeCut, CannotBeLowered):
            with present(step.model):
                made = _write_whole(form, shape, directory, arithmetic, known, rank)
            return dataclasses.replace(made, why_whole=why_whole)
        _write_cut(whole, files, shape, directory, known, rank)
        return Made(uses_kernels=True, why_whole=why_whole)


def _traced(form: "StepForm", arithmetic: int) -> tuple["CutStep", list[Files], str | None]:
    """The step's programs, which need no compiler, their files, and why it is one program if it is. Raises what keeps
    it from being traced, or from needing no compiler."""
    from runtime.compiler.capture import by_trace  # not to open an engine
    from runtime.compiler.cutting import cut_step, whole_step, why_not_cut

    why_whole = None
    try:
        cut = cut_step(form, by_trace, arithmetic)
    except (MemoryError, OSError):
        raise
    except Exception as error:  # as above
        raise_interrupt(error)
        cut, why_whole = whole_step(form.graph(by_trace), arithmetic), why_not_cut(error)
    return cut, _files_without_compiler(cut.programs), why_whole


def traced_program(
    module: nn.Module, inputs: "Inputs", sizes: "Sizes", arithmetic: int
) -> tuple["CutStep", list[Files]]:
    """A module's pass as one program that needs no compiler, and its files. Raises what keeps it from being one."""
    from runtime.compiler.capture import by_trace  # not to open an engine
    from runtime.compiler.cutting import whole_step

    whole = whole_step(by_trace(module, inputs, sizes), arithmetic)
    return whole, _files_without_compiler(whole.programs)


@contextmanager
def _capturing(step: "Step", arithmetic: Arithmetic | None) -> Iterator[None]:
    from runtime.model.experts import experts_by_kernel  # not to open an engine

    with _quiet(), torch.no_grad(), experts_by_kernel(step.model) if arithmetic is not None else nullcontext():
        yield


def _write_cut(
    cut: "CutStep",
    programs: list[Files],
    shape: StepShape,
    directory: Path,
    known: Mapping[str, Tensor] | None,
    rank: int,
) -> None:
    trim(num_bytes_of(cut.layout))
    write_weights(directory / f"rank{rank}.safetensors", cut.layout, cut.weights, known)
    if rank > 0:
        return
    calls = [[call.program, call.inputs, call.outputs] for call in cut.calls]
    extras = {_LAYOUT: cut.layout, _SHAPE: as_json(shape), _CALLS: calls}
    with zipfile.ZipFile(directory / PACKAGE, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, extra in extras.items():
            archive.writestr(f"extra/{name}", json.dumps(extra))
        for number, files in enumerate(programs):
            for name, data in files.items():
                archive.writestr(f"{number}/{name}", data)


def _files_of(cut: "CutStep") -> list[Files]:
    """Each program's files: its code if all can be carried out token by token, or else what the compiler makes of it.

    Some of each would not fit: the compiler takes inputs to be laid out in memory as its graphs say.
    """
    from runtime.compiler.vectors import CannotBeLowered  # not to open an engine

    try:
        return _files_without_compiler(cut.programs)
    except CannotBeLowered:
        for number, call in {call.program: call for call in cut.calls}.items():
            with present(*call.sources):
                for name, weight in call.weights():
                    setattr(cut.programs[number], name, weight)
        return compile_programs(cut.programs)


def _files_without_compiler(programs: list[GraphModule]) -> list[Files]:
    from runtime.compiler.token_program import lower  # not to open an engine

    return [{TOKENWISE: json.dumps(dataclasses.asdict(lower(program))).encode()} for program in programs]


def _write_whole(
    form: "StepForm",
    shape: StepShape,
    directory: Path,
    arithmetic: Arithmetic | None,
    known: Mapping[str, Tensor] | None,
    rank: int,
) -> Made:
    from torch.export.pt2_archive._package import package_pt2
    from torch.export.pt2_archive._package_weights import Weights

    from runtime.compiler.capture import by_export
    from runtime.compiler.linears import use_kernels
    from runtime.compiler.selection import select_early

    program = form.graph(by_export)
    select_early(program, "logit_indices")
    hands_over = arithmetic is not None and use_kernels(program, ARITHMETICS.index(arithmetic))
    options: dict[str, Any] = {
        **(cpu_options() if arithmetic is not None else package_options()),
        # Freezing prepacks the weights for the CPU's matrix kernels: steps are two to three times faster.
        "freezing": arithmetic is not None,
        "aot_inductor.package_cpp_only": rank > 0,  # whose program is the first's, and is not compiled again
        "aot_inductor.package_constants_in_so": not hands_over,
        "aot_inductor.package_constants_on_disk_format": "pickle_weights" if hands_over else None,
    }
    made = run_inductor(program, form.inputs()[0], options)
    constants = [file for file in made if isinstance(file, Weights)]
    weights = {name: tensor for part in constants for name, (tensor, _) in part.items()}
    save_weights(directory / f"rank{rank}.safetensors", weights, known)
    if rank == 0:
        package_pt2(
            str(directory / PACKAGE),
            aoti_files=[file for file in made if isinstance(file, str)],
            extra_files={_LAYOUT: json.dumps(layout_of(weights)), _SHAPE: json.dumps(as_json(shape))},
        )
    return Made(hands_over)


@dataclass(frozen=True)
class PackagedStep:
    """An opened package, and the memory that it reads."""

    loader: Any
    weights: dict[str, Tensor]

    def __call__(self, *inputs: Tensor | list[Tensor]) -> StepOutput:
        flat: list[Tensor] = []
        for value in inputs:
            flat.extend(value if isinstance(value, list) else [value])
        logits, *states = self.loader.run(flat)
        return (logits, states[0]) if states else logits


def wanted_layout(package: Path) -> Layout:
    """The weights that the packaged step wants to be handed."""
    return {name: (dtype, shape) for name, (dtype, shape) in _read_extra(package, _LAYOUT).items()}


def shape_of_package(package: Path) -> StepShape:
    """Shape that the packaged step was compiled for."""
    return parse(StepShape, _read_extra(package, _SHAPE), f"{package}: {_SHAPE}")


def _read_extra(package: Path, extra: str) -> Any:
    with zipfile.ZipFile(package) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(f"/{extra}"))
        return json.loads(archive.read(name))


def open_aot(package: Path, weights: dict[str, Tensor], device: torch.device) -> StepFunction:
    """The packaged step. Its loader is called directly: `torch._inductor` alone takes most of a second to import.

    It unpacks the package, and runs what it has unpacked. On the CPU it is that of the kernels, which must be loaded:
    Python's other threads do not wait for it, as they do for torch's.
    """
    with own_temporary_files():
        loader = _open_cut(package, weights) if _is_cut(package) else _open_whole(package, weights, device)
    step = PackagedStep(loader, weights)
    for one in list(weights.values())[:1]:  # they lie in one piece; torch never lets go of those that it was handed
        weakref.finalize(step, give_back, one).atexit = False
    return step


def _is_cut(package: Path) -> bool:
    with zipfile.ZipFile(package) as archive:
        return f"extra/{_CALLS}" in archive.namelist()


def _open_cut(package: Path, weights: dict[str, Tensor]) -> Any:
    own: dict[int, dict[str, Tensor]] = {}
    for name, weight in weights.items():
        call, _, name_there = name.partition(".")
        own.setdefault(int(call), {})[name_there] = weight
    step: Any = torch.classes.specdec.CutStep()
    with tempfile.TemporaryDirectory() as directory, zipfile.ZipFile(package) as archive:
        archive.extractall(directory)
        for i, (program, inputs, outputs) in enumerate(_read_extra(package, _CALLS)):
            path, given = Path(directory) / str(program), own.get(i, {})
            if (path / TOKENWISE).exists():
                add_program(step, (path / TOKENWISE).read_bytes(), given, (inputs, outputs))
            else:
                step.add_compiled(str(path / LIBRARY), inputs, outputs, given)
    return step


def add_program(step: Any, data: bytes, weights: dict[str, Tensor], places: tuple[list[int], list[int]]) -> None:
    """Add the call of a program that needs no compiler to a step, with the places of its inputs and outputs."""
    code = json.loads(data)
    step.add_tokenwise(code["code"], code["numbers"], [weights[name] for name in code["weights"]], *places)


def _open_whole(package: Path, weights: dict[str, Tensor], device: torch.device) -> Any:
    on_processor, index = device.type == "cpu", -1 if device.index is None else device.index
    loader: Any = (
        torch.classes.specdec.Package(str(package))
        if on_processor
        else torch._C._aoti.AOTIModelPackageLoader(str(package), "model", False, 1, index)
    )
    if weights:  # on the CPU only
        loader.load(weights)
    return loader


class CompiledStep:
    """Compiled on the first call, once for all sizes: a step never waits for the compiler again.

    All that the compiler makes, machine code included, is found in `cache_dir` or put there.
    """

    def __init__(self, step: "Step", cache_dir: Path) -> None:
        self.model = step.model
        self._compiled = torch.compile(step, dynamic=True)
        self.cache_dir = cache_dir

    def __call__(self, *inputs: Any) -> StepOutput:
        batch, pools, states = Batch(*inputs[:5]), inputs[5:7], list(inputs[7:])
        if states:
            states[0] = F.pad(states[0], (0, max(2 - len(states[0]), 0)))
        if uses_kernels("torch-compile", batch.input_ids.device.type):
            flush_denormals_of_openmp()
        # Or sizes that are equal in the first call would have to be equal in all.
        equal_by_chance = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
        with _compiler_cache(self.cache_dir), equal_by_chance, instructions_looked_up(), named_compiler():
            padded = pad_to_min_2(batch)
            output: StepOutput = self._compiled(*padded.tensors(), *pools, *states)
        logits = logits_of(output)[: len(batch.logit_indices)]
        if not isinstance(output, tuple):
            return logits
        B, Q = batch.input_ids.shape
        return logits, output[1].view(*padded.input_ids.shape, -1)[:B, :Q].flatten(0, 1)


@contextmanager
def _compiler_cache(cache_dir: Path) -> Iterator[None]:
    """Inductor reads the place of its cache from the environment, and nowhere else.

    Headers are not precompiled: they would be again in every process, needed or not.
    """
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    os.environ[name] = str(cache_dir)
    try:
        with torch._inductor.config.patch(cpp_cache_precompile_headers=False):
            yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _without_stack_traces() -> Iterator[None]:
    import torch.fx.config as config  # of which torch imports no name

    before = config.do_not_emit_stack_traces
    config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before


@contextmanager
def _quiet() -> Iterator[None]:
    """The compiler's warnings concern its developers, as do the lines of code that a graph's nodes come of, which take
    time to find; what matters to users is raised.
    """
    names = ("torch._inductor", "torch.export", "torch._dynamo", "torch.utils.cpp_extension")  # the last of a CUDA_HOME
    loggers: list[Any] = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), _without_stack_traces():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
