"""Kimi Linear: Kimi's delta attention between layers of latent attention."""

from runtime.model.families.family import Family
from runtime.model.mixers import KimiDelta

FAMILIES = (Family("kimi_linear", replaced={"KimiLinearDeltaAttention": KimiDelta}, layer_types={"linear_attention"}),)
