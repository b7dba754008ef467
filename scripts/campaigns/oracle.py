"""A model whose logits are an exact function of the tokens in the K/V cache, and an engine that checks what it holds.

A token's keys are its id and its position, and its value is a hash of everything before it, all written to the real
slots and read back through the real block tables. The logits after it are a hash of those keys and values. So a wrong
slot, a stale block, a block under the wrong parent, a token lost or computed twice changes logits, and what they should
have been is computed from the list of tokens alone.

With a layer that has a state each token also leaves the hash of everything before it in its sequence's slot, and reads
those of the tokens before it there. One that is not what the cache's tokens give changes its logits. With a recurrent
state the slot also has a sum of products over all tokens before, which linear attention keeps as it does for models,
of integers so small that float32 is exact.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.checkpoint.config import (
    BuildConfig,
    EngineConfig,
    Environment,
    LayerShape,
    LogitsCheck,
    RecurrentShape,
    StateShape,
)
from runtime.compiler.package import StepFunction
from runtime.core.batch import Row
from runtime.core.kv_cache import PoolCopy
from runtime.core.request import Draft, Request, Sequence
from runtime.core.sampling import Sampler, draw
from runtime.core.states import CHUNK_SIZE, StateManager, state_pools
from runtime.engine.engine import Engine, KVCacheConfig
from runtime.model.recurrences import linear_attention

Array = NDArray[Any]
_LAYER = LayerShape(layer=0, num_kv_heads=1, key_head_dim=2, value_head_dim=1, sliding_window=None)
_HASH_BITS = 24  # that float32 holds exactly


def mixed(x: Array) -> Array:
    """uint64: every high bit of the result depends on every bit of `x` (the finalizer of splitmix64, shortened)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(32)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(29)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(32)
    return x


@dataclass(frozen=True)
class ExactModel:
    """Three times in four the token it likes most follows from the two before alone, so that lookups find something.

    Models of different seeds like the same then, and differ in the rest. `sharpness` is how much it likes that token.
    """

    seed: int
    vocab_size: int
    sharpness: float = 3.0
    num_before: int = 0
    """Tokens before one whose hashes it reads in its slot; 0: it has no states."""
    is_recurrent: bool = False
    """True: the slot has a recurrent state too."""

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        logit_indices: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        *states_and_slots: Any,
    ) -> Tensor:
        """An engine's step (`runtime.model.model.Step`): write the new keys, then the values, then read all."""
        pool_keys, pool_values, at = keys[0].numpy(), values[0].numpy(), positions.numpy()
        assert input_ids.max() < self.vocab_size
        block_size = pool_keys.shape[-1]
        blocks, offsets = np.divmod(slot_mapping.numpy(), block_size)
        pool_keys[blocks, 0, 0, offsets] = input_ids.numpy() + 1
        pool_keys[blocks, 0, 1, offsets] = at + 1
        read_blocks = np.repeat(block_tables.numpy(), block_size, axis=1)
        read_offsets = np.tile(np.arange(block_size), block_tables.shape[1])
        ids, places = (pool_keys[read_blocks, 0, i, read_offsets].astype(np.uint64) for i in (0, 1))
        rows = np.arange(len(ids))[:, None]
        prefixes = self._prefixes(ids, places)
        pool_values[blocks, 0, offsets, 0] = _short(prefixes)[rows, at]
        read_values = pool_values[read_blocks, 0, read_offsets, 0].astype(np.uint64)
        states = self._states(prefixes, read_values)[rows, at]
        if self.num_before:
            state_slots, (pool, *recurrent) = states_and_slots
            is_token, ring_of = slot_mapping.numpy() > 0, state_slots.numpy()
            wrong = self._wrong_states(_short(prefixes), at, is_token, ring_of, pool.numpy())
            if self.is_recurrent:
                found = _linear_attention(input_ids, (positions, slot_mapping, state_slots), recurrent[0])
                expected = np.cumsum(_products(ids - np.uint64(1), places - np.uint64(1)), axis=1)[rows, at]
                wrong ^= np.where(is_token, found != expected, False).astype(np.uint64) << np.uint64(40)
            states ^= mixed(wrong) ^ mixed(np.zeros_like(wrong))
        before = np.where(at > 0, ids[rows, np.maximum(at - 1, 0)], 0)
        chosen = logit_indices.numpy()
        return self._logits(*(part.reshape(-1)[chosen] for part in (states, before, ids[rows, at])))

    def _wrong_states(self, hashes: Array, at: Array, is_token: Array, state_slots: Array, pool: Array) -> Array:
        """(B, Q) 0 where the slots hold the hashes of the tokens before; writes the tokens' own."""
        wrong, length = np.zeros(at.shape, dtype=np.uint64), pool.shape[1]
        for row, column in np.argwhere(is_token):
            position, ring = at[row, column], pool[state_slots[row], :, 0]
            for ago in range(1, min(self.num_before, position) + 1):
                read = np.uint64(np.nan_to_num(ring[(position - ago) % length]))
                wrong[row, column] ^= (read ^ hashes[row, position - ago]) << np.uint64(8 * ago)
            ring[position % length] = hashes[row, position]
        return wrong

    def cached(self, tokens: Seq[int]) -> tuple[Array, Array]:
        """Numbers that the cache must hold of a text: (2, n) keys and (n,) values."""
        ids, places = _as_stored(tokens)
        return np.stack([ids, places]), _short(self._prefixes(ids[None], places[None]))[0]

    def logits(self, tokens: Seq[int], num_last: int = 1) -> Tensor:
        """(num_last, vocab) float32 after each of the last tokens of a text, by the text alone."""
        ids, places = _as_stored(tokens)
        prefixes = self._prefixes(ids[None], places[None])
        states = self._states(prefixes, _short(prefixes))[0]
        before = np.concatenate([np.zeros(1, dtype=np.uint64), ids[:-1]])
        return self._logits(states[-num_last:], before[-num_last:], ids[-num_last:])

    def _prefixes(self, ids: Array, places: Array) -> Array:
        """(B, n) a hash of the tokens up to each: of their ids, the positions they were given, and where they lie."""
        index = np.arange(ids.shape[1], dtype=np.uint64)
        words = ids << np.uint64(40) ^ places << np.uint64(20) ^ index
        return np.cumsum(mixed(words ^ np.uint64(self.seed << 56)), axis=1, dtype=np.uint64)

    @staticmethod
    def _states(prefixes: Array, read_values: Array) -> Array:
        index = np.arange(prefixes.shape[1], dtype=np.uint64)
        values = np.cumsum(mixed(read_values << np.uint64(32) ^ index), axis=1, dtype=np.uint64)
        return mixed(prefixes ^ mixed(values))

    def _logits(self, states: Array, before: Array, last: Array) -> Tensor:
        vocab_size = np.uint64(self.vocab_size)
        usual = mixed(before << np.uint64(20) ^ last) % vocab_size
        liked = np.where(states & np.uint64(3), usual, (states >> np.uint64(8)) % vocab_size)
        noise = mixed(states[:, None] + np.arange(self.vocab_size, dtype=np.uint64)) >> np.uint64(40)
        logits = noise.astype(np.float64) * 2.0**-24 * self.sharpness
        logits[np.arange(len(liked)), liked.astype(np.int64)] += self.sharpness
        return torch.from_numpy(logits.astype(np.float32))


def _key_and_value(ids: Any, places: Any) -> tuple[Any, Any]:
    """Small integers of tokens and their positions; sums of a thousand products of them are exact in float32."""
    return ids % 61 + 1, (places * 7 + ids) % 13 + 1


def _products(ids: Array, places: Array) -> Array:
    key, value = _key_and_value(ids.astype(np.int64), places.astype(np.int64))
    return np.asarray(key * value)


def _linear_attention(input_ids: Tensor, places: tuple[Tensor, Tensor, Tensor], pool: Tensor) -> Array:
    """(B, Q) sum over each token and those before it, by what models with linear attention call."""
    key, value = (one.float().view(1, -1, 1, 1) for one in _key_and_value(input_ids, places[0]))
    parts = (torch.ones_like(key), key, value, torch.zeros_like(key[..., 0]), None)
    output = linear_attention(parts, pool, places, CHUNK_SIZE, 1.0, normalizes=False)
    return np.asarray(output.view(places[0].shape).numpy())


def _read_sum(state: Tensor, position: int) -> float:
    """Sum over the tokens before a position, of a slot's recurrent state, which stays as it is."""
    one, nothing = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)
    places = (torch.tensor([[position]]), torch.ones(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    parts = (one, nothing, nothing, nothing[..., 0], None)
    return linear_attention(parts, state.clone()[None], places, CHUNK_SIZE, 1.0, normalizes=False).item()


def _sums(tokens: Seq[int]) -> Array:
    return np.cumsum(_products(np.asarray(tokens), np.arange(len(tokens))))


def _as_stored(tokens: Seq[int]) -> tuple[Array, Array]:
    """Ids and positions from 1: what was never written is 0."""
    return np.asarray(tokens, dtype=np.uint64) + np.uint64(1), np.arange(1, len(tokens) + 1, dtype=np.uint64)


def _short(hashes: Array) -> Array:
    return mixed(hashes) >> np.uint64(64 - _HASH_BITS)


def engine_config(model: ExactModel, build: BuildConfig) -> EngineConfig:
    environment = Environment("", "", "cpu", "")
    recurrent = RecurrentShape(num_heads=1, key_dim=1, value_dim=1) if model.is_recurrent else None
    states = (StateShape(1, width=1, num_before=model.num_before, recurrent=recurrent),) if model.num_before else ()
    check = LogitsCheck(0, 0, 0)
    return EngineConfig({}, "float32", build, (_LAYER,), model.vocab_size, environment, check, "", states=states)


class Injected(Exception):
    """A failure put in on purpose."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C on purpose."""


@dataclass
class Failure:
    """The `number`th call of `operation`, from 0, fails: before it does its work, halfway through it, or after."""

    operation: str
    number: int
    when: Literal["before", "halfway", "after"]
    is_interrupt: bool = False

    def error(self) -> BaseException:
        return (Interrupted if self.is_interrupt else Injected)(self.operation)


class Calls:
    """Counts the calls of engines and sequences, and lets one of them fail."""

    def __init__(self) -> None:
        self.numbers: Counter[str] = Counter()
        self.failure: Failure | None = None

    def make(self, operation: str, call: Callable[[], Any], half: Callable[[], Any] = lambda: None) -> Any:
        """Make the call. `half` does a part of its work, after which it may fail too."""
        number = self.numbers[operation]
        self.numbers[operation] += 1
        failure = self.failure
        if failure is None or (failure.operation, failure.number) != (operation, number):
            return call()
        if failure.when != "before":
            (half if failure.when == "halfway" else call)()
        raise failure.error()

    @contextmanager
    def watch_commits(self) -> Iterator[None]:
        commit = Sequence.commit

        def watched(sequence: Sequence, draft: Draft, verdict: Any) -> list[int]:
            tokens: list[int] = self.make("commit", lambda: commit(sequence, draft, verdict))
            assert sequence.num_computed <= len(sequence.tokens), "num_computed is beyond the tokens"
            return tokens

        Sequence.commit = watched  # type: ignore[method-assign]
        try:
            yield
        finally:
            Sequence.commit = commit  # type: ignore[method-assign]


Slots = tuple[int, int]
"""Slots of states, the null slot included, and the positions by which a step may go back in each."""


def _half(inputs: Seq[Any]) -> list[Any]:
    """The first half of a step's tokens, without logits; of one token a row, its K/V and not its state."""
    per_token, (block_tables, logit_indices, keys, values, *states) = inputs[:3], inputs[3:]
    num_tokens = per_token[0].shape[1]
    if num_tokens == 1 and states:
        states = [torch.zeros_like(states[0]), *states[1:]]
    first = [one[:, : max(num_tokens // 2, 1)] for one in per_token]
    return [*first, block_tables, logit_indices[:0], keys, values, *states]


class CheckedEngine(Engine):
    """An engine of an exact model: the logits of every step, and the K/V behind them, are what the tokens say."""

    def __init__(
        self,
        model: ExactModel,
        build: BuildConfig,
        kv_cache: KVCacheConfig,
        max_num_tokens: int,
        copy: ExactModel | None = None,
        slots: Slots | None = None,
    ) -> None:
        self.model = model
        self.calls = Calls()
        self.name = ""
        """Put before what its calls are counted as."""
        self.held: dict[int, Sequence] = {}
        step, copy_step = self._counted(model, "model"), copy and self._counted(copy, "copy's model")
        config, device = engine_config(model, build), torch.device("cpu")
        super().__init__(config, step, device, kv_cache, max_num_tokens, copy_step)
        if self._states is not None and slots is not None:
            number, num_back = slots
            self._states.manager = StateManager(number, num_back, reuse=kv_cache.block_reuse)
            self._states.pools = state_pools(config.states, number, num_back, torch.float32, device)
        self._count_copies()

    def _counted(self, model: ExactModel, name: str) -> StepFunction:
        """The step, each of which may fail: some of its tokens are written then, or their K/V only."""

        def step(*inputs: Any) -> Any:
            return self.calls.make(self.name + name, lambda: model(*inputs), lambda: model(*_half(inputs)))

        return step

    def _count_copies(self) -> None:
        """Each copy of a block or of a state may fail, the latter when some of its layers are copied."""
        states, copy_block = self._states, self._pool.copy_block
        self._pool.copy_block = lambda copy: self.calls.make(  # type: ignore[method-assign]
            f"{self.name}block copy", lambda: copy_block(copy)
        )
        if states is None:
            return
        copy_state = states._copy

        def counted(copy: PoolCopy | None) -> None:
            if copy is None:
                return copy_state(None)
            made = copy
            self.calls.make(f"{self.name}state copy", lambda: copy_state(made), lambda: made.make(states.pools[:1]))
            return None

        states._copy = counted  # type: ignore[method-assign]

    def admit(self, sequence: Sequence, *, reads: bool = True) -> bool:
        def call() -> bool:
            self.held[id(sequence)] = sequence
            if is_admitted := super(CheckedEngine, self).admit(sequence, reads=reads):
                self.check_sequence(sequence)
            return is_admitted

        return bool(self.calls.make(f"{self.name}admit", call))

    def release(self, sequence: Sequence) -> None:
        if sequence.block_table:
            self.check_sequence(sequence)
        self.calls.make(f"{self.name}release", lambda: super(CheckedEngine, self).release(sequence))
        self.held.pop(id(sequence), None)

    def step(self, rows: Seq[Row], *, by_copy: bool = False) -> list[Tensor]:
        def call() -> list[Tensor]:
            all_logits = super(CheckedEngine, self).step(rows)
            for row, logits in zip(rows, all_logits, strict=True):
                sequence = next(one for one in self.held.values() if one.block_table is row.block_table)
                tokens, num_tokens = [*sequence.tokens[: row.start], *row.tokens], len(sequence.tokens)
                assert tokens[:num_tokens] == sequence.tokens, f"{self.name}tokens of request {sequence.request.id}"
                expected = self.model.logits(tokens, len(tokens) - num_tokens + 1)
                assert torch.equal(logits, expected), f"{self.name}logits of request {sequence.request.id}"
            return all_logits

        def call_copy() -> list[Tensor]:
            return super(CheckedEngine, self).step(rows, by_copy=True)  # whose logits are nobody's

        made = (f"{self.name}copy's step", call_copy) if by_copy else (f"{self.name}step", call)
        logits: list[Tensor] = self.calls.make(*made)
        return logits

    def check_sequence(self, sequence: Sequence) -> None:
        """The first `num_computed` tokens are in its blocks, none of which is published as anything else."""
        size = self._blocks.block_size
        for i, block in enumerate(sequence.block_table):
            if node := self._blocks._nodes.get(block):
                own = tuple(sequence.tokens[i * size : i * size + len(node.tokens)])
                assert own == node.tokens[: len(own)], f"{self.name}a block is still published as what it was"
        computed = sequence.tokens[: sequence.num_computed]
        self._check_blocks(sequence.block_table, computed)
        if self._states is not None and self._states.manager.can_begin(sequence):
            self._check_slot(sequence.state_slot, computed, sequence.num_computed)

    def check_books(self) -> None:
        """Check that nobody holds a block, none is lost, and published ones hold the texts they are published as."""
        assert not any(s.block_table for s in self.held.values()), f"{self.name}blocks are held"
        assert self._blocks.num_free_blocks == self._blocks.num_blocks - 1, f"{self.name}blocks are lost"
        self._blocks.check_integrity()
        if self._states is not None:
            self._states.manager.check_integrity()
            assert not self._states.manager._held, f"{self.name}slots are held"
            for slot, kept in self._states.manager._kept.items():
                self._check_slot(slot, kept.tokens, kept.first)
        block_of = {node.id: block for block, node in self._blocks._nodes.items()}
        for block in self._blocks._nodes:
            path = [block]
            while parent := block_of.get(self._blocks._nodes[path[0]].parent):
                path.insert(0, parent)
            if self._blocks._nodes[path[0]].parent == 0:  # or its parent was forgotten, and nobody finds it
                tokens = [token for one in path for token in self._blocks._nodes[one].tokens]
                self._check_blocks(path, tokens)

    def _check_slot(self, slot: int, tokens: list[int], first: int) -> None:
        """The slot holds what is read behind `first` and more of a sequence's first tokens."""
        if not tokens:
            return
        assert self._states is not None
        ring = self._states.pools[0].numpy()[slot, :, 0]
        needed = np.arange(max(0, first - self.model.num_before), len(tokens))
        _, hashes = self.model.cached(tokens)
        assert (ring[needed % len(ring)] == hashes[needed]).all(), f"{self.name}a state is of other tokens"
        if self.model.is_recurrent:
            found = _read_sum(self._states.pools[1][slot], len(tokens))
            assert found == _sums(tokens)[-1], f"{self.name}a recurrent state is of other tokens"

    def _check_blocks(self, blocks: list[int], tokens: list[int]) -> None:
        if not tokens:
            return
        keys, values = self.model.cached(tokens)
        index = np.arange(len(tokens))
        block, offset = np.asarray(blocks)[index // self._blocks.block_size], index % self._blocks.block_size
        held_keys = self._pool.keys[0].numpy()[block, 0, :, offset].T
        held_values = self._pool.values[0].numpy()[block, 0, offset, 0]
        assert (held_keys == keys).all() and (held_values == values).all(), f"{self.name}K/V are of other tokens"


def one_by_one(model: ExactModel, request: Request, drafts: Seq[Draft] = ()) -> list[int]:
    """The output of a request, token by token from the text alone: no engine, cache, batch or loop.

    `drafts` are those of its steps so far, and are needed where a sampling request's carry probabilities.
    """
    tokens = list(request.prompt_tokens)
    sampler = Sampler(request.sampling, request.prompt_tokens, request.return_index)
    for draft in drafts or [Draft([])] * request.max_new_tokens:
        is_drawn = draft.probs is not None and draft.tokens and not sampler.is_greedy
        follow = _rejection_step if is_drawn else _plain_step
        for token in follow(model, sampler, tokens, draft):
            tokens.append(token)
            if has_ended(request, tokens):
                return tokens[len(request.prompt_tokens) :]
    return tokens[len(request.prompt_tokens) :]


def has_ended(request: Request, tokens: list[int]) -> bool:
    if tokens[-1] in request.end_ids:
        return True
    if request.stop_check is not None and request.stop_check(tokens, len(request.prompt_tokens)):
        return True
    return len(tokens) - len(request.prompt_tokens) == request.max_new_tokens


def _plain_step(model: ExactModel, sampler: Sampler, tokens: list[int], draft: Draft) -> Iterator[int]:
    """The target's own tokens, for as long as they are the draft's, and one more."""
    prefix = list(tokens)
    for drafted in [*draft.tokens, None]:
        token = sampler.choose(prefix, model.logits(prefix)[0])
        yield token
        if token != drafted:
            return
        prefix.append(token)


def _rejection_step(model: ExactModel, sampler: Sampler, tokens: list[int], draft: Draft) -> Iterator[int]:
    """Sun et al., arXiv 2403.10444, Algorithm 2 and equations 3 and 4, of a draft that tells what it was drawn from."""
    assert draft.probs is not None
    start, number = len(tokens), len(draft.tokens)
    p: list[Tensor] = []
    for i in range(number + 1):  # after a token that the target never chooses nothing more is asked
        if i == 0 or float(p[-1][draft.tokens[i - 1]]) > 0:
            p.append(sampler.probs([*tokens, *draft.tokens[:i]], model.logits([*tokens, *draft.tokens[:i]])[0]))
    at_least = [1.0]
    for i, token in enumerate(draft.tokens[: len(p)]):
        at_least.append(min(at_least[i] * float(p[i][token]) / float(draft.probs[i][token]), 1.0))
    residuals = [(at_least[i] * p[i] - draft.probs[i]).clamp(min=0) for i in range(min(number, len(p)))]
    accepted = 0
    for i in range(1, len(p)):
        threshold = at_least[i]
        if i < number:
            left = float(residuals[i].sum())
            threshold = left / (left + 1 - at_least[i]) if left or at_least[i] < 1 else 1.0
        if sampler.accept_uniform(start + i, start) < threshold:
            accepted = i
    yield from draft.tokens[:accepted]
    weights = p[accepted]
    if accepted < number and float(residuals[accepted].sum()) > 0:
        weights = residuals[accepted]
    yield draw(weights, sampler.uniform(start + accepted, "target"))
