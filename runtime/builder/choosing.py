"""Choice of a compiler by default: on a GPU `none`, which is what has been run there."""

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from runtime.checkpoint.config import Compiler
from runtime.util.errors import SpecDecError, SpecDecWarning

Made = TypeVar("Made")


def compiler_for(device: torch.device, asked: Compiler | None) -> Compiler:
    """The one that is asked for, or the default: no whole engine was compiled ahead of time on a GPU yet."""
    return asked or ("aot" if device.type == "cpu" else "none")


def as_can_be_made(asked: Compiler | None, compiler: Compiler, make: Callable[[Compiler], Made]) -> Made:
    """Make an engine with `compiler`, or, where it lacks a C++ compiler and was not asked for, a SpecDecWarning and one
    with none.
    """
    try:
        return make(compiler)
    except SpecDecError as error:
        if asked is not None or error.code != "no_compiler":
            raise
        warnings.warn(
            f"{error.message}: the model is computed as it is, which is slower, until there is one",
            SpecDecWarning,
            stacklevel=3,
        )
        return make("none")
