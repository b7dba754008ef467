"""Blocks under random admissions, steps and releases, against a pool that remembers what was written where.

The simulated pool maps each slot to the tokens up to and including the one whose K/V it holds: K/V depend on all of
them, so a slot is right for position i of a sequence if and only if it holds the sequence's first i + 1 tokens.

Three promises, whatever is admitted, stepped and released: what is claimed as computed is held; a block is held, or
free, and given back once; nothing that could be found is overwritten while a block without content is free.
"""

import copy
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentences import Said

from runtime.checkpoint.config import LayerShape
from runtime.core import kv_cache
from runtime.core.kv_cache import NULL_BLOCK, BlockManager, KVPool, PoolCopy, bytes_per_block
from runtime.core.request import Draft, Request, Sequence, VerifyResult


def start(tokens: list[int]) -> Sequence:
    return Sequence(Request(0, tuple(tokens), 1000), list(tokens))


@dataclass
class SimulatedPool:
    """A block manager with the K/V it manages."""

    manager: BlockManager
    held: dict[int, tuple[int, ...]] = field(default_factory=dict)  # slot -> tokens its K/V were computed from
    counts: Counter[str] = field(default_factory=Counter)

    def slot(self, sequence: Sequence, position: int) -> int:
        block_size = self.manager.block_size
        block = sequence.block_table[position // block_size]
        assert block != NULL_BLOCK
        return block * block_size + position % block_size

    def admit(self, sequence: Sequence, num_tokens: int) -> bool:
        """Admit, make the copies, and check everything the manager promises."""
        manager, before = self.manager, (copy.deepcopy(vars(self.manager)), copy.deepcopy(sequence))
        published, bare = set(manager._nodes), without_content(manager)
        copies = manager.admit(sequence, num_tokens)
        num_blocks = manager.num_blocks_for(num_tokens)
        if copies is None:
            assert (vars(manager), sequence) == before
            assert num_blocks > manager.num_free_blocks
            return False
        assert len(sequence.block_table) == len(set(sequence.block_table)) == num_blocks
        assert sequence.num_computed < len(sequence.tokens)
        overwritten = (
            published - set(manager._nodes) - {sequence.block_table[(sequence.num_computed - 1) // manager.block_size]}
        )
        assert not overwritten or not bare & without_content(manager), "a text was overwritten in place of nothing"
        self.counts["copied"] += len(copies)
        self.counts["taken over"] += sequence.num_computed % manager.block_size != 0 and not copies
        for block_copy in copies:
            assert block_copy.source != block_copy.destination
            for offset in range(manager.block_size):
                source = block_copy.source * manager.block_size + offset
                destination = block_copy.destination * manager.block_size + offset
                self.held.pop(destination, None)
                if source in self.held:
                    self.held[destination] = self.held[source]
        return True

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extend, and check that blocks are added or nothing changes."""
        manager, before = self.manager, (copy.deepcopy(vars(self.manager)), copy.deepcopy(sequence))
        table, num_blocks = list(sequence.block_table), manager.num_blocks_for(num_tokens)
        published, bare = set(manager._nodes), without_content(manager)
        extended = manager.extend(sequence, num_tokens)
        assert published <= set(manager._nodes) or not bare & without_content(manager)
        if not extended or num_blocks <= len(table):
            assert (vars(manager), sequence) == before
            assert extended == (num_blocks - len(table) <= manager.num_free_blocks)
            return extended
        assert sequence.block_table[: len(table)] == table
        assert len(sequence.block_table) == len(set(sequence.block_table)) == num_blocks
        assert (sequence.tokens, sequence.num_computed) == (before[1].tokens, before[1].num_computed)
        self.counts["extended"] += 1
        return True

    def write(self, sequence: Sequence, tokens: list[int], first: int) -> None:
        for position in range(first, len(tokens)):
            self.held[self.slot(sequence, position)] = tuple(tokens[: position + 1])

    def step(self, sequence: Sequence, draft: list[int], num_accepted: int, next_token: int) -> None:
        """Do what an engine's step and the commit after it do."""
        self.write(sequence, sequence.tokens + draft, sequence.num_computed)
        sequence.num_computed = len(sequence.tokens) + num_accepted
        sequence.commit(Draft(draft), VerifyResult(num_accepted, next_token))

    def check(self, sequences: list[Sequence]) -> None:
        self.manager.check_integrity()
        for sequence in sequences:
            for position in range(sequence.num_computed):
                assert self.held.get(self.slot(sequence, position)) == tuple(sequence.tokens[: position + 1])


def without_content(manager: BlockManager) -> set[int]:
    """Free blocks that nothing can be found in."""
    return set(manager._free) - set(manager._nodes)


tokens_of_a_small_alphabet = st.lists(st.integers(1, 2), min_size=1, max_size=14)


class Simulation:
    """Sequences over two letters, so that prefixes are often shared, in few blocks, so that they are overwritten."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.reuse = seed % 8 != 0
        num_blocks, block_size = self.random.randint(2, 14), self.random.choice([2, 4])
        self.pool = SimulatedPool(BlockManager(num_blocks, block_size, reuse=self.reuse))
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.counts: Counter[str] = Counter()

    def run(self, num_operations: int) -> None:
        operations = [self.admit_new] * 3 + [self.admit_again] * 4 + [self.step] * 8 + [self.release] * 5
        operations += [self.extend] * 3
        for _ in range(num_operations):
            self.random.choice(operations)()
            if self.random.random() < 0.01:
                self.pool.manager.clear()
            self.pool.check(self.running)
            in_use = {block for sequence in self.running for block in sequence.block_table}
            assert self.pool.manager.num_free_blocks == self.pool.manager.num_blocks - 1 - len(in_use)

    def letters(self, max_len: int) -> list[int]:
        return [self.random.choice([1, 1, 1, 2]) for _ in range(self.random.randint(0, max_len))]

    def admit(self, sequence: Sequence) -> None:
        num_tokens = len(sequence.tokens) + self.random.randint(0, 5)
        admitted = self.pool.admit(sequence, num_tokens)
        self.counts["admitted" if admitted else "refused"] += 1
        if not admitted:
            assert self.running or self.pool.manager.num_blocks_for(num_tokens) >= self.pool.manager.num_blocks
            return
        assert self.reuse or sequence.num_computed == 0
        self.counts["reused in part"] += sequence.num_computed % self.pool.manager.block_size != 0
        self.running.append(sequence)

    def admit_new(self) -> None:
        """A prompt of its own, or one that begins or is like another sequence's."""
        others = self.running + self.waiting
        tokens = list(self.random.choice(others).tokens) if others and self.random.random() < 0.6 else []
        if self.random.random() < 0.7:
            tokens = tokens[: self.random.randint(0, 12)] + self.letters(4)
        self.admit(start((tokens or [1])[:16]))

    def admit_again(self) -> None:
        """Do what orchestrator mode does every step: the same tokens come back, longer by what was accepted."""
        if self.waiting:
            sequence = self.waiting.pop(self.random.randrange(len(self.waiting)))
            if len(sequence.tokens) < 24:
                self.admit(sequence)

    def step(self) -> None:
        if self.running:
            sequence = self.random.choice(self.running)
            room = len(sequence.block_table) * self.pool.manager.block_size - len(sequence.tokens)
            if room >= 0:
                draft = self.letters(min(room, 5))
                num_accepted = self.random.randint(0, len(draft))
                self.pool.step(sequence, draft, num_accepted, self.random.choice([1, 2]))

    def extend(self) -> None:
        """Do what a loop that keeps a sequence's blocks does after every step."""
        if self.running:
            sequence = self.random.choice(self.running)
            extended = self.pool.extend(sequence, len(sequence.tokens) + self.random.randint(0, 5))
            self.counts["not extended"] += not extended

    def release(self) -> None:
        if self.running:
            sequence = self.running.pop(self.random.randrange(len(self.running)))
            self.pool.manager.release(sequence)
            assert (sequence.block_table, sequence.num_computed) == ([], 0)
            self.waiting.append(sequence)


@pytest.mark.parametrize(
    "hundred", [*range(2), *(pytest.param(hundred, marks=pytest.mark.slow) for hundred in range(2, 10))]
)
def test_what_is_claimed_as_computed_is_held(hundred: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(100 * hundred, 100 * (hundred + 1)):
        simulation = Simulation(seed)
        simulation.run(num_operations=60)
        counts += simulation.counts + simulation.pool.counts
    # What is to be tested did happen.
    happened = ("admitted", "refused", "reused in part", "copied", "taken over", "extended", "not extended")
    assert min(counts[what] for what in happened) > 50


def computed(pool: SimulatedPool, tokens: list[int]) -> None:
    """Admit, compute all of `tokens`, release."""
    sequence = start(tokens)
    assert pool.admit(sequence, len(tokens))
    pool.write(sequence, tokens, sequence.num_computed)
    sequence.num_computed = len(tokens)
    pool.manager.release(sequence)


def num_found(pool: SimulatedPool, tokens: list[int]) -> int:
    """Number of `tokens` that an admission would find, on a copy: admitting changes what is found later."""
    pool, sequence = copy.deepcopy(pool), start(tokens)
    assert pool.admit(sequence, len(tokens))
    pool.check([sequence])
    return sequence.num_computed


def test_block_that_was_copied_stays_findable() -> None:
    """Though it is the least recently freed one, which an allocation takes first."""
    pool = SimulatedPool(BlockManager(4, 4, reuse=True))
    for tokens in ([1, 2, 3], [4, 5, 6], [7, 8, 9]):
        computed(pool, tokens)
    sequence = start([1, 2, 9])
    assert pool.admit(sequence, 4)
    assert (sequence.num_computed, pool.counts["copied"]) == (2, 1)
    assert num_found(pool, [1, 2, 3, 5]) == 3


@given(
    texts=st.lists(tokens_of_a_small_alphabet, min_size=1, max_size=8),
    asked=tokens_of_a_small_alphabet,
    block_size=st.sampled_from([2, 4]),
)
@settings(deadline=None, derandomize=True)
def test_longest_computed_prefix_is_found(texts: list[list[int]], asked: list[int], block_size: int) -> None:
    """Reuse finds exactly the longest common prefix where there is room for everything, but never the last token."""
    pool = SimulatedPool(BlockManager(200, block_size, reuse=True))
    for text in texts:
        computed(pool, text)
    sequence = start(asked)
    assert pool.admit(sequence, len(asked))
    longest = max(n for n in range(len(asked) + 1) if any(text[:n] == asked[:n] for text in texts))
    assert sequence.num_computed == min(longest, len(asked) - 1)
    pool.check([sequence])


def test_an_admission_looks_at_few_of_many_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two blocks beside the place of its tokens are looked at, of 300; it was all of them."""
    pool = SimulatedPool(BlockManager(400, 4, reuse=True))
    for first in range(300):
        computed(pool, [first, 1, 2])
    looked_at: list[object] = []
    num_common = kv_cache.num_common
    monkeypatch.setattr(kv_cache, "num_common", lambda a, b: looked_at.append(a) or num_common(a, b))
    assert num_found(pool, [123, 1, 9]) == 2
    assert len(looked_at) <= 2


@pytest.mark.parametrize(
    ("tokens", "num_computed", "num_copies"),
    [
        pytest.param([1, 2, 3, 4, 5, 6, 7, 8, 9], 6, 0, id="tail block matches whole: taken over"),
        pytest.param([1, 2, 3, 4, 5, 9], 5, 1, id="tail block matches in part: copied"),
        pytest.param([1, 2, 3, 4, 9], 4, 0, id="full block shared"),
        pytest.param([1, 2, 9], 2, 1, id="full block matches in part: copied"),
        pytest.param([1, 2, 3, 4, 5, 6], 5, 1, id="identical: all but the last token, copied"),
        pytest.param([9, 1, 2, 3], 0, 0, id="nothing shared"),
    ],
)
def test_reuse_of_a_released_sequence(tokens: list[int], num_computed: int, num_copies: int) -> None:
    """After 1 2 3 4 | 5 6 was computed in blocks of 4."""
    pool = SimulatedPool(BlockManager(9, 4, reuse=True))
    computed(pool, [1, 2, 3, 4, 5, 6])
    sequence = start(tokens)
    copies = pool.manager.admit(sequence, len(tokens) + 3)
    assert copies is not None
    assert (sequence.num_computed, len(copies)) == (num_computed, num_copies)


def test_least_recently_freed_block_is_overwritten_first() -> None:
    pool = SimulatedPool(BlockManager(4, 2, reuse=True))
    for tokens in ([1, 1], [2, 2], [3, 3]):
        computed(pool, tokens)
    computed(pool, [1, 1, 4])  # uses 1 1 again and overwrites 2 2
    assert [num_found(pool, [first, first, 5]) for first in (1, 2, 3)] == [2, 0, 2]


def test_end_of_a_sequence_is_overwritten_before_its_beginning() -> None:
    """Without its beginning nothing of it could be found. Of 4 blocks of 2 one was never used and goes first."""
    pool = SimulatedPool(BlockManager(5, 2, reuse=True))
    computed(pool, [1, 2, 3, 4, 5, 6])
    sequence = start([9])
    assert pool.admit(sequence, 4)
    pool.manager.release(sequence)
    assert num_found(pool, [1, 2, 3, 4, 5, 6, 7]) == 4


def test_integrity_check_finds_what_it_is_for(said: Said) -> None:
    manager = BlockManager(5, 4, reuse=True)
    manager.check_integrity()
    manager._ref_counts[2] = 1
    with pytest.raises(AssertionError) as error:
        manager.check_integrity()
    said(error, "2")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_pool_of_8_bits_has_scales_and_copies_them(dtype: torch.dtype) -> None:
    pool = KVPool([LayerShape(0, 2, 8, 8, None), LayerShape(1, 1, 4, 6, 16)], 3, 4, dtype, torch.device("cpu"))
    assert {tensor.dtype for tensor in (*pool.keys, *pool.values)} == {dtype}
    assert [tuple(scales.shape) for scales in pool.scales] == [(3, 2, 2, 4), (3, 1, 2, 4)]
    every = [tensor for tensors in pool.tensors for tensor in tensors]
    assert len(every) == 6
    for tensor in every:
        tensor[1] = (torch.rand(tensor.shape[1:]) * 100).to(tensor.dtype)
    before = [tensor[1].clone() for tensor in every]
    pool.copy_block(PoolCopy(source=1, destination=2))
    for tensor, source in zip(every, before, strict=True):
        assert torch.equal(tensor[2].float(), source.float()) and source.float().any() and not tensor[0].float().any()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn], ids=str
)
def test_bytes_per_block_are_those_of_the_pool(dtype: torch.dtype) -> None:
    layers = [LayerShape(0, 2, 8, 8, None), LayerShape(1, 1, 4, 6, 16)]
    pool = KVPool(layers, 3, 4, dtype, torch.device("cpu"))
    assert bytes_per_block(layers, 4, dtype) * 3 == sum(t.nbytes for t in (*pool.keys, *pool.values, *pool.scales))
