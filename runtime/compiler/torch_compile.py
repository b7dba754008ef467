"""A step compiled by torch.compile, for models with operations that token programs lack, and for GPUs.

The step is the model's own, with our kernels on a CPU. All files that the compiler makes are kept beside the engine,
and used when the engine is opened.
"""

import os
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from runtime.checkpoint.bundle import uses_kernels
from runtime.compiler.package import StepOutput, logits_of
from runtime.core.batch import Batch, pad_to_min_2
from runtime.kernels.library import cxx_compiler
from runtime.kernels.ops import flush_denormals_of_openmp

if TYPE_CHECKING:
    from torch._inductor.cpu_vec_isa import VecISA

    from runtime.model.model import Step


class CompiledStep:
    """A step that is compiled on the first call, once for all sizes: a later step never waits for the compiler.

    All files that the compiler makes, machine code included, are found in `cache_dir` or put there.
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
        with _compiler_settings(self.cache_dir), equal_by_chance, instructions_looked_up():
            padded = pad_to_min_2(batch)
            output: StepOutput = self._compiled(*padded, *pools, *states)
        logits = logits_of(output)[: len(batch.logit_indices)]
        if not isinstance(output, tuple):
            return logits
        B, Q = batch.input_ids.shape
        return logits, output[1].view(*padded.input_ids.shape, -1)[:B, :Q].flatten(0, 1)


@contextmanager
def _compiler_settings(cache_dir: Path) -> Iterator[None]:
    """Have Inductor keep its cache in `cache_dir` within the block, and use the compiler that compiles the kernels.

    Inductor reads the place from an environment variable, and nowhere else. It takes an empty CXX for a compiler's
    name. Headers are not precompiled: Inductor would do that in every process, needed or not.
    """
    settings = {"cpp_cache_precompile_headers": False, "cpp.cxx": (None, cxx_compiler())}
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    os.environ[name] = str(cache_dir)
    try:
        with torch._inductor.config.patch(settings):
            yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def instructions_looked_up() -> Iterator[None]:
    """Have Inductor ask the compiler which instructions it knows, instead of compiling and loading a library for each
    of six sets, which takes 2 s each. Whether the processor has them is checked elsewhere.
    """

    def knows(instructions: "VecISA", code: str) -> bool:
        flags = instructions.build_arch_flags().split()
        command = [*shlex.split(cxx_compiler()), *flags, "-fsyntax-only", "-x", "c++", os.devnull]
        return subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0

    from torch._inductor.cpu_vec_isa import VecISA  # an `aot` engine needs none of Inductor

    before = VecISA.check_build
    VecISA.check_build = knows  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        VecISA.check_build = before  # type: ignore[method-assign]
