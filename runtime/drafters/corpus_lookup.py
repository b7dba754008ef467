"""Drafts from a corpus: what most often followed the sequence's last tokens in texts from before this run."""

from runtime.corpus import Corpus
from runtime.drafters.lookup import cut_at_end_id
from runtime.request import Draft, Sequence


class CorpusLookup:
    """Looks up the longest end of each sequence, of at most `max_matching_ngram_size` tokens, that is in the corpus.

    The draft is the most frequent token after it, then the most frequent after that one, as long as one occurrence in
    eight agrees. Nothing is kept of requests.
    """

    def __init__(self, corpus: Corpus, max_matching_ngram_size: int, *, min_matching_ngram_size: int = 1) -> None:
        self.corpus = corpus
        self.max_matching_ngram_size = max_matching_ngram_size
        self.min_matching_ngram_size = min_matching_ngram_size

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [self._lookup(sequence, max_draft_len) for sequence in sequences]

    def forget(self, request_id: int) -> None:
        """Nothing is kept."""

    def _lookup(self, sequence: Sequence, max_draft_len: int) -> Draft:
        draft_len = min(max_draft_len, sequence.max_draft_len)
        tail = sequence.tokens[-self.max_matching_ngram_size :]
        match = self.corpus.longest_match(tail, self.max_matching_ngram_size, self.min_matching_ngram_size)
        if match is None or not draft_len:
            return Draft([])
        draft = [continuation.token for continuation in self.corpus.continuation(match, draft_len)]
        return Draft(cut_at_end_id(draft, sequence.request.end_ids), match_len=match.ngram_size)
