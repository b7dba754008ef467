"""Jamba: Mamba's mixers, with norms of what the scan reads, between layers of attention."""

from runtime.model.families.family import Family

FAMILIES = (Family("jamba", layer_types={"linear_attention"}),)
