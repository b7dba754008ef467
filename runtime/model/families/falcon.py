"""Falcon, which has attention and linear layers of its own."""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from runtime.model.families.family import Family, Refusal
from runtime.model.replaced import Attends, OwnAttentionModel, own_module, taken_from


class FalconAttention(Attends):
    """Attention that computes keys and values once for the query heads that share them, in both architectures."""

    query_key_value: nn.Module
    dense: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inv_norm_factor: float
    multi_query: bool
    new_decoder_architecture: bool

    def forward(self, hidden_states: Tensor, alibi: None, attention_mask: Tensor | None, **kwargs: Any) -> Any:
        if not (taken := taken_from(kwargs)):
            return super().forward(hidden_states, alibi, attention_mask, **kwargs)
        own = self.new_decoder_architecture or self.multi_query
        fused = self.query_key_value(hidden_states).unflatten(-1, (self.num_kv_heads if own else self.num_heads, -1))
        parts = fused.unflatten(-1, (-1, self.head_dim)).permute(0, 2, 3, 1, 4)  # (1, Hk, H / Hk + 2, B x Q, D)
        query, key, value = parts[:, :, :-2].flatten(1, 2), parts[:, :, -2], parts[:, :, -1]
        query, key = own_module(self).apply_rotary_pos_emb(query, key, *kwargs["position_embeddings"])
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        output = attend(self, query, key, value, attention_mask, scaling=self.inv_norm_factor, **taken)[0]
        return self.dense(output.flatten(2)), None


FAMILIES = (
    Family(
        "falcon",
        linear_classes={"FalconLinear"},
        replaced={"FalconAttention": FalconAttention, "FalconForCausalLM": OwnAttentionModel},
        hands_over=True,
        refusals=(
            Refusal(
                "alibi",
                (None, False),
                "transformers adds the bias of positions (`alibi`) once by its default attention and twice by its "
                "eager one, so that a right output is not known",
            ),
        ),
    ),
)
