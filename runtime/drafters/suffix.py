"""Drafts by the longest match of any length and its most frequent followers (SuffixDecoding, arXiv 2411.04975)."""

from runtime.core.request import Draft
from runtime.drafters.lookup import History, TextLookup, as_characters, cut_at_end_id, most_frequent

_PUBLIC_MARGIN = 2
"""Number of tokens by which a public match must be longer than a private match to be followed."""


class SuffixLookup(TextLookup):
    """Follows, token by token, the most frequent follower of the longest match; of equally frequent followers, the
    latest.

    Matches are searched in the sequence itself, including the draft so far. With a `pool`, the pool's longest pattern
    is followed if it is more than two tokens longer than the sequence's own match, or if the sequence has no match.
    """

    _longest_match = 31
    """Limit on the length of a match, which grows with the draft. SuffixDecoding's trees have a depth of 64."""

    def _look_up(self, history: History, max_draft_len: int) -> Draft:
        return self._look_up_after(history, [], min(max_draft_len, history.sequence.max_draft_len))

    def _look_up_after(self, history: History, new: list[int], draft_len: int) -> Draft:
        text, tokens, longest = history.text, history.sequence.tokens, self._longest_match
        num_read, draft, ends, n, match_len = text.num_tokens, list[int](), list[int](), 0, 0
        while len(draft) < draft_len:
            if not ends:
                tail = text.characters + as_characters([*new, *draft])
                n, last = text.find_longest(tail, longest + len(draft))
                ends = text.ends_before(tail[-n:], last) if n else []
            public = self._find_public([*tokens[:num_read], *new, *draft], n) if self.pool else None
            if public is None and not ends:
                break
            if not draft:
                match_len = max(n, public[0] if public else 0)
            if len(ends) == 1 and self.pool is None:  # it is followed as far as it goes
                draft += tokens[ends[0] : min(ends[0] + draft_len - len(draft), num_read)]
                ends = []
            else:
                draft.append(public[1] if public else most_frequent([tokens[end] for end in ends]))
                ends = [end + 1 for end in ends if tokens[end] == draft[-1] and end + 1 < num_read]
            n += 1
        return Draft(cut_at_end_id(draft, history.sequence.request.end_ids), match_len=match_len)

    def _find_public(self, tail: list[int], num_private: int) -> tuple[int, int] | None:
        assert self.pool is not None
        return self.pool.find(tail, num_private + 1 + _PUBLIC_MARGIN if num_private else 1)
