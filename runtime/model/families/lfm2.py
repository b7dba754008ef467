"""LFM 2 and 3: short convolutions between layers of attention."""

from runtime.model.families.family import Family

FAMILIES = (
    Family(
        "lfm2",
        layer_types={"conv"},
        reads={"block_ff_dim", "num_heads", "tie_embedding"},
        always={"block_use_swiglu": True, "use_pos_enc": True},
    ),
    Family("lfm2_moe", layer_types={"conv"}, reads={"block_ff_dim", "num_heads", "tie_embedding"}),
    Family("lfm3", layer_types={"conv"}),
)
