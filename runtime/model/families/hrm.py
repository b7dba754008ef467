"""HRM, in which a token passes each layer several times, each time with separate keys and values."""

from typing import Any

from torch import Tensor

from runtime.model.families.family import Family
from runtime.model.replaced import Replaced


class HrmAttention(Replaced):
    """Attention with separate keys and values for each pass of the layer."""

    layer_idx: int

    def forward(self, hidden_states: Tensor, *arguments: Any, cycle_offset: int = 0, **kwargs: Any) -> Any:
        own = self.layer_idx
        self.layer_idx = own + cycle_offset
        try:
            return super().forward(hidden_states, *arguments, **kwargs)
        finally:
            self.layer_idx = own


FAMILIES = (Family("hrm_text", replaced={"HrmTextAttention": HrmAttention}),)
