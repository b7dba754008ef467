"""Drafting by a parallel draft model (PARD, arXiv 2504.18583): an ordinary small model that was trained to fill in
mask tokens, so that one pass drafts several tokens.

The sequence's last token is followed by mask tokens, one fewer than the draft is to have. The logits at the last token
give the first drafted token, the logits at the first mask the second, and so on. For a draft of four tokens after `a
b` the pass computes `b M M M`. The keys and values of masks are never kept: the next pass overwrites them.
"""

from runtime.core.batch import generation_row
from runtime.core.request import Draft, Sequence
from runtime.drafters.confidence_stop import ConfidenceStop
from runtime.drafters.draft_state import DraftState
from runtime.drafters.draft_target import DraftModel, with_size
from runtime.engine.engine import Engine


class ParallelDraftModel(DraftModel):
    """`DraftModel` that drafts all tokens of a draft in one pass, with `mask_token` behind the sequence. With a
    `confidence_stop` a draft may end earlier.
    """

    drafts_at_once = True

    def __init__(self, engine: Engine, vocab_size: int, mask_token: int, *, use_logits: bool) -> None:
        super().__init__(engine, vocab_size, use_logits=use_logits)
        self.mask_token = mask_token
        self.confidence_stop: ConfidenceStop | None = None

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        if self.confidence_stop and sequences:
            self.confidence_stop.begin(sequences, max_draft_len)
        return super().propose(sequences, max_draft_len)

    def forget(self, request_id: int) -> None:
        if self.confidence_stop:
            self.confidence_stop.forget(request_id)
        super().forget(request_id)

    def _end(self, sequences: list[Sequence], draft_states: list[DraftState]) -> None:
        if self.confidence_stop and sequences:
            self.confidence_stop.end(sequences, draft_states, num_steps=1)

    def _draft_tokens(self, draft_states: list[DraftState]) -> None:
        """Draft all tokens of each sequence."""
        with self.engine.alone():
            for draft_state in draft_states:
                self.engine.catch_up(draft_state.draft_sequence)
            rows = [generation_row(one.draft_sequence, [self.mask_token] * (one.max_len - 1)) for one in draft_states]
            for draft_state, all_logits in zip(draft_states, self.engine.step(rows), strict=True):
                draft_sequence = draft_state.draft_sequence
                draft_sequence.num_computed = len(draft_sequence.tokens)  # not the masks behind them
                logits = with_size(all_logits, self.vocab_size)
                if self.confidence_stop is None:
                    draft_state.draft_tokens(logits)
                else:
                    for row in logits:
                        if not draft_state.is_done:
                            self.confidence_stop.draft_token(draft_state, row)
                draft_state.has_ended = True
