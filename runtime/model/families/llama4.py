"""Llama 4: queries with a temperature, rotation by complex numbers, and experts that each compute every token."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.model.attention import CACHE, PagedInputs, Recorded
from runtime.model.experts import computes_by_kernel, expert_product
from runtime.model.families.family import Family
from runtime.model.replaced import Replaced, RotaryOfPairs


class _Positions:
    """Stand-in for the number of cached tokens: adding transformers' `arange(Q)` gives the rows' positions."""

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
    """Attention in which queries without rotation are multiplied by a temperature, by their positions."""

    def forward(self, hidden_states: Tensor, *arguments: Any, **kwargs: Any) -> Any:
        paged: PagedInputs | Recorded | None = kwargs.get("paged")
        if isinstance(paged, PagedInputs):
            kwargs[CACHE] = _KeepsNothing(paged.positions.flatten())
        return super().forward(hidden_states, *arguments, **kwargs)


class RealRotary(RotaryOfPairs):
    heads_dim = 2


class Mixture(Replaced):
    """Mixture in which each expert computes only the tokens that have chosen it."""

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
