"""Experts of a mixture by the CPU kernel, registered with transformers. A token's products are computed as in a linear
layer, and their bits do not depend on the experts that other tokens choose.

Only token programs use them: weights are packed in the graph, once when an engine is built.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward

from runtime.model.quantized import EXPERTS_KERNEL, QuantizedExperts

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def experts_by_kernel(model: PreTrainedModel) -> Iterator[None]:
    """Have the kernel, which must be loaded, compute a model's experts within the block."""
    before, of_config = model.get_experts_implementation(), model.config._experts_implementation_internal
    model.set_experts_implementation(EXPERTS_KERNEL)
    model.config._experts_implementation_internal = EXPERTS_KERNEL  # not set if experts are ours (Llama 4)
    try:
        yield
    finally:
        model.config._experts_implementation_internal = of_config
        model.set_experts_implementation(before)


def computes_by_kernel(config: PreTrainedConfig) -> bool:
    return bool(config._experts_implementation == EXPERTS_KERNEL)


def kernel_experts(
    experts: nn.Module,
    hidden_states: Tensor,  # (S, C)
    top_k_index: Tensor,  # (S, k) int64
    top_k_weights: Tensor,  # (S, k)
) -> Tensor:  # (S, C)
    """Outputs in place of `batched_mm_experts_forward`, which copies an expert's weights for each token."""
    names = ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")
    if not all(_can_serve(experts, name) for name in names):
        output: Tensor = batched_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
        return output
    chosen = top_k_index.reshape(-1)
    x = expert_product(experts, names[0], hidden_states, chosen)
    x = experts._apply_gate(x) if experts.has_gate else experts.act_fn(x)  # type: ignore[operator]
    x = expert_product(experts, names[1], x, chosen)
    if experts.has_post_expert_norm:
        x = experts.post_expert_norm(x)  # type: ignore[operator]
    weighted = x * top_k_weights.reshape(-1, 1)
    return weighted.reshape(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)


def _can_serve(experts: nn.Module, name: str) -> bool:
    if isinstance(getattr(experts, name), QuantizedExperts):
        return True
    return _is_packable(_rows(experts, name))


def _is_packable(weight: Tensor) -> bool:
    return weight.dtype in _DTYPES and weight.shape[2] % 2 == 0


def _rows(experts: nn.Module, name: str) -> Tensor:
    """Weights of the experts, [experts, outputs, inputs]."""
    weight = getattr(experts, name)
    assert isinstance(weight, Tensor)
    # Llama 4's experts do not have `is_transposed`: they are [experts, inputs, outputs].
    return weight.transpose(1, 2) if getattr(experts, "is_transposed", True) else weight


def expert_product(experts: nn.Module, name: str, x: Tensor, chosen: Tensor) -> Tensor:
    """Output [S x k, outputs] of each token's k experts; `x` is [S, inputs] or [S x k, inputs]."""
    own = getattr(experts, name)
    products = own(x, chosen) if isinstance(own, QuantizedExperts) else _product(_rows(experts, name), x, chosen)
    return products + getattr(experts, f"{name}_bias")[chosen] if getattr(experts, "has_bias", False) else products


def chosen_product(config: PreTrainedConfig, weight: Tensor, x: Tensor, chosen: Tensor) -> Tensor:
    """`expert_product` with weights [E, outputs, inputs]. Without the kernel it copies an expert's weights for each
    token, like transformers' `batched_mm`.
    """
    if computes_by_kernel(config) and _is_packable(weight):
        return _product(weight, x, chosen)
    each = x.repeat_interleave(chosen.shape[0] // x.shape[0], 0).unsqueeze(-1)
    return (weight[chosen].to(x.dtype) @ each).squeeze(-1)


def _product(weight: Tensor, x: Tensor, chosen: Tensor) -> Tensor:
    kernels = torch.ops.specdec
    num_outputs = weight.shape[1]
    whole_panels = F.pad(weight, (0, 0, 0, -num_outputs % kernels.panel()))
    packed = kernels.pack_linear(whole_panels.flatten(0, 1))
    # The arithmetic is what `runtime.compiler.linears` sets.
    products: Tensor = kernels.experts_linear(x.to(weight.dtype), packed, chosen, num_outputs, 0, 0)
    return products


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_KERNEL, kernel_experts)
