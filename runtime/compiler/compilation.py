"""Export and compile the target's step.

`aot` makes an AOTInductor package: the step with its weights, opened without Python model code or compilation.
`torch-compile` serves models that cannot be exported: the compiler's cache is kept, and opening finds it there.
`none` runs the model as it is, for debugging.
"""

import json
import logging
import math
import os
import shlex
import subprocess
import warnings
import weakref
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runtime.batch import Batch, Row, at_least_two, pack
from runtime.bundle import uses_kernels
from runtime.compiler.kernels import SOURCES_DIR, cxx_compiler, flush_denormals_of_openmp
from runtime.compiler.memory import give_back
from runtime.compiler.weights import Layout, layout_of, save_weights
from runtime.config import ARITHMETICS, Arithmetic, LayerShape, StepShape, as_json, parse
from runtime.kv_cache import KVPool, kv_dtype
from runtime.temporary import own_temporary_files

if TYPE_CHECKING:
    from torch._inductor.cpu_vec_isa import VecISA
    from torch.export import ExportedProgram

    from runtime.compiler.model import Step  # opening an engine must not import model code

StepFunction = Callable[..., Tensor]
"""Signature of `Step.forward`."""


def example_pool(
    layers: tuple[LayerShape, ...], num_tokens: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KVPool:
    """A pool that just holds two rows of `num_tokens`."""
    num_blocks = 2 * math.ceil(num_tokens / block_size) + 1
    return KVPool(layers, num_blocks, block_size, dtype, device)


def example_rows(row_lengths: list[int], start: int, num_tokens: int, block_size: int, num_logits: int) -> list[Row]:
    """Rows at position `start` of sequences that own `num_tokens` slots each."""
    num_blocks = math.ceil(num_tokens / block_size)
    return [
        Row([1] * length, start, list(range(1 + i * num_blocks, 1 + (i + 1) * num_blocks)), num_logits)
        for i, length in enumerate(row_lengths)
    ]


PACKAGE, WEIGHTS, CACHE = "rank0.pt2", "rank0.safetensors", "rank0.cache"
_LAYOUT, _SHAPE = "weights.json", "step.json"


def compile_aot(
    step: "Step",
    shape: StepShape,
    directory: Path,
    arithmetic: Arithmetic | None,
    known: Mapping[str, Tensor] | None = None,
    rank: int = 0,
) -> bool:
    """Write the step as an AOTInductor package, and the weights it wants to be handed (on a GPU: none).

    Weights that are among the `known` ones of another step are not written again. Where there are several ranks the
    package is the first's; of the others weights are written for it, and nothing is compiled. On the CPU its linear
    layers are computed in `arithmetic`; returns whether all of them are. Whatever keeps a model from being exported is
    raised as it comes.
    """
    from torch.export.pt2_archive._package import package_pt2
    from torch.export.pt2_archive._package_weights import Weights

    from runtime.compiler.experts import experts_by_kernel  # not to open an engine
    from runtime.compiler.linears import use_kernels
    from runtime.compiler.selection import select_early

    with _quiet(), torch.no_grad(), experts_by_kernel(step.model) if arithmetic is not None else nullcontext():
        program = export_step(
            step, shape.layers, shape.build_config.tokens_per_block, kv_dtype(shape.dtype, shape.kv_cache)
        )
        select_early(program, "logit_indices")
        # Freezing prepacks the weights for the CPU's matrix kernels: steps are two to three times faster.
        # torch writes into its own `metadata`, by which a later torch-compile would not be found again.
        hands_over = arithmetic is not None and use_kernels(program, ARITHMETICS.index(arithmetic))
        options: dict[str, Any] = {
            "freezing": arithmetic is not None,
            "aot_inductor.metadata": {},
            "aot_inductor.package": True,
            "aot_inductor.package_cpp_only": rank > 0,  # whose program is the first's, and is not compiled again
            "aot_inductor.precompile_headers": False,  # for one program it takes as long as reading them
            "aot_inductor.package_constants_in_so": not hands_over,
            "aot_inductor.package_constants_on_disk_format": "pickle_weights" if hands_over else None,
        }
        arguments, _ = program.example_inputs
        with _instructions_looked_up(), _one_loop_a_region(), named_compiler():
            options |= _own_loops() if arithmetic is not None else {}
            made = torch._inductor.aot_compile(program.module(check_guards=False), arguments, options=options)
    assert isinstance(made, list)  # because it is to be packaged
    constants = [file for file in made if isinstance(file, Weights)]
    weights = {name: tensor for part in constants for name, (tensor, _) in part.items()}
    save_weights(directory / f"rank{rank}.safetensors", weights, known)
    if rank > 0:
        return hands_over
    package_pt2(
        str(directory / PACKAGE),
        aoti_files=[file for file in made if isinstance(file, str)],
        extra_files={_LAYOUT: json.dumps(layout_of(weights)), _SHAPE: json.dumps(as_json(shape))},
    )
    return hands_over


def _own_loops() -> dict[str, Any]:
    """Inductor's options by which a package's loops are computed by the kernels' threads: `csrc/package_loops.h`.

    As many threads as there are, whatever their number here. Other compilers than GNU's do not call what is put in the
    place of OpenMP: their loops are computed by one thread.
    """
    from torch._inductor.cpp_builder import is_gcc

    if not is_gcc():
        return {"cpp.threads": 1}
    source = (SOURCES_DIR / "package_loops.h").read_text()
    # What is said to be the declaration of an operation's C function is put into the package as it is.
    return {
        "cpp.threads": 4,  # for as many a loop over heads, of few tokens, is divided by tokens too
        "cpp.min_chunk_size": 64,
        "cpp.dynamic_threads": True,
        "aot_inductor.custom_ops_to_c_shims": {
            torch.ops.specdec.loop_sharer.default: [f"int specdec_loops;\n{source}"]
        },
    }


@contextmanager
def _one_loop_a_region() -> Iterator[None]:
    """Inductor begins a parallel region for each loop: between two of one region its threads wait for each other."""
    from torch._inductor.codegen.cpp import WorkSharing  # only to build

    before = WorkSharing.parallel

    def begin(self: "WorkSharing", threads: int) -> None:
        self.close()  # type: ignore[no-untyped-call]
        before(self, threads)  # type: ignore[no-untyped-call]

    WorkSharing.parallel = begin  # type: ignore[method-assign]
    try:
        yield
    finally:
        WorkSharing.parallel = before  # type: ignore[method-assign]


def named_compiler() -> AbstractContextManager[None]:
    """Inductor calls the compiler that compiles the kernels. By itself it takes an empty CXX for a compiler's name."""
    patched: AbstractContextManager[None] = torch._inductor.config.patch({"cpp.cxx": (None, cxx_compiler())})
    return patched


@contextmanager
def _instructions_looked_up() -> Iterator[None]:
    """Inductor asks the compiler which instructions it knows, and does not compile and load a library for each set.

    That takes 2 s for each of six, and the processor is asked elsewhere.
    """

    def knows(instructions: "VecISA", code: str) -> bool:
        flags = instructions.build_arch_flags().split()
        command = [*shlex.split(cxx_compiler()), *flags, "-fsyntax-only", "-x", "c++", os.devnull]
        return subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0

    from torch._inductor.cpu_vec_isa import VecISA  # only to build

    before = VecISA.check_build
    VecISA.check_build = knows  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        VecISA.check_build = before  # type: ignore[method-assign]


def export_step(
    step: "Step", layers: tuple[LayerShape, ...], block_size: int, kv_dtype: torch.dtype
) -> "ExportedProgram":
    """The step's graph, for any number of rows, tokens, blocks and logits."""
    num_tokens = 2 * block_size + 1 + 5
    pool = example_pool(layers, num_tokens, block_size, kv_dtype, next(step.parameters()).device)
    rows = example_rows([5, 3], 2 * block_size + 1, num_tokens, block_size, 2)
    batch = pack(rows, block_size, pool.keys[0].device)
    free = torch.export.Dim.DYNAMIC
    pools = pool.tensors()
    dynamic = [{0: free, 1: free}] * 4 + [{0: free}] + [[{0: free}] * len(part) for part in pools]
    return torch.export.export(step, (*batch.tensors(), *pools), strict=False, dynamic_shapes=tuple(dynamic))


@dataclass(frozen=True)
class PackagedStep:
    """An opened package, and the memory that it reads."""

    loader: Any
    weights: dict[str, Tensor]

    def __call__(self, *inputs: Tensor | list[Tensor]) -> Tensor:
        flat: list[Tensor] = []
        for value in inputs:
            flat.extend(value if isinstance(value, list) else [value])
        logits: Tensor
        (logits,) = self.loader.run(flat)
        return logits


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
    on_processor, index = device.type == "cpu", -1 if device.index is None else device.index
    with own_temporary_files():
        loader: Any = (
            torch.classes.specdec.Package(str(package))
            if on_processor
            else torch._C._aoti.AOTIModelPackageLoader(str(package), "model", False, 1, index)
        )
    if weights:  # on the CPU only
        loader.load(weights)
    step = PackagedStep(loader, weights)
    for one in list(weights.values())[:1]:  # they lie in one piece; torch never lets go of those that it was handed
        weakref.finalize(step, give_back, one).atexit = False
    return step


class CompiledStep:
    """Compiled on the first call, once for all sizes: a step never waits for the compiler again.

    All that the compiler makes, machine code included, is found in `cache_dir` or put there.
    """

    def __init__(self, step: "Step", cache_dir: Path) -> None:
        self.model = step.model
        self._compiled = torch.compile(step, dynamic=True)
        self.cache_dir = cache_dir

    def __call__(self, *inputs: Any) -> Tensor:
        batch, pools = Batch(*inputs[:5]), inputs[5:]
        if uses_kernels("torch-compile", batch.input_ids.device.type):
            flush_denormals_of_openmp()
        # Or sizes that are equal in the first call would have to be equal in all.
        equal_by_chance = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
        with _compiler_cache(self.cache_dir), equal_by_chance, _instructions_looked_up(), named_compiler():
            logits: Tensor = self._compiled(*at_least_two(batch).tensors(), *pools)
        return logits[: len(batch.logit_indices)]


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
def _quiet() -> Iterator[None]:
    """The compiler's warnings concern its developers; what matters to users is raised."""
    loggers: list[Any] = [logging.getLogger(name) for name in ("torch._inductor", "torch.export", "torch._dynamo")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
