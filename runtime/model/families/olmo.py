"""OLMo's hybrid of attention and a gated delta rule; and OLMoE."""

from runtime.model.families.family import Family
from runtime.model.mixers import DeltaNet

FAMILIES = (
    Family("olmo_hybrid", replaced={"OlmoHybridGatedDeltaNet": DeltaNet}, layer_types={"linear_attention"}),
    Family("olmoe", reads={"sliding_window"}),
)
