"""Answers that were given before, and the marks by which a prompt finds the answer to the same or a similar prompt.

The marks are digests of the whole prompt and of its last 64 tokens, and 32 hashes. A hash stands for three tokens that
follow each other; the marks are the 32 smallest hashes of the prompt's last 1,024 tokens. Two prompts share many of
these hashes if most of their text is the same (Broder 1997). A wrong match does no harm: an old answer is only a
draft, which the model verifies.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from runtime.core.params import FIELDS, GREEDY
from runtime.core.request import Request, Sequence

TAIL = 64
"""Number of last tokens of a prompt by which its answer is found too."""
_PIECE_BYTES = 8
_NUM_PIECES, _LONGEST_READ = 32, 1024
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
_DRAW = [field.config or name for name, (_, field) in FIELDS.items() if field.greedy_ignores]
_GREEDY = {name: getattr(GREEDY, name) for name in _DRAW} | {"temperature": 0.0, "return_index": 0}
"""Values recorded in place of the settings on which greedy answers do not depend."""
_SHORTEST = 2
"""Least number of tokens of an answer that is worth keeping: a draft of a single token hardly saves a step."""


@dataclass(frozen=True)
class Marks:
    """Digests of a request. `tail` is empty if the prompt has at most `TAIL` tokens."""

    prompt: bytes
    tail: bytes
    pieces: bytes
    """Hashes of pieces of three tokens, 8 bytes each."""
    way: bytes
    """Digest of the way in which tokens are chosen: greedily, or by which seed and settings."""

    @staticmethod
    def of(request: Request) -> "Marks":
        tokens = np.asarray(request.prompt_tokens, "<u4")
        tail = _digest(tokens[-TAIL:].tobytes()) if len(tokens) > TAIL else b""
        way = {**vars(request.sampling), "return_index": request.return_index}
        if request.sampling.is_greedy:
            way |= _GREEDY
        return Marks(
            _digest(tokens.tobytes()), tail, _pieces(tokens[-_LONGEST_READ:]).tobytes(), _digest(repr(way).encode())
        )

    def each_piece(self) -> list[bytes]:
        return [self.pieces[at : at + _PIECE_BYTES] for at in range(0, len(self.pieces), _PIECE_BYTES)]


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer, 4 bytes each, and the marks of its request."""

    marks: Marks
    tokens: bytes

    @staticmethod
    def of(sequence: Sequence, marks: Marks) -> "Answer | None":
        """The sequence's output so far as an answer; None if it is too short to keep."""
        if sequence.num_generated < _SHORTEST:
            return None
        return Answer(marks, np.asarray(sequence.output_tokens, "<u4").tobytes())

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4

    def ids(self) -> list[int]:
        return np.frombuffer(self.tokens, "<u4").tolist()  # type: ignore[no-any-return]


def _pieces(tokens: "np.ndarray[tuple[int], np.dtype[np.uint32]]") -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """The 32 smallest hashes of the pieces of three tokens, without repetitions, sorted."""
    ids = tokens.astype(np.uint64)
    hashes = sum((ids[i : len(ids) - 2 + i] * np.uint64(factor) for i, factor in enumerate(_FACTORS)), np.uint64(0))
    hashes = np.atleast_1d(hashes)
    hashes ^= hashes >> np.uint64(31)
    hashes *= np.uint64(_FACTORS[0])
    hashes ^= hashes >> np.uint64(29)
    hashes.sort()
    is_new = np.ones(len(hashes), bool)
    np.not_equal(hashes[1:], hashes[:-1], out=is_new[1:])
    return hashes[is_new][:_NUM_PIECES]


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
