"""RecurrentGemma: Griffin's recurrent blocks between layers of local attention."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.model.families.family import Family
from runtime.model.mixers import LayerStates, OwnMixer


class GriffinBlock(OwnMixer):
    """Forward of `RecurrentGemmaRecurrentBlock`: a convolution, and the RG-LRU with gates by blocks."""

    linear_x: nn.Linear
    linear_y: nn.Linear
    linear_out: nn.Linear
    conv_1d: nn.Conv1d
    act_fn: Callable[[Tensor], Tensor]
    rg_lru: Any

    def mixed(self, hidden_states: Tensor, states: LayerStates, **kwargs: Any) -> Any:
        unit = self.rg_lru
        x = states.convolve(self.linear_x(hidden_states), self.conv_1d.weight.squeeze(1), self.conv_1d.bias)
        input_gate = _by_blocks(x, unit.input_gate_weight, unit.input_gate_bias).sigmoid()
        steps = _by_blocks(x, unit.recurrent_gate_weight, unit.recurrent_gate_bias).sigmoid().float()
        decay = -8.0 * F.softplus(unit.recurrent_param.float())
        position = kwargs["position_ids"].float().unsqueeze(-1)
        kept = torch.exp(2.0 * (steps * decay)) * position.clamp(max=1.0)  # 0 for inputs before the first token
        added = (x * input_gate).float() * torch.sqrt(1.0 + -kept)
        one = position * 0.0 + 1.0  # a channel has one number
        scanned = states.scan((added, steps, one, one), decay.unsqueeze(0)).to(x.dtype)
        return self.linear_out(scanned * self.act_fn(self.linear_y(hidden_states))), None


def _by_blocks(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Product of tokens [1, B x Q, C] with a matrix of H blocks [C / H, C / H] on its diagonal, 0 elsewhere."""
    parts = x.chunk(len(weight), dim=-1)
    return torch.cat([F.linear(part, weight[i].t(), bias[i]) for i, part in enumerate(parts)], dim=-1)


FAMILIES = (
    Family(
        "recurrent_gemma", replaced={"RecurrentGemmaRecurrentBlock": GriffinBlock}, layer_types={"linear_attention"}
    ),
)
