"""Bamba, Granite 4 and Falcon-H1: Mamba 2's mixers between layers of attention, or beside attention in a layer."""

from runtime.model.families.family import Family
from runtime.model.mixers import Mamba2

FAMILIES = (
    Family("bamba", layer_types={"linear_attention"}, replaced={"BambaMixer": Mamba2}),
    Family("granitemoehybrid", layer_types={"linear_attention"}, replaced={"GraniteMoeHybridMambaLayer": Mamba2}),
    Family("falcon_h1", layer_types={"linear_attention", "hybrid"}, replaced={"FalconH1Mixer": Mamba2}),
)
