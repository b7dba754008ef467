"""JetMoE, which has experts in its feed-forward layers and for the queries of its attention."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from runtime.model.experts import chosen_product
from runtime.model.families.family import Family
from runtime.model.replaced import OwnForward, own_module


class JetMoe(OwnForward):
    """Linear layers of which a router chooses some for each token: in the feed-forward layer, and for the queries."""

    input_linear: Any  # of weights (E, outputs, inputs)
    output_linear: Any
    router: Any
    activation: Callable[[Tensor], Tensor]
    top_k: int
    bias: Tensor

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Numbers and weights of the chosen layers, [tokens, k], and the router's logits, from inputs [tokens, C]."""
        logits = self.router.layer(x).float()
        best, chosen = logits.topk(self.router.top_k, dim=1)
        return chosen, best.softmax(1).type_as(x), logits

    def _chosen(self, linear: Any, x: Tensor, chosen: Tensor) -> Tensor:
        return chosen_product(self.model_config, linear.weight, x, chosen.flatten())

    def _summed(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum [1, tokens, C] of the chosen layers' outputs; x is [tokens x k, inner size]."""
        outputs = self._chosen(self.output_linear, x, chosen) * weights.reshape(-1, 1)
        return (outputs.view(*chosen.shape, -1).sum(1) + self.bias)[None]

    def computed(self, layer_input: Tensor) -> Tensor:
        x = layer_input.flatten(0, 1)
        chosen, weights, _ = self._route(x)
        first, second = self._chosen(self.input_linear, x, chosen).chunk(2, -1)
        return self._summed(self.activation(first) * second, chosen, weights)


class JetMoeAttention(OwnForward):
    """Attention whose K/V heads are not repeated: the query heads of each, one for each expert, lie side by side."""

    experts: Any
    kv_proj: nn.Linear
    num_key_value_heads: int
    top_k: int
    scaling: float

    def computed(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        x, cos_and_sin = hidden_states.flatten(0, 1), kwargs.pop("position_embeddings")
        chosen, weights, logits = self.experts._route(x)
        queries = self.experts._chosen(self.experts.input_linear, x, chosen)  # (S x k, Hk x D)
        query = queries.view(-1, self.top_k, self.num_key_value_heads, queries.shape[-1] // self.num_key_value_heads)
        query = query.permute(2, 1, 0, 3).flatten(0, 1)[None]
        heads = self.kv_proj(hidden_states).unflatten(-1, (2 * self.num_key_value_heads, -1)).transpose(1, 2)
        key, value = heads.chunk(2, 1)
        query, key = own_module(self).apply_rotary_pos_emb(query, key, *cos_and_sin)
        attend = ALL_ATTENTION_FUNCTIONS[self.model_config._attn_implementation]
        mask = kwargs.pop("attention_mask", None)
        output = attend(self, query, key, value, mask, scaling=self.scaling, **kwargs)[0]
        inner = output[0].unflatten(1, (-1, self.top_k)).transpose(1, 2).flatten(2).flatten(0, 1)
        return self.experts._summed(inner, chosen, weights), None, logits


FAMILIES = (Family("jetmoe", replaced={"JetMoeMoE": JetMoe, "JetMoeMoA": JetMoe, "JetMoeAttention": JetMoeAttention}),)
