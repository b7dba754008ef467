"""BLOOM: each token between query and key lowers the logit (ALiBi)."""

from typing import Any

import torch
from torch import Tensor, nn

from runtime.model.families.family import Family
from runtime.model.replaced import Biased, OwnAttentionModel, own_module, taken_from


class BloomAttention(Biased):
    num_heads: int
    inv_norm_factor: float
    query_key_value: nn.Linear
    dense: nn.Linear

    def slopes_of_heads(self, device: torch.device) -> Tensor:
        slopes: Tensor = own_module(self)._get_alibi_slopes(self.num_heads, device)
        return slopes

    def forward(
        self, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Any:
        if not (taken := taken_from(kwargs)):
            return super().forward(hidden_states, residual, alibi, attention_mask, **kwargs)
        heads = self._reshape(self.query_key_value(hidden_states))  # type: ignore[operator]
        return self.dense(self.attended(heads, attention_mask, self.inv_norm_factor, taken)) + residual, None


FAMILIES = (
    Family(
        "bloom",
        replaced={"BloomAttention": BloomAttention, "BloomForCausalLM": OwnAttentionModel},
        hands_over=True,
        always={
            "attention_softmax_in_fp32": True,
            "masked_softmax_fusion": True,
            "offset_alibi": 100,
            "skip_bias_add": True,
        },
    ),
)
