"""Drafts by n-gram lookup: the tokens that followed the sequence's last tokens at an earlier occurrence, in the
sequence or in a corpus.

Within a sequence it behaves like TensorRT-LLM's NgramPool (examples/ngram/run_dtm_ngram.py): the longest pattern first,
its oldest continuation, private to each request. Two habits of NgramPool are left out. Without a match nothing is
drafted (NgramPool sends a dummy token). If no continuation has the full length yet, the oldest is taken (NgramPool
takes the newest, which is the shortest). Other rankings choose another occurrence.

A public pool is searched if the sequence has no match.
"""

from typing import get_args

from runtime.core.request import Draft, Sequence
from runtime.drafters.lookup import History, TextLookup, as_characters, cut_at_end_id, most_frequent, num_common_before
from runtime.drafters.ngram_pool import NgramPool
from runtime.drafters.spec import NgramRanking
from runtime.text.corpus import Corpus
from runtime.util.errors import UsageError

LONGEST_MATCH = 32
"""Limit on the reported match length, which predicts acceptance."""


class NgramLookup(TextLookup):
    """Looks up the last `max_matching_ngram_size`, then fewer, tokens of each sequence in that sequence.

    With max_matching_ngram_size 2 and the tokens 7 8 9 5 8 9 the pattern (8, 9) first ended before the 5: the draft is
    5 8 9, cut to the draft length. If several occurrences have a follower, `ranking` chooses

    - oldest: the first;
    - leftmost: the first too, with drafts token for token those of transformers' prompt lookup
      (PromptLookupCandidateGenerator), which may reach past the budget; a loop cuts them, and then they are `oldest`'s;
    - recent: the last;
    - frequent: the last occurrence with the most frequent follower (of equally frequent followers, the latest).

    Continuations of `recent` and `frequent` often reach the sequence's end, and continue in the draft itself: the draft
    after 1 2 3 1 2 3 is 1 2 3 1 2 3 1 ...
    """

    def __init__(
        self,
        max_matching_ngram_size: int,
        *,
        min_matching_ngram_size: int = 1,
        ranking: NgramRanking = "oldest",
        pool: NgramPool | None = None,
    ) -> None:
        super().__init__(pool)
        if ranking not in get_args(NgramRanking):
            raise UsageError(f"unknown ranking: {ranking}", hint=f"one of {', '.join(get_args(NgramRanking))}")
        self.max_matching_ngram_size = max_matching_ngram_size
        self.min_matching_ngram_size = min_matching_ngram_size
        self.ranking = ranking

    def _look_up_after(self, history: History, new: list[int], draft_len: int) -> Draft:
        text = history.text
        tokens = [*history.sequence.tokens[: text.num_tokens], *new]
        return self._found(history, tokens, text.characters + as_characters(new), draft_len) or Draft([])

    def _look_up(self, history: History, max_draft_len: int) -> Draft:
        sequence = history.sequence
        draft_len = min(max_draft_len, sequence.max_draft_len)
        if self.ranking == "leftmost" and draft_len:
            draft_len = max_draft_len
        found = self._found(history, sequence.tokens, history.text.characters, draft_len)
        if found is not None:
            return found
        match_len, draft = 0, list[int]()
        if self.pool is not None and (public := self.pool.find(sequence.tokens)) is not None:
            match_len = public[0]
            draft = self.pool.draft(sequence.tokens, draft_len)
        return Draft(cut_at_end_id(draft, sequence.request.end_ids), match_len=match_len)

    def _found(self, history: History, tokens: list[int], tail: str, draft_len: int) -> Draft | None:
        """Continuation of the longest pattern at the end of `tokens`, in characters `tail`; None without a pattern."""
        size, last = history.text.find_longest(tail, self.max_matching_ngram_size)
        if size < self.min_matching_ngram_size:
            return None
        end = self._choose(history, tail[-size:], last)
        draft = self._continue(tokens, end, draft_len)
        most = max(LONGEST_MATCH, self.max_matching_ngram_size)
        match_len = num_common_before(history.text.characters, end, tail, most)
        return Draft(cut_at_end_id(draft, history.sequence.request.end_ids), match_len=match_len)

    def _choose(self, history: History, pattern: str, last: int) -> int:
        """End of the occurrence that the ranking chooses for the pattern; `last` is the end of the last occurrence."""
        if self.ranking == "recent":
            return last
        if self.ranking != "frequent":
            return history.text.characters.index(pattern) + len(pattern)
        ends, tokens = history.text.ends_before(pattern, last), history.sequence.tokens
        follower = most_frequent([tokens[end] for end in ends])
        return next(end for end in ends if tokens[end] == follower)

    def _continue(self, tokens: list[int], end: int, draft_len: int) -> list[int]:
        draft = tokens[end : end + draft_len]
        if self.ranking in ("recent", "frequent") and len(draft) < draft_len:
            draft = (draft * draft_len)[:draft_len]
        return draft


class CorpusLookup:
    """Looks up the longest end of each sequence, of at most `max_matching_ngram_size` tokens, that is in the corpus.

    The draft is the most frequent next token, then the most frequent token after it, and so on, as long as at least one
    occurrence in eight agrees. Nothing is kept between requests.
    """

    def __init__(self, corpus: Corpus, max_matching_ngram_size: int, *, min_matching_ngram_size: int = 1) -> None:
        self.corpus = corpus
        self.max_matching_ngram_size = max_matching_ngram_size
        self.min_matching_ngram_size = min_matching_ngram_size

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [self._lookup(sequence, max_draft_len) for sequence in sequences]

    def forget(self, request_id: int) -> None:
        """Do nothing: nothing is kept of requests."""

    def _lookup(self, sequence: Sequence, max_draft_len: int) -> Draft:
        draft_len = min(max_draft_len, sequence.max_draft_len)
        tail = sequence.tokens[-self.max_matching_ngram_size :]
        match = self.corpus.longest_match(tail, self.max_matching_ngram_size, self.min_matching_ngram_size)
        if match is None or not draft_len:
            return Draft([])
        draft = [continuation.token for continuation in self.corpus.continuation(match, draft_len)]
        return Draft(cut_at_end_id(draft, sequence.request.end_ids), match_len=match.ngram_size)
