"""The noise of sampling: a number of each token that depends on the key of its position and on nothing else.

`noise.h` of the kernels computes the same: integers are exact, and of the logarithms, which two libraries may round
differently, a last bit decides only between two tokens whose scores and noise are equal to 15 digits.
"""

import numpy as np
from numpy.typing import NDArray


def gumbel(key: int, tokens: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Gumbel noise of each token, from the 64 bits of its position's key: -log(-log(1 - v)) for 52-bit v in (0, 1).

    Small v are large noise, and where v is small it is finest: probabilities down to 1e-15 are drawn with.
    """
    first, second = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
    upper, lower = _bits(tokens, first, second), _bits(tokens, second, first)
    bits = (upper.astype(np.uint64) << np.uint64(32) | lower) >> np.uint64(12)
    v = (2 * bits + 1).astype(np.float64) * 2.0**-53
    return -np.log(-np.log(1.0 - v))


def _bits(tokens: NDArray[np.uint32], first: np.uint32, second: np.uint32) -> NDArray[np.uint32]:
    """32 bits of each token by the halves of the key; with the halves exchanged, 32 others."""
    return _mixed(_mixed(tokens ^ first) ^ second)


def _mixed(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """A permutation of 32 bits of which each bit changes every bit of the result about half the time.

    Two rounds of shifting and multiplying, with the constants that Wellons' search found to be least biased
    (github.com/skeeto/hash-prospector).
    """
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x21F0AAAD)
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x735A2D97)
    return x ^ x >> np.uint32(15)
