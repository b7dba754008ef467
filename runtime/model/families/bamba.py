"""Bamba, Granite 4 and Falcon-H1: Mamba 2's mixers between layers of attention, or beside them."""

from runtime.model.families.family import Family

FAMILIES = (
    *(Family(kind, layer_types={"linear_attention"}) for kind in ("bamba", "granitemoehybrid")),
    Family("falcon_h1", layer_types={"hybrid", "linear_attention"}),
)
