"""LongCat-Flash, some of whose experts return their input unchanged."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from runtime.model.experts import chosen_product
from runtime.model.families.family import Family
from runtime.model.replaced import OwnForward


class LongcatExperts(OwnForward):
    """Experts with weights, followed by experts that return their input."""

    gate_up_proj: Tensor
    down_proj: Tensor
    num_routed_experts: int
    act_fn: Callable[[Tensor], Tensor]

    def computed(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        product, computes = partial(chosen_product, self.model_config), top_k_index < self.num_routed_experts
        chosen = top_k_index.where(computes, 0).flatten()
        gate, up = product(self.gate_up_proj[: self.num_routed_experts], hidden_states, chosen).chunk(2, -1)
        outputs: Tensor = product(self.down_proj, self.act_fn(gate) * up, chosen).view(*top_k_index.shape, -1)
        outputs = outputs.where(computes.unsqueeze(-1), hidden_states.unsqueeze(1))
        return (outputs * top_k_weights.unsqueeze(-1)).to(hidden_states.dtype).sum(1)


FAMILIES = (Family("longcat_flash", replaced={"LongcatFlashExperts": LongcatExperts}, reads={"router_bias"}),)
