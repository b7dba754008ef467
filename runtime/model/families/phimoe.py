"""PhiMoE, which keeps the first set of longrope factors and changes their scale."""

from runtime.model.families.family import Family

FAMILIES = (Family("phimoe", longrope_changes_scale_alone=True),)
