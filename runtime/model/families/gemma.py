"""Gemma 2 to 4: windows, logit caps, and ropes by type of layer."""

from statistics import NormalDist

import torch
from torch import Tensor

from runtime.model.families.family import Family
from runtime.model.replaced import Replaced, attends_by_ours


class SparseLayer(Replaced):
    """A feed-forward layer that keeps only the gates far enough above a token's mean, and makes the others 0."""

    activation_sparsity: float

    def _gaussian_topk(self, inputs: Tensor) -> Tensor:
        if not attends_by_ours(self.model_config):
            kept: Tensor = super()._gaussian_topk(inputs)  # type: ignore[misc]
            return kept
        wide = inputs.float()
        mean = wide.mean(-1, keepdim=True)
        deviation = (wide - mean).square().mean(-1, keepdim=True).sqrt()
        factor = torch.full((), NormalDist().inv_cdf(self.activation_sparsity), dtype=inputs.dtype)
        return torch.relu(inputs - (mean.type_as(inputs) + deviation.type_as(inputs) * factor))


FAMILIES = (
    Family("gemma2", always={"hidden_act": "gelu_pytorch_tanh"}),
    Family(
        "gemma3_text",
        reads={"rope_local_base_freq", "sliding_window_pattern"},
        always={"hidden_act": "gelu_pytorch_tanh"},
    ),
    Family(
        "gemma3n_text",
        replaced={"Gemma3nTextMLP": SparseLayer},
        reads={"rope_local_base_freq", "sliding_window_pattern"},
    ),
    Family("gemma4_text", reads={"audio_config", "global_head_dim", "num_global_key_value_heads"}),
    Family(
        "gemma4_unified_text",
        reads={"audio_config", "global_head_dim", "num_global_key_value_heads"},
        always={"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 262144},
    ),
)
