"""Attention of a head over the pages of a `HeadCache`, whose first tokens have no pair, and no key that is seen."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from runtime.batch import Batch
from runtime.compiler.attention import PagedInputs, kernel_attention
from runtime.config import LayerShape
from runtime.kv_cache import KVPool

_NOT_SEEN = -3e4
"""Score, before it is scaled, of what no query sees."""


@dataclass
class PagedPairs(PagedInputs):
    """Inputs of a head's attention: a sequence's first token has no pair, and no key that a query may see.

    The kernel knows no such key. So it is handed queries and keys with two more numbers, `_EXTRA`, by which the first
    token's key, of which nothing else is there, has a score of `_NOT_SEEN`. And so have those of `num_hidden` - 1
    tokens behind it, of layers that begin later.
    """

    num_hidden: int = 1

    def mask(self, sliding_window: int | None, attention_chunk: int | None, num_groups: int) -> Tensor:
        visible = super().mask(sliding_window, attention_chunk, num_groups)
        return visible & (torch.arange(visible.shape[-1], device=visible.device) >= self.num_hidden)


_EXTRA = 2
HEAD = "specdec_head"


def head_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of a head over its pages, by the kernel (`runtime.compiler.attention`)."""
    if kwargs.get("scaling") is None:
        kwargs["scaling"] = query.shape[-1] ** -0.5
    paged: PagedPairs = kwargs["paged"]
    ones, zeros = (torch.zeros_like(one[..., :1]) for one in (query, key))
    ones, scores = ones + 1, zeros
    if paged.num_hidden > 1:
        is_seen = paged.positions.view(1, 1, -1, 1) + zeros > paged.num_hidden - 1
        scores = zeros.masked_fill(~is_seen, _NOT_SEEN)
    query = torch.cat([query, ones, torch.zeros_like(ones)], -1)
    key = torch.cat([key, scores, zeros], -1)
    return kernel_attention(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(HEAD, head_attention)


def hide_first(pool: KVPool, block: int) -> None:
    """Give the first token of a sequence that begins with this block a key that no query sees."""
    for keys, values in zip(pool.keys, pool.values, strict=True):
        keys[block, :, :, 0], values[block, :, 0] = 0, 0
        keys[block, :, -_EXTRA, 0] = _NOT_SEEN


def for_kernels(shapes: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    return tuple(replace(one, key_head_dim=one.key_head_dim + _EXTRA) for one in shapes)


def paged_pairs(batch: Batch, pool: KVPool, layers: tuple[int, ...], depth: int = 0) -> PagedPairs:
    """Inputs of a head's `layers`, the `depth`th of several heads that have as many."""
    own = slice(depth * len(layers), (depth + 1) * len(layers))
    return PagedPairs(
        pool.keys[own],
        pool.values[own],
        [],
        batch.positions,
        batch.slot_mapping,
        batch.block_tables,
        layers,
        num_hidden=depth + 1,
    )
