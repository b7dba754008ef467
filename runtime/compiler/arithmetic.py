"""Choice of the fastest matmul kernel on this machine, by measurement, because processors differ in it by factors.

vdpbf16ps has half the rate of float32 on Intel's Sapphire Rapids and twice that on AMD's Zen 5. One arithmetic serves
steps of few and of many tokens, or a token's logits would depend on the company it is computed in.
"""

import time
from math import prod

import torch

from runtime.config import ARITHMETICS, Arithmetic

_SIZE = 2048  # of the layer that is measured, inputs and outputs
_MANY_TOKENS = 256
_PASSES = 3


def fastest_arithmetic(dtype: torch.dtype, num_tokens: int) -> Arithmetic:
    """The kernels' fastest for steps of `num_tokens` and for prompts, which count the same; they must be loaded."""
    choices = torch.ops.specdec.arithmetics() if dtype == torch.bfloat16 else [0]
    if len(choices) == 1:
        return ARITHMETICS[choices[0]]
    seconds = {choice: _seconds(choice, dtype, num_tokens) for choice in choices}
    return ARITHMETICS[min(choices, key=lambda choice: prod(seconds[choice]))]


def _seconds(arithmetic: int, dtype: torch.dtype, num_tokens: int) -> list[float]:
    """The shortest of a few calls, for few tokens and for many."""
    packed = torch.ops.specdec.pack_linear(torch.full((_SIZE, _SIZE), 1.0, dtype=dtype))
    shortest = []
    for count in (num_tokens, _MANY_TOKENS):
        x, times = torch.full((count, _SIZE), 1.0, dtype=dtype), []
        for _ in range(_PASSES + 1):  # the first warms up
            start = time.perf_counter()
            torch.ops.specdec.linear(x, packed, None, _SIZE, arithmetic)
            times.append(time.perf_counter() - start)
        shortest.append(min(times[1:]))
    return shortest
