"""Zamba and Zamba 2: mixers, and one layer of attention whose weights several layers share."""

from runtime.model.families.family import Family

FAMILIES = (
    Family("zamba", layer_types={"hybrid", "linear_attention"}),
    Family(
        "zamba2",
        layer_types={"hybrid", "linear_attention"},
        reads={"attention_hidden_size", "hybrid_layer_ids", "mamba_headdim"},
    ),
)
