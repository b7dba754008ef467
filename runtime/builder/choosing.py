"""The choice of a compiler, before an engine is built."""

import warnings

import torch

from runtime.checkpoint.config import Compiler, EngineConfig
from runtime.kernels.library import are_kernels_compiled, has_compiler, no_compiler
from runtime.util.errors import SpecDecError, SpecDecWarning


def compiler_for(device: torch.device, asked: Compiler | None) -> Compiler:
    """The compiler that is asked for, or the default. SpecDecError for `aot` on a GPU: its programs are for CPUs."""
    if asked == "aot" and device.type != "cpu":
        raise SpecDecError(
            f"`aot` makes programs for CPUs: {device}", hint="take torch-compile or none", code="aot_on_gpu"
        )
    return asked or ("aot" if device.type == "cpu" else "none")


def without_kernels(compiler: Compiler) -> Compiler:
    """The compiler to use: `none`, with a SpecDecWarning, if `compiler` is a default whose kernels must still be
    compiled and there is no C++ compiler; otherwise `compiler`.
    """
    if compiler == "none" or has_compiler() or are_kernels_compiled():
        return compiler
    warnings.warn(
        f"{no_compiler().message}: the model is computed as it is, which is slower, until there is one",
        SpecDecWarning,
        stacklevel=3,
    )
    return "none"


def check_is_aot(config: EngineConfig) -> None:
    """SpecDecError if `aot` was asked for, and the engine in the cache, built with the default compiler,
    has another.
    """
    if config.build_config.compiler != "aot":
        raise lacks_operations((config.compiler_note or "").rpartition(": ")[2])


def lacks_operations(operations: str) -> SpecDecError:
    return SpecDecError(
        f"the model has operations that `aot` lacks: {operations}", hint="take torch-compile", code="lacks_operations"
    )
