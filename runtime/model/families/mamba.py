"""Mamba, Mamba 2 and Falcon-Mamba: every layer is a state-space mixer."""

from typing import Any

from torch import nn

from runtime.model.families.family import Family
from runtime.model.mixers import Mamba2, MambaMixer
from runtime.model.replaced import Layer, Replaced, handed, taken_from


class Block(Layer):
    mixing = "mixer"


class MambaModel(Replaced):
    """Model that passes the step's paged inputs on to its layers, and no mask, since a step has no padding. All layers
    get numbers in the dtype that the first layer gives to the embeddings.
    """

    backbone: nn.Module

    def forward(self, *arguments: Any, **kwargs: Any) -> Any:
        taken = taken_from(kwargs)
        if taken:
            embedded = self.backbone.embeddings(kwargs.pop("input_ids"))  # type: ignore[operator]
            kwargs["inputs_embeds"] = embedded.float() if self.model_config.residual_in_fp32 else embedded
            kwargs["attention_mask"] = None
        with handed(self.backbone.layers, taken):  # type: ignore[arg-type]
            return super().forward(*arguments, **kwargs)


FAMILIES = (
    Family(
        "mamba",
        layer_types={"linear_attention"},
        reads={"intermediate_size"},
        replaced={"MambaMixer": MambaMixer, "MambaBlock": Block, "MambaForCausalLM": MambaModel},
    ),
    Family(
        "mamba2",
        layer_types={"linear_attention"},
        reads={"intermediate_size"},
        always={"norm_before_gate": True, "rms_norm": True, "time_step_scale": 1.0},
        replaced={"Mamba2Mixer": Mamba2, "Mamba2Block": Block, "Mamba2ForCausalLM": MambaModel},
    ),
    Family(
        "falcon_mamba",
        layer_types={"linear_attention"},
        reads={"intermediate_size"},
        replaced={
            "FalconMambaMixer": MambaMixer,
            "FalconMambaBlock": Block,
            "FalconMambaForCausalLM": MambaModel,
        },
    ),
)
