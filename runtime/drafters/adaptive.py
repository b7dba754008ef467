"""How much of a draft to send: as many tokens as pay for themselves, none where none does.

A step with a longer draft takes longer, by what the engine's cost model says, and yields more, by how often such drafts
were right so far. A token is worth sending while the tokens it promises cost less time than they do on average:
with R tokens per second so far, the length is chosen that makes (expected tokens - R x seconds) largest
(Dinkelbach 1967, of ratios; expected tokens by the survival of each position, not by one rate for all).

What a draft would have yielded is seen from what was generated, sent or not, because drafts never change that. So
lookups learn from every proposal, and being off costs little but looking. A draft model is asked for no more than is
sent, and while it does not pay only now and then.

Tokens that were drawn from a distribution are all sent: how many there are may depend on what they are, and to leave
some out for that would change what is generated. Who has drawn once is asked like a draft model from then on, for a
length that was chosen before anything is drawn.
"""

from collections.abc import Callable

from runtime.drafters.outcomes import SURE, Outcomes
from runtime.drafters.protocol import Drafter, check_request, look_ahead
from runtime.request import Draft, Request, Sequence

IterationSeconds = Callable[[int, int, float], float]
"""(batch size, context length, mean draft length) -> seconds; `CostModel.iteration_s`."""
DraftSeconds = Callable[[int, int], float]
"""(batch size, context length) -> seconds for one more token of every draft."""

_PROBE_INTERVAL = 16
"""Steps without a draft of a draft model, before it is asked for a token to see whether it pays again."""
_REST_AFTER, _LOOK_INTERVAL = 16, 4
"""Steps without a draft after which a lookup looks at every fourth only: looking takes time too."""
_RATE_MEMORY = 0.98
_CONTEXT_STEP = 64
"""Contexts are rounded, so that the cost model need not be asked anew at every step."""


class AdaptiveDrafter:
    """Another drafter's drafts, cut to the length that pays. With `draft_s` it is asked for no more than that."""

    def __init__(self, drafter: Drafter, iteration_s: IterationSeconds, draft_s: DraftSeconds | None = None) -> None:
        self.drafter = drafter
        self._iteration_s = iteration_s
        self._draft_s = draft_s
        self._is_asked_for_what_pays = draft_s is not None
        self._match_len = 0 if draft_s is None else SURE
        self._outcomes = Outcomes(are_cut=draft_s is not None)
        self._num_tokens = self._seconds = 0.0
        self._num_off = 0
        """Steps in a row for which nothing was sent of what was drafted."""
        self._known_seconds: dict[tuple[int, int], list[float]] = {}

    def check_request(self, request: Request) -> None:
        check_request(self.drafter, request)

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        for sequence in sequences:
            self._outcomes.learn(sequence)
        if self._is_asked_for_what_pays:
            return self._propose_what_pays(sequences, max_draft_len)
        if self._num_off >= _REST_AFTER and self._num_off % _LOOK_INTERVAL:
            self._num_off += 1
            return [Draft([])] * len(sequences)
        drafts = self.drafter.propose(sequences, max_draft_len)
        if any(draft.probs is not None for draft in drafts):
            self._is_asked_for_what_pays = True
        self._remember(sequences, drafts)
        if self._is_asked_for_what_pays:
            return drafts
        draft_len = self._best_len(sequences, [(draft.match_len, len(draft.tokens)) for draft in drafts])
        if any(draft.tokens for draft in drafts):  # or there was nothing to send, which says nothing about what pays
            self._num_off = 0 if draft_len else self._num_off + 1
        return [draft.cut(draft_len) for draft in drafts]

    def look_ahead(self, sequence: Sequence, drafted: list[int], max_draft_len: int) -> Draft:
        return look_ahead(self.drafter, sequence, drafted, max_draft_len)

    def _propose_what_pays(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        """Drafts that cost something are not asked for to be thrown away."""
        draft_len = self._best_len(sequences, [(self._match_len, max_draft_len)] * len(sequences))
        self._num_off = 0 if draft_len else self._num_off + 1
        if draft_len == 0 and self._num_off % _PROBE_INTERVAL:
            return [Draft([])] * len(sequences)
        drafts = self.drafter.propose(sequences, max(draft_len, 1))
        self._remember(sequences, drafts)
        return drafts

    def forget(self, request_id: int) -> None:
        self._outcomes.forget(request_id)
        self.drafter.forget(request_id)

    def _remember(self, sequences: list[Sequence], drafts: list[Draft]) -> None:
        for sequence, draft in zip(sequences, drafts, strict=True):
            # What is not known before drafting cannot be chosen by.
            match_len = self._match_len if self._is_asked_for_what_pays else draft.match_len
            self._outcomes.remember(sequence, draft.tokens, match_len)

    def _best_len(self, sequences: list[Sequence], drafts: list[tuple[int, int]]) -> int:
        """The length to cut all drafts of a step to; `drafts`: match, draft length."""
        if not sequences:
            return 0
        longest = max(draft_len for _, draft_len in drafts)
        rows = [self._outcomes.expected_tokens(s, *draft) for s, draft in zip(sequences, drafts, strict=True)]
        if len(rows) == 1:
            tokens, num_drafted = rows[0], list(range(longest + 1))
        else:
            tokens = [sum(row[min(n, len(row) - 1)] for row in rows) for n in range(longest + 1)]
            num_drafted = [sum(min(n, draft_len) for _, draft_len in drafts) for n in range(longest + 1)]
        known = self._seconds_by_num_drafted(sequences, num_drafted[-1])
        seconds = [known[n] for n in num_drafted]
        rate = self._num_tokens / self._seconds if self._seconds else tokens[0] / seconds[0]
        gains = [token - rate * second for token, second in zip(tokens, seconds, strict=True)]
        best = gains.index(max(gains))
        self._num_tokens = self._num_tokens * _RATE_MEMORY + tokens[best]
        self._seconds = self._seconds * _RATE_MEMORY + seconds[best]
        return best

    def _seconds_by_num_drafted(self, sequences: list[Sequence], most: int) -> list[float]:
        """Seconds of a step with 0, 1, ... draft tokens in all its rows together, at least as far as `most`."""
        batch_size = len(sequences)
        context_len = max(len(sequence.tokens) for sequence in sequences) // _CONTEXT_STEP * _CONTEXT_STEP
        seconds = self._known_seconds.setdefault((batch_size, context_len), [])
        drafting = self._draft_s(batch_size, context_len) if self._draft_s else 0.0
        for n in range(len(seconds), most + 1):
            draft_len = n / batch_size
            seconds.append(self._iteration_s(batch_size, context_len, draft_len) + draft_len * drafting)
        return seconds
