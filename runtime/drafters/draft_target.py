"""Drafting by a model: a second, smaller engine, or a copy of the target.

The second engine (the draft model) works as in TensorRT-LLM's Draft-Target-Model example. For every request the
drafter has a draft sequence in the draft engine, which keeps its K/V between steps. After a step the draft sequence
takes over the target's tokens: from the first token that differs, the target's tokens replace its own, and
`num_computed` falls back to that token. The draft model computes a token once, and its later tokens never depend on a
rejected one.

The target's own copy, with quantized weights, computes over the target's K/V cache. It computes the last token, then
its own draft tokens, and writes their K/V into the slots behind the target's. The target's step computes the same
tokens again and overwrites these slots before it reads them. So there is no second cache, no prompt is computed twice,
and the K/V that the copy attends to are the target's up to the last token. No other sequence sees the copy's K/V: only
tokens below a sequence's own `num_computed` are published or found again.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.core.batch import generation_row
from runtime.core.request import Draft, Request, Sequence
from runtime.drafters.confidence_stop import ConfidenceStop
from runtime.drafters.draft_state import DraftState, begin_draft
from runtime.drafters.protocol import Suggest
from runtime.engine.draft_vocab import among_all
from runtime.engine.engine import Engine
from runtime.util.errors import draft_engine_errors


class DraftModel:
    """Drafts of a second engine. Their tokens are sampled with the request's own parameters, and a draft ends at an end
    id, the request's budget or the draft length.

    `use_logits` as in `DraftState`. The drafts have ids below `vocab_size`, the size of the target's vocabulary; ids
    that only one of the two models has are not drafted.
    """

    drafts_at_once = False
    """True if a single pass drafts all tokens of a draft."""

    def __init__(self, engine: Engine, vocab_size: int, *, use_logits: bool) -> None:
        self.engine, self.vocab_size, self.use_logits = engine, vocab_size, use_logits
        self._draft_sequences: dict[int, Sequence] = {}

    def check_request(self, request: Request) -> None:
        """SpecDecError if the draft engine cannot follow the request to its end."""
        with draft_engine_errors():
            self.engine.check_lengths(request)

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        draft_states = [
            DraftState(self._draft_sequence(s), min(max_draft_len, s.max_draft_len), self.use_logits) for s in sequences
        ]
        while drafting := [p for p in draft_states if not p.is_done and self._is_ready(p.draft_sequence, sequences)]:
            for start in range(0, len(drafting), self.engine.max_batch_size):
                self._draft_tokens(drafting[start : start + self.engine.max_batch_size])
        self._end(sequences, draft_states)
        return [p.draft() for p in draft_states]

    def forget(self, request_id: int) -> None:
        draft_sequence = self._draft_sequences.pop(request_id, None)
        if draft_sequence is not None:
            self.engine.release(draft_sequence)

    def _end(self, sequences: list[Sequence], draft_states: list[DraftState]) -> None:
        """Take note of the finished drafts; nothing here."""

    def _draft_sequence(self, sequence: Sequence) -> Sequence:
        """The sequence's draft sequence, updated to the sequence's tokens; K/V are kept up to the first token that
        differs. SpecDecError as in `check_request` for a new request.
        """
        request = sequence.request
        if request.id not in self._draft_sequences:
            self.check_request(request)
            self._draft_sequences[request.id] = Sequence.start(request)
        draft_sequence, tokens = self._draft_sequences[request.id], sequence.tokens
        num_common = min(len(draft_sequence.tokens), len(tokens))
        while draft_sequence.tokens[:num_common] != tokens[:num_common]:  # at most a draft's length behind
            num_common -= 1
        draft_sequence.tokens[num_common:] = tokens[num_common:]
        # The last token is computed in any case, for its logits.
        draft_sequence.num_computed = min(draft_sequence.num_computed, num_common, len(tokens) - 1)
        return draft_sequence

    def _is_ready(self, draft_sequence: Sequence, in_step: list[Sequence]) -> bool:
        """True if the draft engine's K/V cache has room for the sequence, and the draft model has all its ids.

        If the cache is full, requests that are not in this step give their blocks back.
        """
        draft_vocab_size = self.engine.config.vocab_size
        if self.vocab_size > draft_vocab_size and max(draft_sequence.tokens) >= draft_vocab_size:
            return False
        return self._has_room(draft_sequence) or (self._release_idle(in_step) and self._has_room(draft_sequence))

    def _has_room(self, draft_sequence: Sequence) -> bool:
        return self.engine.extend(draft_sequence) if draft_sequence.block_table else self.engine.admit(draft_sequence)

    def _release_idle(self, in_step: list[Sequence]) -> bool:
        """Take blocks from the draft sequences of requests that are not in this step; True if there were any."""
        ids = {sequence.request.id for sequence in in_step}
        idle = [f for request_id, f in self._draft_sequences.items() if request_id not in ids and f.block_table]
        for draft_sequence in idle:
            self.engine.release(draft_sequence)
        return bool(idle)

    def _draft_tokens(self, draft_states: list[DraftState]) -> None:
        """Draft one more token for each sequence."""
        draft_sequences = [one.draft_sequence for one in draft_states]
        with self.engine.alone():
            for draft_sequence in draft_sequences:
                self.engine.catch_up(draft_sequence)
            all_logits = self.engine.step([generation_row(one, []) for one in draft_sequences])
            for draft_state, draft_sequence, logits in zip(draft_states, draft_sequences, all_logits, strict=True):
                draft_sequence.num_computed = len(draft_sequence.tokens)
                draft_state.draft_token(with_size(logits[0], self.vocab_size))


def with_size(logits: Tensor, vocab_size: int) -> Tensor:
    """Logits [..., vocab_size], cut to that size, or filled up with ids of probability 0."""
    missing = vocab_size - logits.shape[-1]
    return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[..., :vocab_size]


_MEMORY = 0.98


class SelfDraftModel:
    """Drafts of the target's copy; fields as in `DraftModel`. With a `confidence_stop` a draft may end earlier."""

    def __init__(self, engine: Engine, *, use_logits: bool, confidence_stop: ConfidenceStop | None = None) -> None:
        self.engine = engine
        self.use_logits = use_logits
        self._draft_ids = None if engine.draft_ids is None else engine.draft_ids.to(engine.device)
        self._confidence_stop = confidence_stop
        self._suggest: Suggest | None = None
        self._num_steps = self._num_drafted = 0.0

    def ask(self, suggest: Suggest) -> None:
        """Set the function that suggests tokens to the copy before each of its steps.

        The copy verifies suggested tokens in one step and keeps those that it would choose or draw itself, so its draft
        is the same as without suggestions.
        """
        self._suggest = suggest

    @property
    def steps_per_token(self) -> float:
        """Number of the copy's steps for each drafted token: less than one if suggestions were right lately."""
        return self._num_steps / self._num_drafted if self._num_drafted else 1.0

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        if not sequences:
            return []
        draft_states = [begin_draft(one, max_draft_len, use_logits=self.use_logits) for one in sequences]
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
        """The suggested tokens, cut to the room that the draft has beside the copy's own next token."""
        most = draft_state.max_len - len(draft_state.tokens) - 1
        return self._suggest(sequence, draft_state.tokens)[:most] if self._suggest and most > 0 else []

    def _draft_tokens(self, draft_states: list[DraftState], suggested: list[list[int]]) -> None:
        """Draft one more token for each sequence, and keep the suggested tokens that were right."""
        rows = [generation_row(p.draft_sequence, tokens) for p, tokens in zip(draft_states, suggested, strict=True)]
        size = self.engine.config.vocab_size
        all_logits = [among_all(one, self._draft_ids, size) for one in self.engine.step(rows, by_copy=True)]
        for draft_state, tokens, logits in zip(draft_states, suggested, all_logits, strict=True):
            for i, row in enumerate(logits):
                draft_state.draft_sequence.num_computed = len(draft_state.draft_sequence.tokens)
                if self._confidence_stop:
                    self._confidence_stop.draft_token(draft_state, row)
                else:
                    draft_state.draft_token(row)
                if draft_state.is_done or draft_state.tokens[-1:] != tokens[i : i + 1]:
                    break
