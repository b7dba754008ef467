"""Drafts by n-gram lookup: what followed the sequence's last tokens when they occurred before.

Behaviour of TensorRT-LLM's NgramPool (examples/ngram/run_dtm_ngram.py): the longest pattern first, the oldest
continuation, private to each request. Two of its habits are left out: without a match nothing is drafted (it sends a
dummy token), and while no continuation has its full length the oldest is taken (it takes the newest, which
is the shortest). Other rankings choose another occurrence. A pattern is mapped to where the chosen one ended; the
continuation is read from the sequence itself. A public pool is asked where the sequence has no match.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from runtime.drafters.lookup import cut_at_end_id
from runtime.drafters.pool import NgramPool
from runtime.drafters.specs import NgramRanking
from runtime.errors import UsageError
from runtime.request import Draft, Sequence

Pattern = tuple[int, ...]
_LONGEST_MATCH = 32
"""How far back it is looked how long a match is, which says how right its draft may be."""
_LONGEST_INDEXED = 16
"""Patterns of every size up to this are kept. Longer ones would take memory by the square of their size: they are
looked for where their last so many tokens occurred."""


@dataclass
class _History:
    """Patterns of one request. `num_indexed` tokens have been seen as the end of a pattern that has a follower."""

    sequence: Sequence
    ends: dict[Pattern, int] = field(default_factory=dict)
    counts: dict[Pattern, dict[int, int]] = field(default_factory=dict)
    places: dict[Pattern, list[int]] = field(default_factory=dict)
    """Where each pattern of the longest size that is indexed ended, if there may be longer ones."""
    num_indexed: int = 0


def _keep_first(history: _History, pattern: Pattern, end: int, follower: int) -> None:
    history.ends.setdefault(pattern, end)


def _keep_last(history: _History, pattern: Pattern, end: int, follower: int) -> None:
    history.ends[pattern] = end


def _keep_most_frequent(history: _History, pattern: Pattern, end: int, follower: int) -> None:
    counts = history.counts.setdefault(pattern, {})
    count = counts[follower] = counts.get(follower, 0) + 1
    chosen = history.ends.get(pattern)
    if chosen is None or count >= counts[history.sequence.tokens[chosen]]:
        history.ends[pattern] = end


_KEEP: dict[NgramRanking, Callable[[_History, Pattern, int, int], None]] = {
    "oldest": _keep_first,
    "leftmost": _keep_first,
    "recent": _keep_last,
    "frequent": _keep_most_frequent,
}


class NgramLookup:
    """Looks up the last `max_matching_ngram_size`, then fewer, tokens of each sequence in that sequence.

    With max_matching_ngram_size 2 and the tokens 7 8 9 5 8 9 the pattern (8, 9) first ended before the 5: the draft is
    5 8 9, cut to the draft length. Where several occurrences have a follower, `ranking` chooses

    - oldest: the first;
    - leftmost: the first too, with drafts token for token those of transformers' prompt lookup
      (PromptLookupCandidateGenerator), which may reach past the budget; a loop cuts them, and then they are `oldest`'s;
    - recent: the last;
    - frequent: the last of those with the most frequent follower (of equally frequent ones the latest).

    The continuations of `recent` and `frequent` often reach the sequence's end, where they go on in the draft itself:
    after 1 2 3 1 2 3 comes 1 2 3 1 2 3 1 ... .
    """

    def __init__(
        self,
        max_matching_ngram_size: int,
        *,
        min_matching_ngram_size: int = 1,
        ranking: NgramRanking = "oldest",
        pool: NgramPool | None = None,
    ) -> None:
        if not 1 <= min_matching_ngram_size <= max_matching_ngram_size:
            raise UsageError(
                f"n-gram sizes are not from 1 up: {min_matching_ngram_size} to {max_matching_ngram_size}",
                hint="1 <= min_matching_ngram_size <= max_matching_ngram_size",
            )
        if ranking not in _KEEP:
            raise UsageError(f"unknown ranking: {ranking}", hint=f"one of {', '.join(_KEEP)}")
        self.max_matching_ngram_size = max_matching_ngram_size
        self.min_matching_ngram_size = min_matching_ngram_size
        self.ranking = ranking
        self.pool = pool
        self._longest_indexed = min(max_matching_ngram_size, _LONGEST_INDEXED)
        self._keep = _KEEP[ranking]
        self._histories: dict[int, _History] = {}

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [self._lookup(sequence, max_draft_len) for sequence in sequences]

    def look_ahead(self, sequence: Sequence, drafted: list[int], max_draft_len: int) -> Draft:
        """What may follow these tokens after a sequence that was looked at before. Nothing is learned of them."""
        if (history := self._histories.get(sequence.request.id)) is None:
            return Draft([])
        tokens = [*sequence.tokens, *drafted]
        size, end = self._find_indexed(history, tokens)
        return self._found(sequence, tokens, end, max_draft_len) if size else Draft([])

    def forget(self, request_id: int) -> None:
        history = self._histories.pop(request_id, None)
        if history is not None and self.pool is not None:
            self.pool.add(history.sequence)

    def _lookup(self, sequence: Sequence, max_draft_len: int) -> Draft:
        tokens = sequence.tokens
        history = self._histories.setdefault(sequence.request.id, _History(sequence))
        history.sequence = sequence
        self._index(history)
        draft_len = min(max_draft_len, sequence.max_draft_len)
        if self.ranking == "leftmost" and draft_len:
            draft_len = max_draft_len
        size, end = self._find_long(history) or self._find_indexed(history, tokens)
        if size:
            return self._found(sequence, tokens, end, draft_len)
        match_len, draft = 0, list[int]()
        if self.pool is not None and (found := self.pool.find(tokens)) is not None:
            match_len = found[0]
            draft = self.pool.draft(tokens, draft_len)
        return Draft(cut_at_end_id(draft, sequence.request.end_ids), match_len=match_len)

    def _found(self, sequence: Sequence, tokens: list[int], end: int, draft_len: int) -> Draft:
        draft = self._continue(tokens, end, draft_len)
        match_len = _num_common_before(tokens, end, max(_LONGEST_MATCH, self.max_matching_ngram_size))
        return Draft(cut_at_end_id(draft, sequence.request.end_ids), match_len=match_len)

    def _find_indexed(self, history: _History, tokens: list[int]) -> tuple[int, int]:
        """(size, end) of the longest pattern that is kept and ends the tokens, as the ranking chooses; (0, 0): none."""
        longest = min(self._longest_indexed, len(tokens) - 1)
        for n in range(longest, self.min_matching_ngram_size - 1, -1):
            if (end := history.ends.get(tuple(tokens[-n:]))) is not None:
                return n, end
        return 0, 0

    def _find_long(self, history: _History) -> tuple[int, int] | None:
        """The same for patterns longer than those; None if there is none."""
        tokens = history.sequence.tokens
        places = history.places.get(tuple(tokens[-_LONGEST_INDEXED:]), [])
        sizes = [_num_common_before(tokens, end, self.max_matching_ngram_size) for end in places]
        size = max(sizes, default=0)
        if size < max(self.min_matching_ngram_size, _LONGEST_INDEXED + 1):
            return None
        pattern = tuple(tokens[-size:])
        found = _History(history.sequence)
        for end, own_size in zip(places, sizes, strict=True):
            if own_size == size:
                self._keep(found, pattern, end, tokens[end])
        return size, found.ends[pattern]

    def _continue(self, tokens: list[int], end: int, draft_len: int) -> list[int]:
        draft = tokens[end : end + draft_len]
        if self.ranking in ("recent", "frequent") and len(draft) < draft_len:
            draft = (draft * draft_len)[:draft_len]
        return draft

    def _index(self, history: _History) -> None:
        """Add the patterns that have a follower by now; those at the very end have none yet."""
        tokens = history.sequence.tokens
        if self.max_matching_ngram_size > _LONGEST_INDEXED:
            for end in range(max(history.num_indexed + 1, _LONGEST_INDEXED), len(tokens)):
                history.places.setdefault(tuple(tokens[end - _LONGEST_INDEXED : end]), []).append(end)
        for n in range(self.min_matching_ngram_size, min(self._longest_indexed, len(tokens) - 1) + 1):
            first = max(history.num_indexed + 1, n)
            patterns = zip(*(tokens[first - n + i : len(tokens) - n + i] for i in range(n)), strict=True)
            for end, pattern in enumerate(patterns, first):
                self._keep(history, pattern, end, tokens[end])
        history.num_indexed = max(history.num_indexed, len(tokens) - 1)


def _num_common_before(tokens: list[int], end: int, most: int) -> int:
    """How many tokens before `end` are the sequence's last ones, at most `most`: by halves, compared as slices."""
    low, high = 0, min(most, end)
    while low < high:
        middle = (low + high + 1) // 2
        if tokens[end - middle : end] == tokens[-middle:]:
            low = middle
        else:
            high = middle - 1
    return low
