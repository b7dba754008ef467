"""Drafting by the target's own copy with quantized weights, which computes over the target's K/V cache.

The copy computes the last token and its own drafts one at a time, and writes their K/V into the slots that follow what
the target has computed. The target's step computes the same tokens again and overwrites them before it reads. So there
is no second cache and no second prompt, and what the copy attends to is exact up to the last token that was accepted.

No other sequence sees the copy's K/V: it computes for draft sequences, and what of a sequence is published, or
found again, ends at the sequence's own `num_computed`.
"""

from torch import Tensor

from runtime.drafters.confidence_stop import ConfidenceStop
from runtime.drafters.draft_state import DraftState
from runtime.drafters.protocol import Suggest
from runtime.engine import Engine
from runtime.request import Draft, Sequence

_MEMORY = 0.98


class SelfDraft:
    """Drafts with the request's own sampling parameters, up to an end id, the request's budget or the draft length.

    `use_logits` as for `DraftState`. With `confidence_stop` drafts end where it says so.
    """

    def __init__(self, engine: Engine, *, use_logits: bool, confidence_stop: ConfidenceStop | None = None) -> None:
        self.engine = engine
        self.use_logits = use_logits
        self._confidence_stop = confidence_stop
        self._suggest: Suggest | None = None
        self._num_steps = self._num_drafted = 0.0

    def ask(self, suggest: Suggest) -> None:
        """Have the copy ask, before each of its steps, what may come next, and look whether it would draft that.

        It computes these tokens in one step, and keeps those that it chooses or draws itself: its draft is the same as
        without.
        """
        self._suggest = suggest

    @property
    def steps_per_token(self) -> float:
        """Copy's steps per drafted token: less than one with recent correct suggestions."""
        return self._num_steps / self._num_drafted if self._num_drafted else 1.0

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        if not sequences:
            return []
        draft_states = [self._begin(sequence, max_draft_len) for sequence in sequences]
        if self._confidence_stop:
            self._confidence_stop.begin(sequences, max_draft_len)
        num_steps = num_copy_rows = 0
        while drafting := [i for i, draft_state in enumerate(draft_states) if not draft_state.is_done]:
            suggested = [self._suggested(sequences[i], draft_states[i]) for i in drafting]
            with self.engine.alone():
                self._draft_tokens([draft_states[i] for i in drafting], suggested)
            num_steps += 1
            num_copy_rows += len(drafting)
        if self._confidence_stop:
            self._confidence_stop.end(sequences, draft_states, num_steps)
        self._num_steps = self._num_steps * _MEMORY + num_copy_rows
        self._num_drafted = self._num_drafted * _MEMORY + sum(len(draft_state.tokens) for draft_state in draft_states)
        return [draft_state.draft() for draft_state in draft_states]

    def forget(self, request_id: int) -> None:
        if self._confidence_stop:
            self._confidence_stop.forget(request_id)

    def _suggested(self, sequence: Sequence, draft_state: DraftState) -> list[int]:
        """No more than fit the draft beside the token that comes after them."""
        most = draft_state.max_len - len(draft_state.tokens) - 1
        return self._suggest(sequence, draft_state.tokens)[:most] if self._suggest and most > 0 else []

    def _draft_tokens(self, draft_states: list[DraftState], suggested: list[list[int]]) -> None:
        """One more token of each, and as many more as were suggested rightly."""
        all_logits = self.engine.forward_draft(
            [p.draft_sequence for p in draft_states], [Draft(tokens) for tokens in suggested]
        )
        for draft_state, tokens, logits in zip(draft_states, suggested, all_logits, strict=True):
            for i, row in enumerate(logits):
                draft_state.draft_sequence.num_computed = len(draft_state.draft_sequence.tokens)
                self._draft_token(draft_state, row)
                if draft_state.is_done or draft_state.tokens[-1:] != tokens[i : i + 1]:
                    break

    def _draft_token(self, draft_state: DraftState, logits: Tensor) -> None:
        if self._confidence_stop:
            self._confidence_stop.draft_token(draft_state, logits)
        else:
            draft_state.draft_token(logits)

    def _begin(self, sequence: Sequence, max_draft_len: int) -> DraftState:
        """A proposal for a sequence of which the target has computed all but the last token; else an empty one.

        What is left of a prompt is for the target to compute, once.
        """
        is_ready = sequence.num_computed == len(sequence.tokens) - 1
        draft_sequence = Sequence(sequence.request, list(sequence.tokens), sequence.num_computed, sequence.block_table)
        draft_sequence.sampler, draft_sequence.state_slot = sequence.sampler, sequence.state_slot
        max_len = min(max_draft_len, sequence.max_draft_len) if is_ready else 0
        return DraftState(draft_sequence, max_len, self.use_logits)
