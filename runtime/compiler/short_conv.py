"""Gated short convolutions of the LFM2 families over states of sequences, in the place of transformers' modules.

A token's output depends on the inputs of the `kernel_size - 1` tokens before it. Those of its own row are there; others
are in the sequence's slot (`runtime.states`). Every output is a sum in one order, whatever is computed beside it.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from runtime.compiler.attention import KERNEL, PagedInputs
from runtime.config import LayerShape, StateShape

_NAMES = ("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv")


def place_states(model: nn.Module) -> None:
    """Have the model's short convolutions, if it has any, keep their states in the paged inputs of a step.

    Without paged inputs they stay transformers'.
    """
    for module in model.modules():
        if type(module).__name__ in _NAMES and not isinstance(module, ShortConv):
            module.__class__ = _paged(type(module))  # type: ignore[arg-type]


def state_layers(model: nn.Module) -> tuple[int, ...]:
    """Numbers of the layers whose states are in paged inputs."""
    return tuple(int(one.layer_idx) for one in model.modules() if isinstance(one, ShortConv))


class ShortConv(nn.Module):
    """The forward of `Lfm2ShortConv` and its like, of one row of B x Q tokens."""

    in_proj: nn.Linear
    out_proj: nn.Linear
    conv: nn.Conv1d
    layer_idx: int
    config: PreTrainedConfig

    def forward(
        self,
        hidden_states: Tensor,
        *,
        paged: PagedInputs | dict[int, LayerShape | StateShape] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if paged is None:
            output: Tensor = super().forward(hidden_states, **kwargs)
            return output
        before, after, x = self.in_proj(hidden_states).chunk(3, dim=-1)
        mixed: Tensor = self.out_proj(after * self._mix(before * x, paged))
        return mixed

    def _mix(self, inputs: Tensor, paged: PagedInputs | dict[int, LayerShape | StateShape]) -> Tensor:
        weight, bias = self.conv.weight.squeeze(1), self.conv.bias
        if isinstance(paged, dict):
            paged[self.layer_idx] = StateShape(self.layer_idx, inputs.shape[-1], weight.shape[1] - 1)
            return torch.empty_like(inputs)
        pool = paged.state_pool(self.layer_idx)
        assert paged.state_slots is not None
        places = (paged.positions, paged.slot_mapping, paged.state_slots)
        if self.config._attn_implementation == KERNEL:
            mixed: Tensor = torch.ops.specdec.short_conv(inputs, weight, bias, pool, *places)
            return mixed
        return short_conv(inputs, weight, bias, pool, *places)


@cache
def _paged(module_class: type[nn.Module]) -> type[nn.Module]:
    return type(module_class.__name__, (ShortConv, module_class), {})


def short_conv(
    inputs: Tensor,  # (1, B x Q, C)
    weight: Tensor,  # (C, kernel_size)
    bias: Tensor | None,
    pool: Tensor,  # (num_slots, length, C), which is written
    positions: Tensor,  # (B, Q) int64
    slot_mapping: Tensor,  # (B, Q) int64, 0 of padding
    state_slots: Tensor,  # (B,) int64, each once, but for the null slot
) -> Tensor:  # (1, B x Q, C)
    """Depthwise causal convolution of each row's tokens and those before them, by torch's own operations."""
    (B, Q), kernel_size, length = positions.shape, weight.shape[1], pool.shape[1]
    rows = inputs.reshape(B, Q, -1)
    ago = torch.arange(kernel_size - 1, 0, -1, device=positions.device)
    earlier = positions[:, :1] - ago
    history = pool[state_slots[:, None], earlier % length].where((earlier >= 0).unsqueeze(-1), 0)
    all_inputs = torch.cat([history, rows], 1).float()
    sums = torch.zeros_like(rows, dtype=torch.float32) if bias is None else bias.float().expand(B, Q, -1)
    for i in range(kernel_size):
        sums = sums + weight[:, i].float() * all_inputs[:, i : i + Q]
    is_kept = (slot_mapping != 0) & (positions > positions.amax(1, keepdim=True) - length)
    pool.index_put_((state_slots[:, None].where(is_kept, 0), positions % length), rows)
    return sums.to(inputs.dtype).view_as(inputs)
