"""Drafting by the target's own copy with rounded weights, which computes over the target's K/V cache.

The copy computes the last token and its own drafts one at a time, and writes their K/V into the slots that follow what
the target has computed. The target's step computes the same tokens again and overwrites them before it reads. So there
is no second cache and no second prompt, and what the copy attends to is exact up to the last token that was accepted.

No other sequence sees the copy's K/V: it computes for draft sequences, and what of a sequence is published, or
found again, ends at the sequence's own `num_computed`.
"""

from torch import Tensor

from runtime.drafters.proposal import Proposal
from runtime.drafters.protocol import Suggest
from runtime.drafters.sureness import Sureness
from runtime.engine import Engine
from runtime.request import Draft, Sequence

_MEMORY = 0.98


class SelfDraft:
    """Drafts with the request's own sampling parameters, up to an end id, the request's budget or the draft length.

    `use_logits` as for `Proposal`. With `sureness` drafts end where it says so.
    """

    def __init__(self, engine: Engine, *, use_logits: bool, sureness: Sureness | None = None) -> None:
        self.engine = engine
        self.use_logits = use_logits
        self._sureness = sureness
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
        proposals = [self._begin(sequence, max_draft_len) for sequence in sequences]
        if self._sureness:
            self._sureness.begin(sequences, max_draft_len)
        num_steps = num_copy_rows = 0
        while drafting := [i for i, proposal in enumerate(proposals) if not proposal.is_done]:
            suggested = [self._suggested(sequences[i], proposals[i]) for i in drafting]
            with self.engine.alone():
                self._draft_tokens([proposals[i] for i in drafting], suggested)
            num_steps += 1
            num_copy_rows += len(drafting)
        if self._sureness:
            self._sureness.end(sequences, proposals, num_steps)
        self._num_steps = self._num_steps * _MEMORY + num_copy_rows
        self._num_drafted = self._num_drafted * _MEMORY + sum(len(proposal.tokens) for proposal in proposals)
        return [proposal.draft() for proposal in proposals]

    def forget(self, request_id: int) -> None:
        if self._sureness:
            self._sureness.forget(request_id)

    def _suggested(self, sequence: Sequence, proposal: Proposal) -> list[int]:
        """No more than fit the draft beside the token that comes after them."""
        most = proposal.max_len - len(proposal.tokens) - 1
        return self._suggest(sequence, proposal.tokens)[:most] if self._suggest and most > 0 else []

    def _draft_tokens(self, proposals: list[Proposal], suggested: list[list[int]]) -> None:
        """One more token of each, and as many more as were suggested rightly."""
        all_logits = self.engine.forward_copy([p.follower for p in proposals], [Draft(tokens) for tokens in suggested])
        for proposal, tokens, logits in zip(proposals, suggested, all_logits, strict=True):
            for i, row in enumerate(logits):
                proposal.follower.num_computed = len(proposal.follower.tokens)
                self._draft_token(proposal, row)
                if proposal.is_done or proposal.tokens[-1:] != tokens[i : i + 1]:
                    break

    def _draft_token(self, proposal: Proposal, logits: Tensor) -> None:
        if self._sureness:
            self._sureness.draft_token(proposal, logits)
        else:
            proposal.draft_token(logits)

    def _begin(self, sequence: Sequence, max_draft_len: int) -> Proposal:
        """A proposal for a sequence of which the target has computed all but the last token; else an empty one.

        What is left of a prompt is for the target to compute, once.
        """
        is_ready = sequence.num_computed == len(sequence.tokens) - 1
        follower = Sequence(sequence.request, list(sequence.tokens), sequence.num_computed, sequence.block_table)
        follower.sampler = sequence.sampler
        max_len = min(max_draft_len, sequence.max_draft_len) if is_ready else 0
        return Proposal(follower, max_len, self.use_logits)
