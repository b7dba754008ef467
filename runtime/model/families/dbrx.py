"""DBRX: experts whose weights are one matrix."""

from runtime.model.families.family import Family

FAMILIES = (Family("dbrx", reads={"ffn_act_fn", "ffn_hidden_size", "rope_theta"}, rope_theta_within="attn_config"),)
