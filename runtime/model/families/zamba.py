"""Zamba and Zamba 2: mixers, and a layer of attention whose weights several layers share."""

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.model.families.family import Family
from runtime.model.mixers import Mamba2, MambaMixer
from runtime.model.replaced import NumberedLayer


class ZambaMixer(MambaMixer):
    """Forward of `ZambaMambaMixer`, in which each head has its own scan, keys and queries."""

    x_proj_weight: Tensor  # (heads, rank + 2 N, C / heads)
    dt_proj_weight: Tensor  # (heads, C / heads, rank)
    dt_proj_bias: Tensor

    def _divided(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        pairs = projected.view(*projected.shape[:-1], -1, 2)
        return pairs[..., 0], pairs[..., 1]

    def _read(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        steps, keys, queries = [], [], []
        for i, part in enumerate(x.chunk(len(self.x_proj_weight), dim=-1)):
            step, key, query = torch.split(F.linear(part, self.x_proj_weight[i]), self._sizes(), dim=-1)
            steps.append(F.linear(step, self.dt_proj_weight[i], self.dt_proj_bias[i]))
            keys.append(key)
            queries.append(query)
        return torch.cat(steps, -1), torch.cat(keys, -1), torch.cat(queries, -1)


FAMILIES = (
    Family(
        "zamba",
        replaced={"ZambaMambaMixer": ZambaMixer, "ZambaAttention": NumberedLayer},
        layer_types={"hybrid", "linear_attention"},
    ),
    Family(
        "zamba2",
        replaced={"Zamba2MambaMixer": Mamba2, "Zamba2Attention": NumberedLayer},
        layer_types={"hybrid", "linear_attention"},
        reads={"attention_hidden_size", "hybrid_layer_ids", "mamba_headdim"},
    ),
)
