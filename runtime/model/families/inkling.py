"""Inkling."""

from runtime.model.families.family import Family

FAMILIES = (Family("inkling_text", ignores={"rms_norm_eps_moe_gate", "shared_expert_sink"}),)
