"""MPT: each token between query and key lowers the logit (ALiBi)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from runtime.model.families.family import Family
from runtime.model.replaced import Biased, OwnAttentionModel, own_module, replace_function, taken_from


class MptAttention(Biased):
    n_heads: int
    softmax_scale: float
    clip_qkv: float | None
    Wqkv: nn.Linear
    out_proj: nn.Linear

    def prepare(self, name: str, model: PreTrainedModel) -> None:
        super().prepare(name, model)
        replace_function(own_module(self), "create_causal_mask", _masking_anyway)

    def slopes_of_heads(self, device: torch.device) -> Tensor:
        of_last_two: Tensor = own_module(self).build_mpt_alibi_tensor(self.n_heads, 2, device=device)
        return -of_last_two[:, 0, 0]

    def forward(self, hidden_states: Tensor, *arguments: Any, **kwargs: Any) -> Any:
        if not (taken := taken_from(kwargs)):
            return super().forward(hidden_states, *arguments, **kwargs)
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        heads = [part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in mixed.chunk(3, dim=2)]
        mask = None if "paged" in taken else _added(kwargs.get("attention_mask"), mixed.dtype)
        return self.out_proj(self.attended(heads, mask, self.softmax_scale, taken)), None


def _masking_anyway(theirs: Callable[..., Tensor | None]) -> Callable[..., Tensor]:
    """A function that makes zeros where transformers' makes no mask: MPT's model converts its mask's dtype."""

    def create_causal_mask(**kwargs: Any) -> Tensor:
        mask, embedded = theirs(**kwargs), kwargs["inputs_embeds"]
        return embedded.new_zeros(1, 1, 1, 1) if mask is None else mask

    return create_causal_mask


def _added(hidden: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask as numbers to add to scores; MPT's mask is True for hidden keys."""
    return None if hidden is None else torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, -torch.inf)


FAMILIES = (
    Family(
        "mpt",
        replaced={"MptAttention": MptAttention, "MptForCausalLM": OwnAttentionModel},
        hands_over=True,
        ignores={"embedding_fraction", "expansion_ratio", "learned_pos_emb", "logit_scale", "no_bias", "norm_type"},
        key_of_positions="max_seq_len",
    ),
)
