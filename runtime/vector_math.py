"""MKL's functions of vectors (VML), which torch takes for cosines, exponentials and the like on the CPU."""

from functools import cache

import torch

_FUNCTIONS = (
    *(torch.acos, torch.asin, torch.atan, torch.cos, torch.erf, torch.erfc, torch.exp, torch.expm1, torch.log),
    *(torch.log10, torch.log1p, torch.log2, torch.sin, torch.sqrt, torch.tan, torch.tanh),
)


@cache
def choose_vector_math() -> None:
    """Have MKL choose each of its functions while one thread asks for it, for all of this process's life.

    Where two threads are the first to ask, one may get a function of low accuracy for that one time: rotary angles of a
    process's first prompt were wrong in the fourth digit (https://github.com/pytorch/pytorch/issues/188792).
    """
    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for function in _FUNCTIONS:
            function(number)
