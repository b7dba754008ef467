"""BioGPT."""

from runtime.model.families.family import Family

FAMILIES = (Family("biogpt", hands_over=True, ignores={"layer_norm_eps"}),)
