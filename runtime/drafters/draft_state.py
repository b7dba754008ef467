"""The draft that a model makes for a sequence, token by token, under the request's sampling parameters."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.core.request import Draft, Sequence
from runtime.core.sampling import NoValidToken, draw


@dataclass
class DraftState:
    """A draft that is being made, and the sequence with this draft appended, as the drafting model sees it.

    Without `use_logits` the model chooses tokens as the target will, with the same noise at each position, so that
    similar distributions choose the same token. With `use_logits` the tokens of sampling requests are drawn from the
    model's own distribution, which the draft carries for rejection sampling.
    """

    draft_sequence: Sequence
    max_len: int
    use_logits: bool
    tokens: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    confidence_classes: list[int] = field(default_factory=list)
    """Class of the model's confidence in each token, if a `ConfidenceStop` records it."""
    survives: float = 1.0
    """Probability that all tokens of the draft are accepted, by the model's confidence."""
    has_ended: bool = False

    @property
    def is_done(self) -> bool:
        return self.has_ended or len(self.tokens) >= self.max_len

    def draft_token(self, logits: Tensor) -> None:
        """Choose or draw the next token from logits [vocab_size], or end the draft."""
        draft_sequence, sampler = self.draft_sequence, self.draft_sequence.sampler
        try:
            if self.use_logits and not sampler.is_greedy:
                probs = sampler.probs(draft_sequence.tokens, logits)
                position = len(draft_sequence.tokens)
                token = draw(probs, sampler.draft_uniform(position, position - len(self.tokens)))
                self._add(token, probs)
                # It was drawn, so it stays: leaving an end id out would change the distribution of the verified tokens.
                self.has_ended |= token in draft_sequence.request.end_ids
            else:
                self._keep(sampler.choose(draft_sequence.tokens, logits))
        except NoValidToken:  # for the model that drafts; the target may have one
            self.has_ended = True

    def draft_tokens(self, logits: Tensor) -> None:
        """Choose or draw tokens from logits [tokens, vocab_size] until the draft ends, at once where possible."""
        sampler = self.draft_sequence.sampler
        if sampler.looks_back or (self.use_logits and not sampler.is_greedy):
            for row in logits:
                if not self.is_done:
                    self.draft_token(row)
            return
        chosen = sampler.choose_each(list(self.draft_sequence.tokens), logits)
        try:
            for _ in range(len(logits)):
                if not self.is_done:
                    self._keep(next(chosen))
        except NoValidToken:
            self.has_ended = True

    def _keep(self, token: int) -> None:
        if token in self.draft_sequence.request.end_ids:
            self.has_ended = True  # it comes as the target's own token at no cost
        else:
            self._add(token, None)

    def _add(self, token: int, probs: Tensor | None) -> None:
        self.draft_sequence.tokens.append(token)
        self.tokens.append(token)
        if probs is not None:
            self.probs.append(probs)
        matcher = self.draft_sequence.sampler.matcher
        self.has_ended = matcher is not None and matcher.is_over(self.draft_sequence.tokens)

    def draft(self) -> Draft:
        return Draft(self.tokens, torch.stack(self.probs) if self.probs else None)


def begin_draft(sequence: Sequence, max_draft_len: int, *, use_logits: bool) -> DraftState:
    """The state of a draft by a model that continues from the target's K/V. The draft stays empty while the target has
    more tokens to compute than the last, such as the rest of a prompt.

    Drafts that decide what is sampled begin only after the output's first token. Otherwise a prompt whose K/V are found
    would have a draft there, and the same prompt computed for the first time none, which would give another text.
    """
    own = Sequence(sequence.request, list(sequence.tokens), sequence.num_computed, sequence.block_table)
    own.sampler, own.state_slot = sequence.sampler, sequence.state_slot
    begins = len(sequence.tokens) == sequence.request.output_start
    is_ready = sequence.num_computed == len(sequence.tokens) - 1 and not (use_logits and begins)
    return DraftState(own, min(max_draft_len, sequence.max_draft_len) if is_ready else 0, use_logits)
