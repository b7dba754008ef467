"""Early stop of a draft by the model's confidence: how sure it is of the next token, and whether that is worth its
time.

A token is worth sending while the tokens that it promises, which is the probability that it and all before it are
accepted, take less time in the target's step than tokens do on average; and the next is worth computing while the same
holds with the model's own step added. How often a token is accepted, of which the model is so sure, is learned from
what was generated; how sure it is, is the probability of its most probable token.

All that is known before the token is drawn. So whether it is drawn depends on nothing that it may be, and a draft that
stops here leaves the distribution of what is generated as it was, by probabilities too.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from runtime.core.request import Sequence
from runtime.drafters.acceptance_stats import PendingDrafts
from runtime.drafters.draft_state import DraftState

_NUM_CLASSES = 16
"""Tokens are told apart by how sure the model was of them."""
_MEMORY, _PRIOR_WEIGHT = 0.998, 4.0
_RATE_MEMORY = 0.98
_CONTEXT_STEP = 64


class ConfidenceStop:
    """`iteration_s` is the time of a turn with drafts of a length, `draft_s` that of one more token of every draft: of
    one that drafts `at_once`, that of all of them."""

    def __init__(
        self,
        iteration_s: Callable[[int, int, float], float],
        draft_s: Callable[[int, int], float],
        *,
        at_once: bool = False,
    ) -> None:
        self._iteration_s, self._draft_s, self._at_once = iteration_s, draft_s, at_once
        self._right, self._seen = [0.0] * _NUM_CLASSES, [0.0] * _NUM_CLASSES
        self._pending = PendingDrafts[list[int]]()
        """Drafts, with the class of the model's confidence in each token, and in an end id that ended the draft."""
        self._num_tokens = self._seconds = 0.0
        self._least_to_send = self._least_to_go_on = 0.0

    def begin(self, sequences: list[Sequence], max_draft_len: int) -> None:
        """Learn what became of the last drafts, and what the next must promise."""
        for sequence in sequences:
            self._learn(sequence)
        batch_size, context_len = _place(sequences)
        alone_s = self._iteration_s(batch_size, context_len, 0.0)
        num_tokens = max_draft_len * batch_size
        token_s = max(self._iteration_s(batch_size, context_len, float(max_draft_len)) - alone_s, 0.0) / num_tokens
        rate = self._num_tokens / self._seconds if self._seconds else batch_size / alone_s
        self._least_to_send = rate * token_s
        next_s = 0.0 if self._at_once else self._draft_s(batch_size, context_len) / batch_size
        self._least_to_go_on = rate * (token_s + next_s)

    def draft_token(self, draft_state: DraftState, logits: Tensor, sure: float | None = None) -> None:
        """The next token by (vocab_size,) logits, if it is worth sending; the draft ends if the one after is not.

        `sure` is the chance that it is accepted, where the model predicts that itself.
        """
        sure = float(torch.softmax(logits.float(), dim=-1).max()) if sure is None else sure
        kind = min(int(sure * _NUM_CLASSES), _NUM_CLASSES - 1) if sure > 0 else 0  # NaN is not
        survives = draft_state.survives * self._share(kind)
        if survives < self._least_to_send:
            draft_state.has_ended = True
            return
        draft_state.survives = survives
        draft_state.confidence_stop.append(kind)
        draft_state.draft_token(logits)
        draft_state.has_ended |= survives < self._least_to_go_on

    def end(self, sequences: list[Sequence], draft_states: list[DraftState], num_steps: int) -> None:
        """Keep the drafts, and count the time of `num_steps` of the model's own and of the target's."""
        for sequence, draft_state in zip(sequences, draft_states, strict=True):
            self._pending.remember(sequence, draft_state.tokens, draft_state.confidence_stop)
        place = _place(sequences)
        mean_len = sum(len(draft_state.tokens) for draft_state in draft_states) / len(draft_states)
        num_passes = min(num_steps, 1) if self._at_once else num_steps
        seconds = self._iteration_s(*place, mean_len) + num_passes * self._draft_s(*place)
        self._seconds = self._seconds * _RATE_MEMORY + seconds
        self._num_tokens *= _RATE_MEMORY

    def forget(self, request_id: int) -> None:
        self._pending.forget(request_id)

    def _learn(self, sequence: Sequence) -> None:
        for _, tokens, kinds, num_right, num_known in self._pending.take(sequence):
            self._num_tokens += min(num_right + 1, num_known)  # others' drafts may have yielded more since
            for i, kind in enumerate(kinds[: min(num_right + 1, num_known, len(tokens))]):
                self._seen[kind] = self._seen[kind] * _MEMORY + 1
                self._right[kind] = self._right[kind] * _MEMORY + (i < num_right)

    def _share(self, kind: int) -> float:
        """Share of correct tokens at this confidence level; a prior until some were counted."""
        guess = (1 + (kind + 0.5) / _NUM_CLASSES) / 2
        return (self._right[kind] + _PRIOR_WEIGHT * guess) / (self._seen[kind] + _PRIOR_WEIGHT)


def _place(sequences: list[Sequence]) -> tuple[int, int]:
    """Batch size and context length; contexts are rounded, so that costs need not be looked up anew at every step."""
    return len(sequences), max(len(sequence.tokens) for sequence in sequences) // _CONTEXT_STEP * _CONTEXT_STEP
