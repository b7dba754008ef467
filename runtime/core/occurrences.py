"""Token counts for a request's penalties and bans, updated token by token.

At each position only the new tokens are counted, not the whole prefix. Tokens that neither occur nor have a bias have
no entry.
"""

from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.core.params import SamplingConfig

_TOKEN, _BIAS, _OCCURS, _COUNT = range(4)
NO_ENTRIES: NDArray[np.int32] = np.zeros((0, 4), np.int32)


@dataclass(frozen=True)
class Adjustments:
    """Score adjustments at a position: an `Entry` of the kernels' `cuts.h` for each token, and banned tokens."""

    entries: NDArray[np.int32]
    """Entries [n, 4]: token, bias (the bits of a float32), number of occurrences, and number of occurrences that
    presence and frequency penalties count.
    """
    later: NDArray[np.int32]
    """Entries of the tokens in the draft before the position. They replace those in `entries` for the same tokens."""
    bans: list[int]


class Occurrences:
    """Token counts of a request. Calls may pass any prefix, but are fastest if it extends the previous call's."""

    def __init__(self, params: SamplingConfig, num_prompt_tokens: int) -> None:
        self._counts = params.repetition_penalty != 1.0 or bool(params.presence_penalty or params.frequency_penalty)
        self._start = 0 if params.penalize_prompt else num_prompt_tokens
        self._ngram_size = params.no_repeat_ngram_size
        self._banned = [word[0] for word in params.bad_words if len(word) == 1]
        self._words = [(list(word[:-1]), word[-1]) for word in params.bad_words if len(word) > 1]
        self._tokens: list[int] = []
        self._entries, self._slots = np.zeros((64, 4), np.int32), dict[int, int]()
        self._followers: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for token, bias in params.logit_bias:
            self._entry(token)[_BIAS : _BIAS + 1].view(np.float32)[0] += bias

    def at(self, prefix: list[int], draft_tokens: Seq[int]) -> list[Adjustments]:
        """Adjustments after `prefix`, and after each token of a draft that follows it."""
        self._follow(prefix)
        entries = self._entries[: len(self._slots)].copy()
        positions = [Adjustments(entries, NO_ENTRIES, self._bans())]
        for i, token in enumerate(draft_tokens, start=1):
            self._append(token)
            slots = [self._slots[one] for one in set(draft_tokens[:i])] if self._counts else []
            positions.append(Adjustments(entries, self._entries[slots], self._bans()))
        for _ in draft_tokens:
            self._drop()
        return positions

    def _follow(self, prefix: list[int]) -> None:
        while self._tokens != prefix[: len(self._tokens)]:
            self._drop()
        for token in prefix[len(self._tokens) :]:
            self._append(token)

    def _append(self, token: int) -> None:
        self._count(token, 1)
        self._tokens.append(token)
        if self._ngram_size and len(self._tokens) >= self._ngram_size:
            self._followers[self._last(self._ngram_size)[:-1]].append(token)

    def _drop(self) -> None:
        if self._ngram_size and len(self._tokens) >= self._ngram_size:
            self._followers[self._last(self._ngram_size)[:-1]].pop()
        self._count(self._tokens.pop(), -1)

    def _count(self, token: int, change: int) -> None:
        """Count the token behind `self._tokens` once more (1), or once less (-1)."""
        if self._counts:
            entry = self._entry(token)
            entry[_OCCURS] += change
            entry[_COUNT] += change if len(self._tokens) >= self._start else 0

    def _last(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._tokens[len(self._tokens) - num_tokens :])

    def _entry(self, token: int) -> NDArray[np.int32]:
        """The token's row, which is made if it does not exist."""
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._entries):
            self._entries = np.concatenate([self._entries, np.zeros_like(self._entries)])
        entry: NDArray[np.int32] = self._entries[slot]
        entry[_TOKEN] = token
        return entry

    def _bans(self) -> list[int]:
        bans = list(self._banned)
        if self._ngram_size and len(self._tokens) >= self._ngram_size:
            bans += self._followers.get(self._last(self._ngram_size - 1), ())
        return bans + [last for first, last in self._words if self._tokens[-len(first) :] == first]
