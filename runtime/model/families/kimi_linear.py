"""Kimi Linear: Kimi's delta attention between layers of latent attention."""

from runtime.model.families.family import Family

FAMILIES = (Family("kimi_linear", layer_types={"linear_attention"}),)
