"""Ends a model's draft early, by the model's confidence: the probability of its most probable next token.

Sending a token pays while the tokens it promises (the probability that it and all tokens before it are accepted) take
less time in the target's step than tokens take on average. Computing the next token pays while the same holds with the
time of the model's own step added. How often tokens of a given confidence are accepted is learned from the output.

The decision is made before the token is drawn, so it does not depend on which token that is. Ending a draft here leaves
the distribution of the output as it was, with `use_logits` too.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from runtime.core.request import Sequence
from runtime.drafters.acceptance_stats import PendingDrafts
from runtime.drafters.draft_state import DraftState

_NUM_CLASSES = 16
"""Number of classes of confidence; tokens are counted by class."""
_MEMORY, _PRIOR_WEIGHT = 0.998, 4.0
_RATE_MEMORY = 0.98
_CONTEXT_STEP = 64


class ConfidenceStop:
    """Ends drafts, and learns from their acceptance. `iteration_s` and `draft_s` are as in `AdaptiveDrafter`; with
    `at_once` the model drafts all tokens in one pass, which takes `draft_s`.
    """

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
        """Learn how many tokens of the last drafts were accepted, and set the least probabilities with which a next
        token is sent and drafting goes on.
        """
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
        """Draft the next token from logits [vocab_size] if it pays; end the draft if the token after it would not pay.

        `sure` is the predicted chance of acceptance, from a head that predicts it itself.
        """
        sure = float(torch.softmax(logits.float(), dim=-1).max()) if sure is None else sure
        kind = min(int(sure * _NUM_CLASSES), _NUM_CLASSES - 1) if sure > 0 else 0  # NaN is not above 0
        survives = draft_state.survives * self._share(kind)
        if survives < self._least_to_send:
            draft_state.has_ended = True
            return
        draft_state.survives = survives
        draft_state.confidence_classes.append(kind)
        draft_state.draft_token(logits)
        draft_state.has_ended |= survives < self._least_to_go_on

    def end(self, sequences: list[Sequence], draft_states: list[DraftState], num_steps: int) -> None:
        """Remember the drafts, and count the time of the model's `num_steps` steps and of the target's step."""
        for sequence, draft_state in zip(sequences, draft_states, strict=True):
            self._pending.remember(sequence, draft_state.tokens, draft_state.confidence_classes)
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
        """Share of right tokens at this level of confidence; a prior until some were counted."""
        guess = (1 + (kind + 0.5) / _NUM_CLASSES) / 2
        return (self._right[kind] + _PRIOR_WEIGHT * guess) / (self._seen[kind] + _PRIOR_WEIGHT)


def _place(sequences: list[Sequence]) -> tuple[int, int]:
    """Batch size, and the longest context's length in whole 64 tokens: fewer costs to look up."""
    return len(sequences), max(len(sequence.tokens) for sequence in sequences) // _CONTEXT_STEP * _CONTEXT_STEP
