"""LFM 2 and 3: short convolutions between layers of attention."""

from typing import Any

from torch import Tensor, nn

from runtime.model.families.family import Family
from runtime.model.mixers import LayerStates, OwnMixer


class ShortConv(OwnMixer):
    """Forward of `Lfm2ShortConv` and similar modules."""

    in_proj: nn.Linear
    out_proj: nn.Linear
    conv: nn.Conv1d

    def mixed(self, hidden_states: Tensor, states: LayerStates, **kwargs: Any) -> Any:
        before, after, x = self.in_proj(hidden_states).chunk(3, dim=-1)
        return self.out_proj(after * states.convolve(before * x, self.conv.weight.squeeze(1), self.conv.bias))


FAMILIES = (
    Family(
        "lfm2",
        replaced={"Lfm2ShortConv": ShortConv},
        layer_types={"conv"},
        reads={"block_ff_dim", "num_heads", "tie_embedding"},
        always={"block_use_swiglu": True, "use_pos_enc": True},
    ),
    Family(
        "lfm2_moe",
        replaced={"Lfm2MoeShortConv": ShortConv},
        layer_types={"conv"},
        reads={"block_ff_dim", "num_heads", "tie_embedding"},
    ),
    Family("lfm3", replaced={"Lfm3ShortConv": ShortConv}, layer_types={"conv"}),
)
