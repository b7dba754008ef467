"""DBRX: the weights of all experts are one matrix."""

from functools import partial
from typing import Any

from torch import Tensor

from runtime.model.experts import chosen_product
from runtime.model.families.family import Family
from runtime.model.replaced import OwnForward


class DbrxExperts(OwnForward):
    """Experts whose weights are stacked in one matrix, [experts x inner size, hidden size]."""

    mlp: Any
    num_experts: int

    def computed(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        gate, up, down = (
            weight.unflatten(0, (self.num_experts, -1)) for weight in (self.mlp.w1, self.mlp.v1, self.mlp.w2)
        )
        product, chosen = partial(chosen_product, self.model_config), top_k_index.flatten()
        x = hidden_states.flatten(0, 1)
        inner = self.mlp.activation_fn(product(gate, x, chosen)) * product(up, x, chosen)
        outputs = product(down.transpose(1, 2), inner, chosen).view(*top_k_index.shape, -1)
        summed: Tensor = (outputs * top_k_weights.unsqueeze(-1)).sum(1)
        return summed.view_as(hidden_states)


FAMILIES = (
    Family(
        "dbrx",
        replaced={"DbrxExperts": DbrxExperts},
        reads={"ffn_act_fn", "ffn_hidden_size", "rope_theta"},
        rope_theta_within="attn_config",
    ),
)
