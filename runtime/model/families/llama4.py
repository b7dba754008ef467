"""Llama 4: queries with a temperature, rotation by complex numbers, and experts that each compute every token."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from runtime.model.attention import CACHE, KERNEL, PAGED, PagedInputs, Recorded
from runtime.model.experts import computes_by_kernel, expert_product
from runtime.model.families.family import Family
from runtime.model.replaced import Replaced, own_module


class _Positions:
    """Number of tokens before each row's tokens; added to places in the row it gives positions."""

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions

    def __radd__(self, places: Tensor) -> Tensor:
        return self.positions


class _KeepsNothing:
    """A cache without keys and values, in which each row has its own positions."""

    def __init__(self, positions: Tensor) -> None:
        self.positions = _Positions(positions)

    def get_seq_length(self, layer: int) -> _Positions:
        return self.positions

    def update(self, key: Tensor, value: Tensor, *others: object, **more: object) -> tuple[Tensor, Tensor]:
        return key, value


class TemperedAttention(Replaced):
    """In layers without rotation, queries are scaled by a temperature that depends on their positions."""

    def forward(self, hidden_states: Tensor, *arguments: Any, **kwargs: Any) -> Any:
        paged: PagedInputs | Recorded | None = kwargs.get("paged")
        if isinstance(paged, PagedInputs):
            kwargs[CACHE] = _KeepsNothing(paged.positions.flatten())
        return super().forward(hidden_states, *arguments, **kwargs)


class RealRotary(Replaced):
    """Cosines and sines (1, B x Q, D / 2, 2) instead of complex numbers."""

    inv_freq: Tensor
    attention_scaling: float

    def prepare(self, name: str, model: PreTrainedModel) -> None:
        _rotate_real_numbers(own_module(self))

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        if self.model_config._attn_implementation not in (KERNEL, PAGED):
            factors: Tensor = super().forward(x, position_ids)
            return factors
        angles = position_ids[..., None].float() * self.inv_freq.float()
        return torch.stack([angles.cos(), angles.sin()], -1) * self.attention_scaling


class Mixture(Replaced):
    """Each expert computes only the tokens that have chosen it."""

    top_k: int
    router: nn.Linear
    experts: nn.Module
    shared_expert: nn.Module

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        if not computes_by_kernel(self.model_config):
            output: tuple[Tensor, Tensor] = super().forward(hidden_states)
            return output
        x = hidden_states.flatten(0, -2)
        logits = F.linear(x, self.router.weight)
        best, chosen = torch.topk(logits, self.top_k, dim=1)
        scores = best.float().sigmoid().to(x.dtype)
        inputs = (x.unsqueeze(1) * scores.unsqueeze(-1)).flatten(0, 1)
        gate, up = expert_product(self.experts, "gate_up_proj", inputs, chosen.flatten()).chunk(2, -1)
        routed = expert_product(self.experts, "down_proj", up * self.experts.act_fn(gate), chosen.flatten())  # type: ignore[operator]
        summed = routed.reshape(*chosen.shape, -1).sum(1)
        return self.shared_expert(x) + summed, logits


def _rotate_real_numbers(module: Any) -> None:
    """Have transformers' module rotate by cosines and sines too."""
    theirs: Callable[..., Any] = module.apply_rotary_emb
    if hasattr(theirs, "of_complex"):
        return

    @wraps(theirs)
    def apply_rotary_emb(query: Tensor, key: Tensor, factors: Tensor) -> Any:
        if factors.is_complex():
            return theirs(query, key, factors)
        return tuple(_rotated(one, factors[:, :, None]) for one in (query, key))

    apply_rotary_emb.of_complex = theirs  # type: ignore[attr-defined]
    module.apply_rotary_emb = apply_rotary_emb


def _rotated(heads: Tensor, factors: Tensor) -> Tensor:
    pairs = heads.float().reshape(*heads.shape[:-1], -1, 2)
    (first, second), (cos, sin) = ((one[..., 0], one[..., 1]) for one in (pairs, factors))
    return torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(3).type_as(heads)


FAMILIES = (
    Family(
        "llama4_text",
        replaced={
            "Llama4TextAttention": TemperedAttention,
            "Llama4TextRotaryEmbedding": RealRotary,
            "Llama4TextMoe": Mixture,
        },
    ),
)
