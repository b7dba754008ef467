"""MiniMax: layers of lightning attention between those of softmax attention; and MiniMax M3."""

from runtime.model.families.family import Family

FAMILIES = (
    Family("minimax", layer_types={"linear_attention"}),
    Family("minimax_m3_vl_text", weights_as="minimax_m3_vl", ignores={"rotary_dim"}),
)
