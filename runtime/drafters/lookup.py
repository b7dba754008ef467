"""Shared parts of lookups: the text of a sequence's tokens, which is searched, and the early end of a draft at an end
id.

A text is kept as a `str` with a character for each token, which needs no index: Python finds a pattern in a thousand
tokens within a microsecond. Reading a long prompt thus costs nothing, and a step little beside its attention to the
same tokens. An occurrence of a pattern counts if a token follows it. It is given by its end, which is that token's
index.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

from runtime.core.request import Draft, Sequence
from runtime.drafters.ngram_pool import NgramPool

_NUM_CHARACTERS = 0x110000
"""Number of characters that tokens may use. An id beyond it would share the character of a smaller id: a draft could
then be wrong, but would still be verified.
"""
MAX_OCCURRENCES = 64
"""Limit on the occurrences that are counted for a pattern (the last ones), so that repetitive text takes no more time.
"""


class Text:
    """A sequence's tokens, as far as they have been read."""

    def __init__(self) -> None:
        self.characters = ""

    @property
    def num_tokens(self) -> int:
        return len(self.characters)

    def read(self, sequence: Sequence) -> None:
        """Append the sequence's new tokens."""
        self.characters += as_characters(sequence.tokens[len(self.characters) :])

    def find_longest(self, tail: str, most: int, more_than: int = 0) -> tuple[int, int]:
        """(n, end): length of the longest suffix of `tail` that occurs here, at most `most`, and the end of its last
        occurrence; (more_than, 0) if no suffix of more than `more_than` tokens occurs.

        Each search looks for one token more than the last one found, before the place where that was, so together the
        searches read the text once.
        """
        characters, num_tail = self.characters, len(tail)
        n, end, limit, most = more_than, 0, len(characters) - 1, min(most, num_tail)
        while n < most and (start := characters.rfind(tail[num_tail - n - 1 :], 0, limit)) >= 0:
            n, end = n + 1, start + n + 1
            limit = end - 1
            while n < most and n < end and characters[end - n - 1] == tail[num_tail - n - 1]:
                n += 1
        return n, end

    def ends_before(self, pattern: str, last: int) -> list[int]:
        """Ends of the pattern's last 64 occurrences, from the occurrence that ends at `last` backwards."""
        ends, size, find = [last], len(pattern), self.characters.rfind
        for _ in range(MAX_OCCURRENCES - 1):
            if (start := find(pattern, 0, ends[-1] - 1)) < 0:
                break
            ends.append(start + size)
        return ends


@dataclass
class History:
    """A request's sequence, and the text of its tokens that have been read."""

    sequence: Sequence
    text: Text = field(default_factory=Text)


class TextLookup(ABC):
    """A lookup in the text of each sequence and, with a `pool`, in the outputs of other requests. A request's text goes
    into the pool when the request has finished.
    """

    def __init__(self, pool: NgramPool | None = None) -> None:
        self.pool = pool
        self._histories: dict[int, History] = {}

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [self._look_up(self._read(sequence), max_draft_len) for sequence in sequences]

    def look_ahead(self, sequence: Sequence, drafted: list[int], max_draft_len: int) -> Draft:
        """Continuation behind the tokens `drafted`; empty for a request that the lookup has not seen."""
        if (history := self._histories.get(sequence.request.id)) is None:
            return Draft([])
        new = sequence.tokens[history.text.num_tokens :]
        return self._look_up_after(history, [*new, *drafted], max_draft_len)

    def forget(self, request_id: int) -> None:
        history = self._histories.pop(request_id, None)
        if history is not None and self.pool is not None:
            self.pool.add(history.sequence)

    def _read(self, sequence: Sequence) -> History:
        """The sequence's history, updated to its present tokens."""
        history = self._histories.setdefault(sequence.request.id, History(sequence))
        history.sequence = sequence
        history.text.read(sequence)
        return history

    @abstractmethod
    def _look_up(self, history: History, max_draft_len: int) -> Draft:
        """Continuation of the sequence's text."""

    @abstractmethod
    def _look_up_after(self, history: History, new: list[int], draft_len: int) -> Draft:
        """Continuation of the sequence's text followed by the tokens `new`."""


def as_characters(tokens: Iterable[int]) -> str:
    return "".join([chr(token % _NUM_CHARACTERS) for token in tokens])


def num_common_before(characters: str, end: int, tail: str, most: int) -> int:
    """Number of tokens before `end`, at most `most`, that equal the last tokens of `tail`; by bisection."""
    low, high = 0, min(most, end, len(tail))
    while low < high:
        middle = (low + high + 1) // 2
        if characters[end - middle : end] == tail[len(tail) - middle :]:
            low = middle
        else:
            high = middle - 1
    return low


def most_frequent(tokens: list[int]) -> int:
    """The most frequent item; among equally frequent items the first."""
    if tokens.count(tokens[0]) == len(tokens):
        return tokens[0]
    counts: dict[int, int] = {}
    for token in tokens:
        counts[token] = counts.get(token, 0) + 1
    return max(counts, key=counts.__getitem__)


def cut_at_end_id(tokens: list[int], end_ids: frozenset[int]) -> list[int]:
    """The tokens before the first end id. Drafting the end id would gain nothing: it comes as the bonus token."""
    if end_ids.isdisjoint(tokens):
        return tokens
    return tokens[: next(i for i, token in enumerate(tokens) if token in end_ids)]
