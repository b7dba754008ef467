"""Depthwise causal convolutions over states of sequences, in torch.

A token's output depends on the inputs of the `kernel_size - 1` tokens before it. Those of its own row are there; others
are in the sequence's slot (`runtime.states`). Every output is a sum in one order, whatever is computed beside it.
"""

import torch
from torch import Tensor


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
