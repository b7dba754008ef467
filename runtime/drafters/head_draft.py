"""Drafting by a trained drafter (a head), which reads the target's hidden states.

Before a draft the head computes, from the target's hidden states, the tokens of the sequence that it has not seen: the
tokens that were accepted last, or a prompt. It then drafts token by token from its own outputs, or all tokens at once.
The keys and values of drafted tokens are overwritten once the target has decided on the tokens
(`runtime.engine.head_cache`).
"""

import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoint.bundle import uses_kernels
from runtime.checkpoint.config import ARITHMETICS, StepCost
from runtime.compiler.package import PackagedStep
from runtime.core.batch import Batch, Row, pack
from runtime.core.request import Draft, Sequence
from runtime.drafters.confidence_stop import ConfidenceStop
from runtime.drafters.draft_state import DraftState, begin_draft
from runtime.drafters.heads.block_head import BlockHead, num_slots
from runtime.drafters.heads.head_config import HeadConfig, language_model, num_layers_of
from runtime.drafters.heads.head_model import EagleHead, Head, load_head, set_layers, set_output, use_kernels
from runtime.drafters.heads.head_output import QuantizedLayers, read_quantized, read_target_output
from runtime.drafters.heads.paged_head import hide_first, use_programs
from runtime.engine.engine import SHORT_ROW, Engine
from runtime.engine.head_cache import HeadCache
from runtime.kernels.memory import trim
from runtime.util.digests import digest, file_digest
from runtime.util.errors import SpecDecError

_LONG_BLOCK = 8
"""Most tokens of a block whose costs are measured."""
_LITTLE_BYTES = 16 << 20
"""Bytes of weights up to which it is not worth giving free memory back."""
_NUM_TIMED, _TIMED_CONTEXTS, _TIMED_BATCHES = 5, (64, 1024), (1, 4)


class HeadDraft:
    """Drafts of a head. Their tokens are sampled with the request's own parameters, and a draft ends at an end id, the
    request's budget or the draft length.

    `use_logits` as in `DraftState`. With a `confidence_stop` a draft may end earlier.
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
        """Seconds that the head has computed so far."""

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        if not sequences:
            return []
        draft_states = [self._begin(sequence, max_draft_len) for sequence in sequences]
        if self.confidence_stop:
            self.confidence_stop.begin(sequences, max_draft_len)
        num_steps = 0
        outputs = self._catch_up([one for one in draft_states if not one.is_done])
        known = self._logits_at_once(outputs) if outputs and self.head.drafts_at_once else {}
        while drafting := [one for one in draft_states if not one.is_done]:
            if num_steps > 0 and not self.head.drafts_at_once:
                outputs = self._go_on(drafting, outputs, num_steps)
            place = num_steps if self.head.drafts_at_once else 0
            rows = [outputs[id(one)][place] for one in drafting]
            logits, chances = self._logits(
                drafting, rows, num_steps, [known[id(one)][place] for one in drafting if known]
            )
            num_steps += 1
            with self.engine.alone():
                for draft_state, row, sure in zip(drafting, logits, chances, strict=True):
                    if self.confidence_stop:
                        self.confidence_stop.draft_token(draft_state, row, sure)
                    else:
                        draft_state.draft_token(row)
        if self.confidence_stop:
            self.confidence_stop.end(sequences, draft_states, num_steps)
        return [draft_state.draft() for draft_state in draft_states]

    def forget(self, request_id: int) -> None:
        if self.confidence_stop:
            self.confidence_stop.forget(request_id)

    def _begin(self, sequence: Sequence, max_draft_len: int) -> DraftState:
        """The state of a draft: empty behind a sequence's first token, before which there are no hidden states."""
        longest = min(max_draft_len, self.head.longest_draft or max_draft_len) if sequence.num_computed else 0
        return begin_draft(sequence, longest, use_logits=self.use_logits)

    def _catch_up(self, draft_states: Seq[DraftState]) -> dict[int, Tensor]:
        """Compute the tokens of these sequences that the head has not seen, the last token included. Returns, by the
        draft state's `id`, the head's outputs [1, state_size] for the last token; for a head that drafts at once also
        the outputs for the mask tokens behind it, [tokens, state_size].
        """
        outputs: dict[int, Tensor] = {}
        short: list[tuple[DraftState, Row]] = []
        for draft_state in draft_states:
            row = self._row_behind(draft_state)
            if row is None:  # such as of a sequence that began before there was a head
                draft_state.has_ended = True
            elif len(row.tokens) > SHORT_ROW:
                outputs[id(draft_state)] = self._compute_known([row])
            else:
                short.append((draft_state, row))
        if short:
            rows = [row for _, row in short]
            made = torch.split(self._compute_known(rows), [row.num_logits for row in rows])
            outputs |= {id(draft_state): output for (draft_state, _), output in zip(short, made, strict=True)}
        return outputs

    def _row_behind(self, draft_state: DraftState) -> Row | None:
        """Row with the last unseen tokens of the sequence and, for a head that drafts at once, mask tokens behind them,
        after the unseen tokens before the row have been computed. For a block, the row is the block. None if hidden
        states are missing.
        """
        sequence, most = draft_state.draft_sequence, self.engine.max_num_tokens
        tokens, table = sequence.tokens, sequence.block_table
        start, end = self.cache.num_known(table, len(tokens) - 1), len(tokens)
        if start is None:
            return None
        block = self.head.config.block
        if isinstance(self.head, BlockHead):
            end = len(tokens) - 1  # the block's
        while end - start > (0 if isinstance(self.head, BlockHead) else most):
            stop = min(start + most, end)
            self._compute_known([Row(tokens[start:stop], start, table, 1)], is_context=True)
            start = stop
        if block is None:
            return Row(tokens[start:], start, table, 1)
        if not isinstance(self.head, BlockHead):  # P-EAGLE
            masks = [block.mask_token_id] * (draft_state.max_len - 1)
            return Row(tokens[start:] + masks, start, table, len(masks) + 1)
        room = len(table) * self.cache.block_size - end
        length = num_slots(block, draft_state.max_len, room)
        draft_state.max_len = min(draft_state.max_len, block.num_drafts(length))
        slots = [tokens[-1], *[block.mask_token_id] * (length - 1)]
        return Row(slots, end, table, block.num_drafts(length))

    def _compute_known(self, rows: list[Row], *, is_context: bool = False) -> Tensor:
        """Outputs [tokens, state_size] for the last tokens of the rows, as many as each row wants. Tokens after the
        first wanted token are masks; the others are the sequence's own. With `is_context` all tokens are the sequence's
        own, and nobody reads the outputs.
        """
        longest, cache, head = max(len(row.tokens) for row in rows), self.cache, self.head
        is_block = isinstance(head, BlockHead)
        num_own = [0 if is_block and not is_context else len(row.tokens) + 1 - row.num_logits for row in rows]
        states = self._states_of(rows, num_own)
        if head.uses_kernels and head.first_token == 1:
            for row in rows:
                if row.start == 1:
                    hide_first(cache.pool, row.block_table[0])
        if isinstance(head, BlockHead) and is_context:
            batch, outputs = None, states.flatten(0, 1)
            with self._computing():
                head.see(pack(rows, cache.block_size, self.engine.device), outputs, self.pool)
        else:
            batch, outputs = self._compute(rows, states.flatten(0, 1))
        for row, own, made in zip(rows, num_own, outputs.view(len(rows), longest, -1), strict=True):
            cache.mark_known(row.block_table, row.start, row.start + own)
            if head.keeps_outputs:
                cache.keep_own(row.block_table, row.start, made[:own], head.config.hidden_size)
        return outputs if batch is None else _asked_for(outputs, batch)

    def _states_of(self, rows: list[Row], num_own: list[int]) -> Tensor:
        """States [B, Q, state_size] before the rows' tokens: stored hidden states for the first `num_own` tokens of
        each row, and the head's mask state for its masks.
        """
        cache, head, longest = self.cache, self.head, max(len(row.tokens) for row in rows)
        if num_own == [longest]:
            return cache.states_for(rows[0].block_table, rows[0].start, rows[0].start + longest)[None]
        states = cache.states.new_zeros(len(rows), longest, cache.states.shape[-1])
        for into, row, own in zip(states, rows, num_own, strict=True):
            if own:
                into[:own] = cache.states_for(row.block_table, row.start, row.start + own)
            if isinstance(head, EagleHead) and own < len(row.tokens):
                into[own : len(row.tokens)] = head.mask_state.to(into.dtype)
        return states

    def _go_on(self, draft_states: Seq[DraftState], outputs: dict[int, Tensor], num_drafted: int) -> dict[int, Tensor]:
        """The head's outputs for the last tokens of the drafts, computed from its outputs for the tokens before."""
        rows = []
        for draft_state in draft_states:
            sequence = draft_state.draft_sequence
            position = sequence.num_computed if self.head.reads_target else len(sequence.tokens) - 1
            rows.append(Row(sequence.tokens[-1:], position, sequence.block_table, 1))
        batch, made = self._compute(rows, torch.stack([outputs[id(one)][0] for one in draft_states]), num_drafted)
        made = _asked_for(made, batch)
        return {id(draft_state): output[None] for draft_state, output in zip(draft_states, made, strict=True)}

    def _compute(self, rows: list[Row], states: Tensor, num_drafted: int = 0) -> tuple[Batch, Tensor]:
        """Build the batch of the rows, and compute the head's outputs for all its tokens."""
        with self._computing():
            batch = pack(rows, self.cache.block_size, self.engine.device)
            return batch, self.head(batch, states, self.pool, num_drafted)

    def _logits_at_once(self, outputs: dict[int, Tensor]) -> dict[int, Tensor]:
        """Logits of all tokens of all drafts, without the part that depends on the token before, by one product."""
        with self._computing():
            logits = self.head.logits(torch.cat([*outputs.values()]))
        return dict(zip(outputs, torch.split(logits, [len(one) for one in outputs.values()]), strict=True))

    def _logits(
        self, draft_states: Seq[DraftState], outputs: list[Tensor], num_drafted: int, known: list[Tensor]
    ) -> tuple[Tensor, Seq[float | None]]:
        """Logits of each draft's next token, and its chance of acceptance if the head predicts that. If `known` has the
        logits already, only the part that depends on the token before is added.
        """
        chances: Seq[float | None] | None = None
        with self._computing():
            stacked = torch.stack(outputs)
            logits = torch.stack(known) if known else self.head.logits(stacked, num_drafted)
            if isinstance(self.head, BlockHead):
                last_ids = torch.tensor([one.draft_sequence.tokens[-1] for one in draft_states], device=stacked.device)
                logits = self.head.behind(logits, stacked, last_ids)
                chances = self.head.confidences(stacked, last_ids) if self.confidence_stop else None
        return logits, chances or [None] * len(outputs)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Context in which the head computes, and its time is counted. Beside the head's kernels, torch's short loops
        wake no threads of their own (`Engine.alone`).
        """
        start = time.perf_counter()
        with torch.inference_mode(), self.engine.alone() if self.head.uses_kernels else nullcontext():
            yield
        self.time_s += time.perf_counter() - start


def _asked_for(outputs: Tensor, batch: Batch) -> Tensor:
    """The outputs [tokens, state_size] for the tokens whose logits the batch's rows want."""
    return outputs if len(outputs) == len(batch.logit_indices) else outputs[batch.logit_indices]


def open_head(engine: Engine, config: HeadConfig) -> tuple[Head, HeadCache]:
    """Load the head, and have the engine keep hidden states for it. SpecDecError if the head does not fit the target,
    or if the engine was not built for it.
    """
    target = engine.config
    config.check_target(target.pretrained_config, target.vocab_size)
    wanted, given = config.hidden_states_of(num_layers_of(target.pretrained_config)), target.build_config.hidden_states
    if wanted != given:
        said = f"gives hidden states {', '.join(map(str, given))}" if given else "gives no hidden states"
        raise SpecDecError(
            f"the engine's step {said}, and the head reads {', '.join(map(str, wanted))}: {config.directory}",
            hint="build the engine for this head: `LLM(model, head=HEAD)`",
            code="no_hidden_states",
            head=config.directory,
        )
    embedding = embedding_of(engine)
    head: Any = load_head(config, embedding, getattr(torch, target.dtype), _output_of(engine, config, embedding))
    _set_output(engine, head)
    head = head.to(engine.device)
    arithmetic = 0 if target.arithmetic is None else ARITHMETICS.index(target.arithmetic)
    if uses_kernels(target.build_config.compiler, engine.device.type):
        step = engine.target_step
        use_kernels(head, arithmetic, step.weights if isinstance(step, PackagedStep) else {})
    if head.reads_target:
        head.read_layers_of(target)
    if sum(file.stat().st_size for file in config.weight_files) > _LITTLE_BYTES:
        trim()  # the weights were in memory twice: as read, and packed
    name = digest(map(file_digest, config.weight_files)) if engine.has_disk else None
    cache = engine.add_head(head, name)
    if head.uses_kernels:
        use_programs(head, engine.kv_pool if head.reads_target else cache.pool, cache.states.dtype, arithmetic)
    return head, cache


def _output_of(engine: Engine, config: HeadConfig, embedding: Tensor | None) -> Tensor | None:
    """The target's output layer [vocab, hidden], for a head that has none; None for other heads. SpecDecError if the
    engine has it in packed form only.
    """
    if not config.reads_target_output:
        return None
    if (kept := None if engine.directory is None else read_target_output(engine.directory)) is not None:
        return kept
    if language_model(engine.config.pretrained_config).get("tie_word_embeddings"):
        return embedding
    raise SpecDecError(
        f"the head needs its target's output layer, and the engine was built without it: {config.directory}",
        hint="build the engine for this head: `LLM(model, head=HEAD)`",
        code="no_hidden_states",
        head=config.directory,
    )


def _set_output(engine: Engine, head: Head) -> None:
    """Give the head the output layer and the quantized layers that the engine keeps for drafts."""
    wanted, directory = engine.config.build_config.draft_output, engine.directory
    kept = QuantizedLayers()
    if wanted.is_quantized and directory is not None:
        kept = read_quantized(head.config, wanted, directory)
    set_output(head, engine.draft_ids if head.draft_ids is None else None, kept.output)
    set_layers(head, kept.others)


def embedding_of(engine: Engine) -> Tensor | None:
    """The target's embeddings [vocab, hidden], not copied; None if a packaged engine has no such tensor, or two."""
    step, config = engine.target_step, engine.config
    if not isinstance(step, PackagedStep):
        weight: Tensor = step.model.get_input_embeddings().weight
        return weight.detach()
    shape = (config.vocab_size, language_model(config.pretrained_config).get("hidden_size"))
    found = [one for one in step.weights.values() if tuple(one.shape) == shape and one.is_floating_point()]
    return found[0] if len(found) == 1 else None


def measure_head(engine: Engine, head: Head, cache: HeadCache) -> tuple[StepCost, ...]:
    """Measure the costs of the head's steps on the engine's null block, so that no sequence's data is overwritten.

    For a head that drafts at once, a step is a pass over as many tokens as its longest draft has, at most 8.
    """
    build, costs = engine.config.build_config, []
    pool = engine.kv_pool if head.reads_target else cache.pool
    num_rows = 1 if not head.drafts_at_once else min(head.longest_draft or _LONG_BLOCK, _LONG_BLOCK)
    for batch_size in sorted({min(size, build.max_batch_size) for size in _TIMED_BATCHES}):
        for context_len in sorted({min(length, build.max_request_len - 1) for length in _TIMED_CONTEXTS}):
            table = [0] * ((context_len + num_rows) // build.tokens_per_block + 1)
            rows = [Row([0] * num_rows, context_len, table, num_rows)] * batch_size
            batch = pack(rows, build.tokens_per_block, engine.device)
            states = cache.states.new_zeros(batch_size * num_rows, cache.states.shape[-1])
            seconds = []
            with torch.inference_mode(), engine.alone() if head.uses_kernels else nullcontext():
                for _ in range(_NUM_TIMED):
                    start = time.perf_counter()
                    head.logits(head(batch, states, pool))
                    seconds.append(time.perf_counter() - start)
            costs.append(StepCost(batch_size, context_len, 1, min(seconds)))
    return tuple(costs)
