"""Drafting by a trained drafter (a head), which reads the target's hidden states.

At the beginning of a draft the head computes what it has not seen yet of the sequence, with the target's own hidden
states, in one pass: the tokens that were accepted last, or a prompt. Its draft goes on from its own output, token by
token; what it keeps of that is written over when the target has said which tokens come (`runtime.heads.head_cache`).
"""

import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from runtime.batch import Batch, Row, pack
from runtime.bundle import uses_kernels
from runtime.compiler.compilation import PackagedStep
from runtime.config import ARITHMETICS, StepCost
from runtime.drafters.confidence_stop import ConfidenceStop
from runtime.drafters.draft_state import DraftState
from runtime.engine import Engine
from runtime.errors import SpecDecError
from runtime.heads.head_cache import HeadCache
from runtime.heads.head_config import HeadConfig, language_model, num_layers_of
from runtime.heads.head_model import Head, hide_first, load_head, set_output, use_kernels
from runtime.heads.head_output import read_output
from runtime.request import Draft, Sequence

_SHORT_ROW = 32
_NUM_TIMED, _TIMED_CONTEXTS, _TIMED_BATCHES = 5, (64, 1024), (1, 4)


class HeadDraft:
    """Drafts with the request's own sampling parameters, up to an end id, the request's budget or the draft length.

    `use_logits` as for `DraftState`. With a `confidence_stop` drafts end where it says so.
    """

    def __init__(
        self,
        engine: Engine,
        head: Head,
        cache: HeadCache,
        step_costs: tuple[StepCost, ...] = (),
        *,
        use_logits: bool,
    ) -> None:
        self.engine, self.head, self.cache = engine, head, cache
        self.step_costs, self.use_logits = step_costs, use_logits
        self.confidence_stop: ConfidenceStop | None = None
        self.pool = engine.kv_pool if head.reads_target else cache.pool
        self.time_s = 0.0
        """Seconds that the head has computed."""

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        if not sequences:
            return []
        draft_states = [self._begin(sequence, max_draft_len) for sequence in sequences]
        if self.confidence_stop:
            self.confidence_stop.begin(sequences, max_draft_len)
        num_steps = 0
        outputs = self._catch_up([one for one in draft_states if not one.is_done])
        while drafting := [one for one in draft_states if not one.is_done]:
            if num_steps > 0:
                outputs = self._go_on(drafting, outputs, num_steps)
            logits = self._logits([outputs[id(one)] for one in drafting], num_steps)
            num_steps += 1
            with self.engine.alone():
                for draft_state, row in zip(drafting, logits, strict=True):
                    self._draft_token(draft_state, row)
        if self.confidence_stop:
            self.confidence_stop.end(sequences, draft_states, num_steps)
        return [draft_state.draft() for draft_state in draft_states]

    def forget(self, request_id: int) -> None:
        if self.confidence_stop:
            self.confidence_stop.forget(request_id)

    def _begin(self, sequence: Sequence, max_draft_len: int) -> DraftState:
        """A draft for a sequence of which the target has computed all but the last token; else an empty one."""
        draft_sequence = Sequence(sequence.request, list(sequence.tokens), sequence.num_computed, sequence.block_table)
        draft_sequence.sampler = sequence.sampler
        is_ready = sequence.num_computed == len(sequence.tokens) - 1 and sequence.num_computed > 0
        longest = self.head.longest_draft or max_draft_len
        max_len = min(max_draft_len, sequence.max_draft_len, longest) if is_ready else 0
        return DraftState(draft_sequence, max_len, self.use_logits)

    def _catch_up(self, draft_states: Seq[DraftState]) -> dict[int, Tensor]:
        """Compute what the head lacks of these sequences, the last token included; its output for the last."""
        outputs: dict[int, Tensor] = {}
        short: list[tuple[DraftState, Row]] = []
        for draft_state in draft_states:
            sequence = draft_state.draft_sequence
            num_tokens, table = len(sequence.tokens), sequence.block_table
            start = self.cache.num_known(table, num_tokens - 1)
            if start is None:  # such as of a sequence that began before there was a head
                draft_state.has_ended = True
                continue
            while num_tokens - start > self.engine.max_num_tokens:
                end = start + self.engine.max_num_tokens
                self._compute_known([Row(sequence.tokens[start:end], start, table, 1)])
                start = end
            row = Row(sequence.tokens[start:], start, table, 1)
            if len(row.tokens) > _SHORT_ROW:  # others would be padded to it
                outputs[id(draft_state)] = self._compute_known([row])[0]
            else:
                short.append((draft_state, row))
        if short:
            made = self._compute_known([row for _, row in short])
            outputs |= {id(draft_state): output for (draft_state, _), output in zip(short, made, strict=True)}
        return outputs

    def _compute_known(self, rows: list[Row]) -> Tensor:
        """(B, state_size) outputs of the rows' last tokens, of which all are the sequences' own."""
        longest, cache = max(len(row.tokens) for row in rows), self.cache
        states = cache.states.new_zeros(len(rows), longest, cache.states.shape[-1])
        for into, row in zip(states, rows, strict=True):
            end = row.start + len(row.tokens)
            into[: len(row.tokens)] = cache.states_before(row.block_table, row.start, end)
        if self.head.uses_kernels:
            for row in rows:
                if row.start == 1:
                    hide_first(cache.pool, row.block_table[0])
        batch, outputs = self._compute(rows, states.flatten(0, 1))
        for row, own in zip(rows, outputs.view(len(rows), longest, -1), strict=True):
            cache.mark_known(row.block_table, row.start, row.start + len(row.tokens))
            if self.head.longest_draft is not None:
                width = self.head.config.hidden_size
                cache.keep_own(row.block_table, row.start, own[: len(row.tokens)], width)
        return outputs[batch.logit_indices]

    def _go_on(self, draft_states: Seq[DraftState], outputs: dict[int, Tensor], num_drafted: int) -> dict[int, Tensor]:
        """The head's outputs for the last tokens of the drafts, by those for the tokens before."""
        rows = []
        for draft_state in draft_states:
            sequence = draft_state.draft_sequence
            position = sequence.num_computed if self.head.reads_target else len(sequence.tokens) - 1
            rows.append(Row(sequence.tokens[-1:], position, sequence.block_table, 1))
        batch, made = self._compute(rows, torch.stack([outputs[id(one)] for one in draft_states]), num_drafted)
        made = made[batch.logit_indices]
        return {id(draft_state): output for draft_state, output in zip(draft_states, made, strict=True)}

    def _compute(self, rows: list[Row], states: Tensor, num_drafted: int = 0) -> tuple[Batch, Tensor]:
        """The rows' batch, and the head's outputs for all its tokens."""
        start = time.perf_counter()
        batch = pack(rows, self.cache.block_size, self.engine.device)
        with torch.inference_mode(), self._threads():
            outputs = self.head(batch, states, self.pool, num_drafted)
        self.time_s += time.perf_counter() - start
        return batch, outputs

    def _logits(self, outputs: Iterable[Tensor], num_drafted: int) -> Tensor:
        start = time.perf_counter()
        with torch.inference_mode(), self._threads():
            logits = self.head.logits(torch.stack(list(outputs)), num_drafted)
        self.time_s += time.perf_counter() - start
        return logits

    def _threads(self) -> AbstractContextManager[None]:
        """Beside kernels, which have threads of their own, torch's loops are short."""
        return self.engine.alone() if self.head.uses_kernels else nullcontext()

    def _draft_token(self, draft_state: DraftState, logits: Tensor) -> None:
        if self.confidence_stop:
            self.confidence_stop.draft_token(draft_state, logits)
        else:
            draft_state.draft_token(logits)


def open_head(engine: Engine, config: HeadConfig) -> tuple[Head, HeadCache]:
    """The head in memory, and what the engine keeps for it from now on; SpecDecError if it does not fit the engine."""
    target = engine.config
    config.check_target(target.pretrained_config, target.vocab_size)
    wanted, given = config.hidden_states_of(num_layers_of(target.pretrained_config)), target.build_config.hidden_states
    if wanted != given:
        said = f"gives hidden states {', '.join(map(str, given))}" if given else "gives no hidden states"
        raise SpecDecError(
            f"the engine's step {said}, and the head reads {', '.join(map(str, wanted))}: {config.directory}",
            hint="build the engine for this head",
            code="no_hidden_states",
            head=config.directory,
        )
    head: Any = load_head(config, embedding_of(engine), getattr(torch, target.dtype))
    _set_output(engine, head)
    head = head.to(engine.device)
    if uses_kernels(target.build_config.compiler, engine.device.type):
        step, arithmetic = engine.target_step, target.arithmetic
        known = step.weights if isinstance(step, PackagedStep) else {}
        use_kernels(head, 0 if arithmetic is None else ARITHMETICS.index(arithmetic), known)
    if head.reads_target:
        head.read_layers_of(target)
    return head, engine.add_head(head)


def _set_output(engine: Engine, head: Head) -> None:
    """Give the head the output layer that the engine has for drafts."""
    qformat = engine.config.build_config.draft_output.qformat
    kept = None if qformat is None or engine.directory is None else read_output(head.config, engine.directory)
    set_output(head, engine.draft_ids if head.draft_ids is None else None, kept)


def embedding_of(engine: Engine) -> Tensor | None:
    """The target's (vocab, hidden) embeddings, in the memory that it has them in; None if they are not as they were."""
    step, config = engine.target_step, engine.config
    if not isinstance(step, PackagedStep):
        weight: Tensor = step.model.get_input_embeddings().weight
        return weight.detach()
    shape = (config.vocab_size, language_model(config.pretrained_config).get("hidden_size"))
    found = [one for one in step.weights.values() if tuple(one.shape) == shape and one.is_floating_point()]
    return found[0] if len(found) == 1 else None


def measure_head(engine: Engine, head: Head, cache: HeadCache) -> tuple[StepCost, ...]:
    """Costs of the head's steps, measured on the engine's null block: nothing that counts is written."""
    build, costs = engine.config.build_config, []
    pool = engine.kv_pool if head.reads_target else cache.pool
    for batch_size in sorted({min(size, build.max_batch_size) for size in _TIMED_BATCHES}):
        for context_len in sorted({min(length, build.max_request_len - 1) for length in _TIMED_CONTEXTS}):
            table = [0] * (context_len // build.tokens_per_block + 1)
            batch = pack([Row([0], context_len, table, 1)] * batch_size, build.tokens_per_block, engine.device)
            states = cache.states.new_zeros(batch_size, cache.states.shape[-1])
            seconds = []
            with torch.inference_mode(), engine.alone() if head.uses_kernels else nullcontext():
                for _ in range(_NUM_TIMED):
                    start = time.perf_counter()
                    head.logits(head(batch, states, pool))
                    seconds.append(time.perf_counter() - start)
            costs.append(StepCost(batch_size, context_len, 1, min(seconds)))
    return tuple(costs)
