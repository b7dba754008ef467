"""Jamba: Mamba's mixers, whose scan inputs have norms, between layers of attention."""

from runtime.model.families.family import Family
from runtime.model.mixers import MambaMixer
from runtime.model.replaced import Layer


class JambaLayer(Layer):
    mixing = "mamba"


FAMILIES = (
    Family(
        "jamba",
        replaced={"JambaMambaDecoderLayer": JambaLayer, "JambaMambaMixer": MambaMixer},
        layer_types={"linear_attention"},
    ),
)
