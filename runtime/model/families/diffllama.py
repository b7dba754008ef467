"""DiffLlama: a layer attends twice, and subtracts the second result."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from runtime.model.families.family import Family
from runtime.model.replaced import OwnForward, own_module


class DiffLlamaAttention(OwnForward):
    """Both halves of a layer's values have the same queries and keys, so they are computed as values twice as long."""

    head_dim: int
    scaling: float
    lambda_init: float
    groupnorm: nn.Module
    o_proj: nn.Linear

    def computed(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        query, key, value = (
            getattr(self, name)(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        query, key = own_module(self).apply_rotary_pos_emb(query, key, *kwargs.pop("position_embeddings"))
        value = torch.cat(value.chunk(2, 1), -1).repeat(1, 2, 1, 1)
        attend = ALL_ATTENTION_FUNCTIONS[self.model_config._attn_implementation]
        mask = kwargs.pop("attention_mask", None)
        first, second = attend(self, query, key, value, mask, scaling=self.scaling, **kwargs)[0].chunk(2, 2)
        one, two = (self._weight(number).to(query.dtype) for number in "12")
        output = (1 - self.lambda_init) * self.groupnorm(first - (one - two + self.lambda_init) * second)
        return self.o_proj(output.flatten(2)), None

    def _weight(self, number: str) -> Tensor:
        product: Tensor = getattr(self, f"lambda_q{number}") * getattr(self, f"lambda_k{number}")
        return product.sum(-1, dtype=torch.float32).exp()


FAMILIES = (Family("diffllama", replaced={"DiffLlamaAttention": DiffLlamaAttention}),)
