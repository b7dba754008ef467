"""The paged K/V cache: which block holds which tokens, and who may use it.

`BlockManager` does the bookkeeping and never touches a tensor; `KVPool` is the memory. Blocks are found again by
content: a trie keyed by (parent node, tokens of the block). Keys are the tokens themselves, so there are no hash
collisions, and node ids are never used twice, so a block whose parent was overwritten can't be found by mistake.
Sequences with a `cache_salt` have a root of their own: they find no blocks of another salt, and no other sequence finds
theirs.

Only computed tokens are ever inserted. A freed block keeps its content until it is needed for something else: being
free and being cached are the same list, oldest first.

With 8 bits, a token's key has a scale in each head, and so has its value: its largest number divided by the largest
number of the format. Each number is divided by its scale, and stored as the nearest number of the format; of two that
are as near, as the even one. The CPU's kernel rounds in the same way.
"""

import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoint.config import KVCacheQuantAlgo, LayerShape
from runtime.core.request import Sequence
from runtime.kernels.memory import zeros

NULL_BLOCK = 0
_ROOT = 0
Parent = int | str
"""Parent of a node: a node's id, or a root: 0, or the salt of sequences that have a salt."""


@dataclass(frozen=True)
class CachedBlock:
    """A cached block's content: where it hangs in the trie, and the tokens whose K/V it holds."""

    id: int
    parent: Parent
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class PoolCopy:
    """Instruction to copy a block's K/V, or a slot's state, before the step that follows an admission."""

    source: int
    destination: int

    def make(self, pools: Iterable[Any]) -> None:
        """Copy in each of these pools, whose first dimension is that of blocks or slots."""
        for pool in pools:
            pool[self.destination] = pool[self.source]


class BlockManager:
    """Hands out, shares and frees blocks of `block_size` tokens. Block 0, the null block, is never handed out."""

    def __init__(self, num_blocks: int, block_size: int, *, reuse: bool) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._reuse = reuse
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, num_blocks))
        self._nodes: dict[int, CachedBlock] = {}  # block -> its node
        self._children: dict[Parent, dict[tuple[int, ...], int]] = {}  # node -> tokens -> block
        self._sorted: dict[Parent, list[tuple[int, ...]]] = {}  # node -> tokens of its children, in order
        self._next_node_id = _ROOT + 1
        self.on_evict: Callable[[int, CachedBlock], None] | None = None
        """Called with a block, and its content, before the content may be overwritten."""

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_cache_tokens(self) -> int:
        """Tokens that fit into an otherwise empty cache."""
        return (self.num_blocks - 1) * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match_len(self, sequence: Sequence) -> int:
        """Number of the sequence's first tokens whose K/V are in the cache and may be reused."""
        shared, num_matched = self._match(sequence, sequence.max_reused)
        return len(shared) * self.block_size + (num_matched[1] if num_matched else 0)

    def admit(self, sequence: Sequence, num_tokens: int, max_reused: int | None = None) -> list[PoolCopy] | None:
        """Give `sequence` blocks for `num_tokens` tokens. Blocks whose K/V are known come first, for at most
        `max_reused` tokens; None stands for all that the sequence may reuse.

        Sets its block table and `num_computed`. `num_computed` stays below the number of its tokens, because the last
        token must be computed for its logits; it is lower if logits of earlier tokens are wanted. Returns the copies to
        make, or None (and changes nothing) if there are too few free blocks.
        """
        shared, partial = self._match(sequence, sequence.max_reused if max_reused is None else max_reused)
        start = len(shared) * self.block_size
        num_new = self.num_blocks_for(num_tokens) - len(shared)
        num_revived = sum(self._ref_counts[block] == 0 for block in shared)
        if num_new + num_revived > len(self._free):
            return None
        for block in shared:
            self._hold(block)
        sequence.block_table = shared
        sequence.num_computed = start
        copies = []
        if partial is not None:
            source, num_matched = partial
            sequence.num_computed += num_matched
            sequence.block_table.append(self._reuse_partial_block(source, num_matched))
            if sequence.block_table[-1] != source:
                copies.append(PoolCopy(source, sequence.block_table[-1]))
        self.extend(sequence, num_tokens)
        return copies

    def publish(self, sequence: Sequence) -> list[tuple[int, CachedBlock]]:
        """Insert the sequence's computed tokens into the trie; returns the blocks with their content."""
        found: list[tuple[int, CachedBlock]] = []
        parent = _root_of(sequence)
        for i, block in enumerate(sequence.block_table):
            end = min((i + 1) * self.block_size, sequence.num_computed)
            tokens = tuple(sequence.tokens[i * self.block_size : end])
            if not tokens:
                break
            existing = self._children.get(parent, {}).get(tokens)
            if existing is None:
                self._evict(block)
                self._nodes[block] = CachedBlock(self._next_node_id, parent, tokens)
                self._children.setdefault(parent, {})[tokens] = block
                bisect.insort(self._sorted.setdefault(parent, []), tokens)
                self._next_node_id += 1
                existing = block
            found.append((existing, self._nodes[existing]))
            parent = self._nodes[existing].id
        return found

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give an admitted sequence further blocks, for `num_tokens` tokens in all; False if too few are free."""
        num_new = self.num_blocks_for(num_tokens) - len(sequence.block_table)
        if num_new > len(self._free):
            return False
        sequence.block_table.extend(self._allocate() for _ in range(num_new))
        return True

    def release(self, sequence: Sequence) -> None:
        """Publish the computed tokens (with block reuse) and free the blocks; the last block is evicted first."""
        if self._reuse:
            self.publish(sequence)
        for block in reversed(sequence.block_table):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if block not in self._nodes:
                    self._free.move_to_end(block, last=False)
        sequence.block_table = []
        sequence.num_computed = 0

    def clear(self) -> None:
        """Evict the content of every free block."""
        for block in self._free:
            self._evict(block)

    def check_integrity(self) -> None:
        """Assert the invariants of the cache; for tests and debugging."""
        assert NULL_BLOCK not in self._free and self._ref_counts[NULL_BLOCK] == 0
        for block in range(1, self.num_blocks):
            assert self._ref_counts[block] >= 0
            assert (block in self._free) == (self._ref_counts[block] == 0), f"block {block} is neither free nor held"
        cached = {block for children in self._children.values() for block in children.values()}
        assert cached == set(self._nodes), "the trie and the blocks disagree"
        for block, node in self._nodes.items():
            assert self._children[node.parent][node.tokens] == block
            assert 0 < len(node.tokens) <= self.block_size
        assert all(self._children.values()), "an empty level of the trie was kept"
        assert self._sorted == {parent: sorted(children) for parent, children in self._children.items()}

    def holds(self, block: int, content: CachedBlock) -> bool:
        """True if the block still has this content: then the bytes that any thread has read before are right."""
        return self._nodes.get(block) is content

    def _match(self, sequence: Sequence, most: int) -> tuple[list[int], tuple[int, int] | None]:
        """Published blocks with the sequence's first tokens, and a block that begins with some of the next tokens."""
        tokens = sequence.tokens
        shared, parent = self._match_prefix(tokens[: most + 1], _root_of(sequence))
        start = len(shared) * self.block_size
        return shared, self._find_partial_block(parent, tokens[start : min(start + self.block_size, most)])

    def _match_prefix(self, tokens: list[int], node: Parent) -> tuple[list[int], Parent]:
        """Published blocks below `node` that hold the first tokens, and the node of the last one."""
        blocks: list[int] = []
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            block = self._children.get(node, {}).get(tuple(tokens[start : start + self.block_size]))
            if block is None:
                break
            blocks.append(block)
            node = self._nodes[block].id
        return blocks, node

    def _find_partial_block(self, parent: Parent, tokens: Seq[int]) -> tuple[int, int] | None:
        """(block, n): the block below `parent` that begins with the first n tokens of `tokens`, for the largest n; None
        if no block does. Among the sorted blocks this block stands right before or behind the place of `tokens`, so
        that two of 10,000 blocks are looked at.
        """
        siblings = self._sorted.get(parent, [])
        place = bisect.bisect_left(siblings, tuple(tokens))
        beside = siblings[max(place - 1, 0) : place + 1]
        num_matched, best = max(((num_common(one, tokens), one) for one in beside), default=(0, ()))
        return (self._children[parent][best], num_matched) if num_matched else None

    def _reuse_partial_block(self, source: int, num_matched: int) -> int:
        """A block of our own that starts with the first `num_matched` tokens of `source`: the source itself, or a block
        to copy it to.

        The source is taken if its ref count is 0 and either all its tokens match, so that nothing is lost, or no other
        block is free.
        """
        unheld = self._ref_counts[source] == 0
        if unheld and (num_matched == len(self._nodes[source].tokens) or len(self._free) == 1):
            self._evict(source)
            self._hold(source)
            return source
        if unheld:
            self._free.move_to_end(source)  # otherwise the allocation could hand out the source
        return self._allocate()

    def _evict(self, block: int) -> None:
        """Remove the block's content from the trie."""
        if self.on_evict is not None and block in self._nodes:
            self.on_evict(block, self._nodes[block])
        node = self._nodes.pop(block, None)
        if node is not None:
            del self._children[node.parent][node.tokens]
            siblings = self._sorted[node.parent]
            del siblings[bisect.bisect_left(siblings, node.tokens)]
            if not siblings:
                del self._children[node.parent], self._sorted[node.parent]

    def _allocate(self) -> int:
        block = next(iter(self._free))
        self._evict(block)
        self._hold(block)
        return block

    def _hold(self, block: int) -> None:
        self._free.pop(block, None)
        self._ref_counts[block] += 1


def _root_of(sequence: Sequence) -> Parent:
    return sequence.request.cache_salt or _ROOT


def num_common(a: Seq[int], b: Seq[int]) -> int:
    """Number of first tokens that are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


_QUANTIZED: dict[KVCacheQuantAlgo, torch.dtype] = {"INT8": torch.int8, "FP8": torch.float8_e4m3fn}
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def kv_dtype(dtype: str, algorithm: KVCacheQuantAlgo | None) -> torch.dtype:
    """Torch dtype in which the K/V cache is stored, for a model of this dtype."""
    kept: torch.dtype = getattr(torch, dtype) if algorithm is None else _QUANTIZED[algorithm]
    return kept


class KVPool:
    """The memory of the cache: for each layer a tensor for keys and a tensor for values.

    A block holds the keys of each head transposed, [num_blocks, Hk, D, block_size], and the values as they are,
    [num_blocks, Hk, block_size, Dv]: both products of attention then run along contiguous memory. Keys and values that
    are not finite are stored as a key of NaN and a value of zeros, so that they affect only tokens that see them.

    With 8 bits a third tensor, float32 [num_blocks, Hk, 2, block_size], has the scales of a token's keys and values in
    each head; NaN is then stored as the scale of the keys.
    """

    def __init__(
        self, layers: Seq[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def pool(num_kv_heads: int, rows: int, columns: int, dtype: torch.dtype = dtype) -> Tensor:
            return zeros((num_blocks, num_kv_heads, rows, columns), dtype, device)

        self.keys = [pool(layer.num_kv_heads, layer.key_head_dim, block_size) for layer in layers]
        self.values = [pool(layer.num_kv_heads, block_size, layer.value_head_dim) for layer in layers]
        self.scales: list[Tensor] = []
        self.places = {layer.layer: place for place, layer in enumerate(layers)}
        if is_quantized(dtype):
            self.scales = [pool(layer.num_kv_heads, 2, block_size, torch.float32) for layer in layers]
        self.tensors = self.keys, [*self.values, *self.scales]
        """The cache as a step takes it: keys, then values and, with 8 bits, scales."""

    def occupy(self, blocks: range) -> None:
        """Write to all these blocks once: unwritten pages share a page of zeros, which is read faster than memory."""
        for pool in (*self.keys, *self.values, *self.scales):
            pool[blocks.start : blocks.stop].zero_()

    def copy_block(self, copy: PoolCopy) -> None:
        copy.make((*self.keys, *self.values, *self.scales))


def is_quantized(dtype: torch.dtype) -> bool:
    """True if keys and values of this dtype have scales."""
    return dtype in _QUANTIZED.values()


def bytes_per_block(layers: Seq[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    elements = sum(layer.num_kv_heads * (layer.key_head_dim + layer.value_head_dim) for layer in layers)
    num_scales = sum(2 * layer.num_kv_heads for layer in layers) if is_quantized(dtype) else 0
    return block_size * (elements * dtype.itemsize + num_scales * torch.float32.itemsize)


def quantize_kv(numbers: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers [..., D] of `dtype` from finite numbers [..., D], and float32 scales [...]."""
    largest = _LARGEST[dtype]
    scales = _scales(numbers, largest)
    over_scale = numbers.float() / scales.where(scales > 0, torch.inf).unsqueeze(-1)
    over_scale = over_scale.clamp(-largest, largest)  # a scale that is hardly more than 0 has few bits
    return (over_scale.round() if dtype == torch.int8 else over_scale).to(dtype), scales


def _scales(numbers: Tensor, largest: float) -> Tensor:
    return numbers.float().abs().amax(-1) / largest


def dequantize_kv(stored: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize stored values to `dtype`."""
    return (stored.float() * scales.unsqueeze(-1)).to(dtype)


def largest_error(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Largest error [..., D] that rounding to `dtype` may give each number."""
    scales = _scales(numbers, _LARGEST[dtype]).unsqueeze(-1)
    if dtype == torch.int8:
        return scales.expand_as(numbers) / 2
    return torch.maximum(numbers.float().abs() / 16, scales * 2.0**-10)


def are_quantizable(numbers: Tensor) -> Tensor:
    """True [...] where a vector's scale, times the largest number of each format, is finite; numbers [..., D]."""
    largest_again = [_scales(numbers, largest) * largest for largest in _LARGEST.values()]
    return torch.stack(largest_again).isfinite().all(0)
