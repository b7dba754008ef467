"""Nemotron, and Nemotron-H with Mamba 2's mixers."""

from runtime.model.families.family import Family
from runtime.model.mixers import Mamba2
from runtime.model.replaced import Layer

FAMILIES = (
    Family("nemotron", replaced={"NemotronDecoderLayer": Layer}, hands_over=True),
    Family(
        "nemotron_h",
        replaced={"NemotronHMamba2Mixer": Mamba2},
        layer_types={"linear_attention", "mlp", "moe"},
        reads={
            "mamba_chunk_size",
            "mamba_conv_bias",
            "mamba_d_conv",
            "mamba_dt_init_floor",
            "mamba_dt_limit",
            "mamba_dt_max",
            "mamba_dt_min",
            "mamba_expand",
            "mamba_n_groups",
            "partial_rotary_factor",
            "rope_theta",
        },
        ignores={"attention_bias", "mamba_proj_bias", "n_shared_experts"},
    ),
)
