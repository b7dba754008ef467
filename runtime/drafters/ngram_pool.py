"""The public pool: the outputs of earlier requests, as n-gram counts in bounded memory.

The pool always has exactly the statistics of its last texts, at most `max_tokens` generated tokens: for a new text, the
counts of the oldest texts are taken out again. It contains no prompts, except their last tokens as patterns before an
output's first token: prompts repeat less than answers, and a request has its own prompt at hand anyway.
"""

from collections import deque
from dataclasses import dataclass, field

from runtime.core.request import Sequence


@dataclass(slots=True)
class _Followers:
    """Followers of a pattern and their counts, in the order of the followers' last occurrences. `best` is the most
    frequent follower; of equally frequent followers, the latest.
    """

    best: int = -1
    counts: dict[int, int] = field(default_factory=dict)

    def add(self, token: int) -> None:
        count = self.counts.pop(token, 0) + 1
        self.counts[token] = count
        if count >= self.counts.get(self.best, 0):
            self.best = token

    def remove(self, token: int) -> None:
        """Remove the oldest occurrence of a follower. The order of followers, by their last occurrence, stays."""
        self.counts[token] -= 1
        if not self.counts[token]:
            del self.counts[token]
        if token == self.best and self.counts:
            self.best = max(reversed(self.counts), key=self.counts.__getitem__)


@dataclass(frozen=True)
class _Text:
    tokens: list[int]
    num_context: int
    """Number of first tokens that are the end of the prompt."""

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_context


class NgramPool:
    """N-gram counts shared by all requests of a run and written by one drafter: a request's text is added when it
    finishes.

    `max_tokens` bounds the generated tokens that are kept, and so the patterns: at most `max_matching_ngram_size` for
    each token. With many users, the drafts for one user reveal other users' answers, if only by their timing.
    """

    def __init__(self, max_tokens: int = 100_000, max_matching_ngram_size: int = 4) -> None:
        self.max_tokens = max_tokens
        self.max_matching_ngram_size = max_matching_ngram_size
        self.num_tokens = 0
        self._texts: deque[_Text] = deque()
        self._followers: dict[tuple[int, ...], _Followers] = {}

    def clear(self) -> None:
        """Forget all texts."""
        self.num_tokens = 0
        self._texts.clear()
        self._followers.clear()

    def add(self, sequence: Sequence) -> None:
        """Add the tokens that the request generated. If they are more than the pool holds, their end is added."""
        tokens = sequence.tokens
        first = max(len(sequence.request.prompt_tokens), len(tokens) - self.max_tokens)
        num_context = min(first, self.max_matching_ngram_size)
        text = _Text(tokens[first - num_context :], num_context)
        if not text.num_generated:
            return
        self.num_tokens += text.num_generated
        while self.num_tokens > self.max_tokens:
            self._remove(self._texts.popleft())
        self._texts.append(text)
        for pattern, follower in self._patterns(text):
            self._followers.setdefault(pattern, _Followers()).add(follower)

    def find(self, tokens: list[int], min_size: int = 1) -> tuple[int, int] | None:
        """(n, token): the size of the longest known pattern at the end of `tokens`, and its most frequent follower; of
        equally frequent followers, the latest. None if no pattern of at least `min_size` tokens is known.
        """
        for n in range(min(self.max_matching_ngram_size, len(tokens)), min_size - 1, -1):
            followers = self._followers.get(tuple(tokens[-n:]))
            if followers is not None:
                return n, followers.best
        return None

    def draft(self, tokens: list[int], draft_len: int) -> list[int]:
        """Draft by `find` again and again: each token found becomes part of the next pattern."""
        tail, draft = tokens[-self.max_matching_ngram_size :], list[int]()
        while len(draft) < draft_len and (found := self.find(tail)) is not None:
            draft.append(found[1])
            tail = [*tail, found[1]][-self.max_matching_ngram_size :]
        return draft

    def _patterns(self, text: _Text) -> list[tuple[tuple[int, ...], int]]:
        tokens, size = text.tokens, self.max_matching_ngram_size
        return [
            (tuple(tokens[end - n : end]), tokens[end])
            for end in range(text.num_context, len(tokens))
            for n in range(1, min(size, end) + 1)
        ]

    def _remove(self, text: _Text) -> None:
        self.num_tokens -= text.num_generated
        for pattern, follower in self._patterns(text):
            followers = self._followers[pattern]
            followers.remove(follower)
            if not followers.counts:
                del self._followers[pattern]
