"""The default compiler: on a GPU `none`, the only one that was tried there."""

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from runtime.checkpoint.config import Compiler
from runtime.util.errors import SpecDecError, SpecDecWarning

Made = TypeVar("Made")


def compiler_for(device: torch.device, asked: Compiler | None) -> Compiler:
    """The compiler asked for, or the default: no whole engine has been compiled ahead of time on a GPU yet."""
    return asked or ("aot" if device.type == "cpu" else "none")


def as_can_be_made(asked: Compiler | None, compiler: Compiler, make: Callable[[Compiler], Made]) -> Made:
    """Make an engine with `compiler`. If there is no C++ compiler and the user did not ask for this one, warn and make
    an engine with `none`.
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
