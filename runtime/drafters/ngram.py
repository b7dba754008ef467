"""Drafts by n-gram lookup: what followed the sequence's last tokens when they occurred before.

Behaviour of TensorRT-LLM's NgramPool (examples/ngram/run_dtm_ngram.py): the longest pattern first, the oldest
continuation, private to each request. Two of its habits are left out: without a match nothing is drafted (it sends a
dummy token), and while no continuation has its full length the oldest is taken (it takes the newest, which
is the shortest). The pool maps a pattern to where it first ended; the continuation is read from the sequence itself.
"""

from dataclasses import dataclass, field

from runtime.request import Draft, Sequence


@dataclass
class _Pool:
    """Patterns of one request. `num_indexed` tokens have been seen as the end of a pattern that has a follower."""

    first_end: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_indexed: int = 0


class NgramDrafter:
    """Looks up the last `max_matching_ngram_size`, then fewer, tokens of each sequence in that sequence.

    With max_matching_ngram_size 2 and the tokens 7 8 9 5 8 9 the pattern (8, 9) first ended before the 5: the draft is
    5 8 9, cut to the draft length.
    """

    def __init__(self, max_matching_ngram_size: int) -> None:
        self.max_matching_ngram_size = max_matching_ngram_size
        self._pools: dict[int, _Pool] = {}

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [Draft(self._lookup(sequence, max_draft_len)) for sequence in sequences]

    def forget(self, request_id: int) -> None:
        self._pools.pop(request_id, None)

    def _lookup(self, sequence: Sequence, max_draft_len: int) -> list[int]:
        tokens = sequence.tokens
        pool = self._pools.setdefault(sequence.request.id, _Pool())
        self._index(pool, tokens)
        # The target adds a token of its own to whatever it accepts.
        draft_len = min(max_draft_len, sequence.num_remaining - 1)
        for n in range(min(self.max_matching_ngram_size, len(tokens) - 1), 0, -1):
            end = pool.first_end.get(tuple(tokens[-n:]))
            if end is not None:
                return _cut_at_end_id(tokens[end : end + max(draft_len, 0)], sequence.request.end_ids)
        return []

    def _index(self, pool: _Pool, tokens: list[int]) -> None:
        """Add the patterns that have a follower by now; those at the very end have none yet."""
        for end in range(pool.num_indexed + 1, len(tokens)):
            for n in range(1, min(self.max_matching_ngram_size, end) + 1):
                pool.first_end.setdefault(tuple(tokens[end - n : end]), end)
        pool.num_indexed = max(pool.num_indexed, len(tokens) - 1)


def _cut_at_end_id(tokens: list[int], end_ids: frozenset[int]) -> list[int]:
    """The tokens before the first end id. It need not be drafted: it comes as the bonus token at no cost."""
    for i, token in enumerate(tokens):
        if token in end_ids:
            return tokens[:i]
    return tokens
