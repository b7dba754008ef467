"""StarCoder 2."""

from runtime.model.families.family import Family

FAMILIES = (Family("starcoder2", always={"mlp_type": "default"}),)
