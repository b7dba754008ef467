"""A head's attention over the pages of a `HeadCache`, and its pass: module by module, or compiled into one program.

The program (`runtime.compiler.token_program`) computes the layers without a call from Python for each operation: beside
a small or quantized target such calls take longer than reading the weights.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from runtime.checkpoint.config import LayerShape
from runtime.compiler.package import add_program
from runtime.core.batch import Batch, pack
from runtime.core.kv_cache import KVPool
from runtime.drafters.heads.head_config import HeadConfig
from runtime.kernels.ops import describe_kernels
from runtime.model.attention import PagedInputs, kernel_attention

if TYPE_CHECKING:
    from runtime.compiler.compilation import TokenStep

_NOT_SEEN = -3e4
"""Score, before scaling, of a key that no query sees."""


@dataclass
class PagedPairs(PagedInputs):
    """Inputs of a head's attention. A sequence's first token has no pair, so no query may see its key.

    The kernel cannot hide a key. So queries and keys get two further numbers (`_EXTRA`). They give the first token's
    key, whose other numbers are zero, a score of `_NOT_SEEN`. In a layer whose pairs begin later, the keys of the next
    `num_hidden` - 1 tokens get the same score.
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
    """A head's attention over its pages, by the kernel; queries and keys are [1, heads, tokens, dim]."""
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
    """Write a key that no query sees for the first token of a sequence that begins in this block."""
    for keys, values in zip(pool.keys, pool.values, strict=True):
        keys[block, :, :, 0], values[block, :, 0] = 0, 0
        keys[block, :, -_EXTRA, 0] = _NOT_SEEN


def for_kernels(shapes: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """These layers with room for the further numbers of keys (`PagedPairs`)."""
    return tuple(replace(one, key_head_dim=one.key_head_dim + _EXTRA) for one in shapes)


def kv_shapes(layers: Iterable[Any]) -> tuple[LayerShape, ...]:
    """Shapes of the keys and values of transformers' decoder layers."""
    attentions = [layer.self_attn for layer in layers]
    return tuple(
        LayerShape(i, one.config.num_key_value_heads, one.head_dim, one.head_dim, None)
        for i, one in enumerate(attentions)
    )


def paged_pairs(batch: Batch, pool: KVPool, layers: tuple[int, ...], depth: int = 0) -> PagedPairs:
    """Inputs of attention for a head's `layers`; `depth` is its number among heads with equally many layers, from 0."""
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


class PagedHead(nn.Module, ABC):
    """A head of layers that attend over pages of K/V."""

    config: HeadConfig
    program: "HeadProgram | None" = None
    """The head's pass, if it is compiled into one program; None otherwise."""

    @property
    def state_size(self) -> int:
        return self.config.hidden_size

    def reduce(self, states: Tensor) -> Tensor:
        return states

    @abstractmethod
    def pages(self, batch: Batch, pool: KVPool) -> PagedInputs:
        """Inputs of the head's attention."""

    @abstractmethod
    def outputs_at(self, ids: Tensor, states: Tensor, positions: Tensor, **attention: Any) -> Tensor:
        """Outputs [B, T, state_size] for tokens [B, T] at positions [B or 1, T], from the states before them;
        `attention` is passed on to the layers.
        """

    def forward(self, batch: Batch, states: Tensor, pool: KVPool, num_drafted: int = 0) -> Tensor:
        paged = self.pages(batch, pool)
        if self.program is not None:
            return self.program(batch, states, paged)
        return _outputs(self, batch.input_ids, batch.positions, states, paged)


def _outputs(head: PagedHead, ids: Tensor, positions: Tensor, states: Tensor, paged: PagedInputs) -> Tensor:
    """Outputs [B x Q, state_size] from tokens [B, Q] and states [B x Q, state_size]."""
    return head.outputs_at(ids.reshape(1, -1), states[None], positions.reshape(1, -1), paged=paged)[0]


class HeadProgram:
    """A head's pass as a token program."""

    def __init__(self, head_pass: "_Pass", step: "TokenStep") -> None:
        self._pass = head_pass  # keeps the weights alive that the step reads
        self._step: Any = torch.classes.specdec.CutStep()
        for call in step.cut.calls:
            places = [call.inputs, call.outputs]
            add_program(self._step, step.codes[call.program], dict(call.weights()), places)

    def __call__(self, batch: Batch, states: Tensor, paged: PagedInputs) -> Tensor:
        """Outputs [B x Q, state_size] from states [B x Q, state_size or more]."""
        own = states[:, : self._pass.width].contiguous()  # an assistant's state for logits lies behind
        outputs: Tensor = self._step.run(_tensors(batch, own, paged))[0]
        return outputs


def use_programs(head: nn.Module, pool: KVPool, dtype: torch.dtype, arithmetic: int) -> None:
    """Compile the passes of a head that uses kernels over this pool, if programs have all its operations."""
    for part in head.modules():
        if isinstance(part, PagedHead):
            part.program = _program_of(part, pool, dtype, arithmetic)


def _program_of(head: PagedHead, pool: KVPool, dtype: torch.dtype, arithmetic: int) -> HeadProgram | None:
    """The pass as a program; None if a layer has operations that programs lack."""
    from runtime.compiler.capture import NoTokenProgram, example_rows  # with torch's compiler
    from runtime.compiler.compilation import token_step_of

    block_size = pool.keys[0].shape[3]
    rows = example_rows([5, 3], 2 * block_size + 1, 2 * block_size + 1 + 5, block_size, 2)
    batch = pack(rows, block_size, torch.device("cpu"))
    paged = head.pages(batch, pool)
    head_pass = _Pass(head, paged)
    states = torch.zeros(batch.input_ids.numel(), head_pass.width, dtype=dtype)
    # With few blocks, in memory of their own: tracing views of other memory takes long.
    pools = (torch.empty((_FEW_BLOCKS, *one.shape[1:]), dtype=one.dtype) for one in _pools(paged))
    inputs = _tensors(batch, states, _with_pools(paged, pools))
    of_tokens, of_pools = {0: "rows", 1: "tokens"}, [{0: "num_blocks"}] * (len(inputs) - _NUM_BEFORE_POOLS)
    sizes = (*[of_tokens] * (_NUM_BEFORE_POOLS - 1), {0: "rows", 1: "blocks of a row"}, *of_pools)
    describe_kernels()
    found = token_step_of(head_pass, tuple(inputs), sizes, arithmetic)
    return None if isinstance(found, NoTokenProgram) else HeadProgram(head_pass, found)


_NUM_BEFORE_POOLS, _FEW_BLOCKS = 6, 7


def _tensors(batch: Batch, states: Tensor, paged: PagedInputs) -> list[Tensor]:
    """The program's inputs."""
    own = batch.input_ids, batch.positions, states.view(*batch.input_ids.shape, -1)
    return [*own, paged.positions, paged.slot_mapping, paged.block_tables, *_pools(paged)]


def _pools(paged: PagedInputs) -> list[Tensor]:
    return [*paged.key_pools, *paged.value_pools, *paged.scale_pools]


def _with_pools(paged: PagedInputs, pools: Iterator[Tensor]) -> PagedInputs:
    """The same inputs with other pools."""
    keys, values, scales = (
        list(islice(pools, len(theirs))) for theirs in (paged.key_pools, paged.value_pools, paged.scale_pools)
    )
    return replace(paged, key_pools=keys, value_pools=values, scale_pools=scales, masks={})


class _Pass(nn.Module):
    """A head's pass as a module whose arguments are tensors only."""

    def __init__(self, head: PagedHead, paged: PagedInputs) -> None:
        super().__init__()
        self.head, self._paged, self.width = head, paged, head.state_size

    def forward(self, *tensors: Tensor) -> Tensor:
        ids, positions, states, seen, slots, tables, *pools = tensors
        paged = replace(_with_pools(self._paged, iter(pools)), positions=seen, slot_mapping=slots, block_tables=tables)
        return _outputs(self.head, ids, positions, states.flatten(0, 1), paged)
