"""MiniMax: layers of lightning attention between layers of softmax attention; and MiniMax M3."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from runtime.model.families.family import Family
from runtime.model.mixers import LayerStates, OwnMixer


class LightningAttention(OwnMixer):
    """Forward of `MiniMaxLightningAttention`: linear attention whose decay is a constant for each head.

    https://arxiv.org/abs/2405.17381
    """

    qkv_proj: nn.Linear
    out_proj: nn.Linear
    output_gate: nn.Linear
    norm: nn.Module
    act_fn: Callable[[Tensor], Tensor]
    num_attention_heads: int
    num_hidden_layers: int
    slopes: Tensor  # (H,) float32: in 16 bits a decay is off by more with every token
    head_dim: int

    def prepare(self, name: str, model: PreTrainedModel) -> None:
        super().prepare(name, model)
        self.register_buffer("slopes", self.slopes_of_heads(model.device), persistent=False)

    def slopes_of_heads(self, device: torch.device) -> Tensor:
        """Decay of each head, like `get_slope_rate`, whose decays a 16-bit model has rounded."""
        factor = 1 - self.layer_idx / (self.num_hidden_layers - 1 + 1e-5) + 1e-5
        exponents = torch.arange(self.num_attention_heads, device=device) + 1
        return 2.0 ** (-8 / self.num_attention_heads * exponents.float()) * factor

    def mixed(self, hidden_states: Tensor, states: LayerStates, **kwargs: Any) -> Any:
        mixed = self.act_fn(self.qkv_proj(hidden_states))
        mixed = mixed.view(*mixed.shape[:2], -1, 3 * self.head_dim)
        # The constant decays, made from the tokens' numbers so that a compiled step computes them for each token.
        own = mixed[..., 0].float()
        decay = torch.where(own > torch.inf, own, -self.slopes)
        parts = (*mixed.chunk(3, dim=-1), decay)
        attended = self.norm(states.attend(parts, 1.0, normalizes=False).flatten(2))
        return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * attended), None


FAMILIES = (
    Family("minimax", replaced={"MiniMaxLightningAttention": LightningAttention}, layer_types={"linear_attention"}),
    Family("minimax_m3_vl_text", weights_as="minimax_m3_vl", ignores={"rotary_dim"}),
)
