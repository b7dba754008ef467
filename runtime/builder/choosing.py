"""The choice of a compiler, before an engine is built."""

import warnings

import torch

from runtime.checkpoint.config import Compiler, EngineConfig
from runtime.kernels.library import are_kernels_compiled, has_compiler, no_compiler
from runtime.util.errors import SpecDecError, SpecDecWarning


def compiler_for(device: torch.device, asked: Compiler | None) -> Compiler:
    """The compiler that is asked for, or the device's default. SpecDecError for `aot` on a GPU."""
    if asked == "aot" and device.type != "cpu":
        raise SpecDecError(
            f"`aot` makes programs for CPUs: {device}",
            hint='use `compiler="torch-compile"`, or no compiler: `compiler="none"`',
            code="aot_on_gpu",
        )
    return asked or ("aot" if device.type == "cpu" else "none")


def without_kernels(compiler: Compiler) -> Compiler:
    """The compiler to use: `none`, with a SpecDecWarning, if `compiler` is a default whose kernels must still be
    compiled and there is no C++ compiler; otherwise `compiler`.
    """
    if compiler == "none" or has_compiler() or are_kernels_compiled():
        return compiler
    warnings.warn(
        f"{no_compiler().message}: the model is computed as it is, which is slower, until there is a compiler",
        SpecDecWarning,
        stacklevel=3,
    )
    return "none"


def check_is_aot(config: EngineConfig) -> None:
    """SpecDecError for an engine built by another compiler than `aot`, because `aot` lacks an operation."""
    if config.build_config.compiler != "aot":
        raise lacks_operations((config.compiler_note or "").rpartition(": ")[2])


def lacks_operations(operations: str) -> SpecDecError:
    return SpecDecError(
        f"the model has operations that `aot` lacks: {operations}",
        hint='use `compiler="torch-compile"`, or no compiler: `compiler="none"`',
        code="lacks_operations",
    )
