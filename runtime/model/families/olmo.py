"""OLMo's hybrid of attention and a gated delta rule, and OLMoE."""

from runtime.model.families.family import Family

FAMILIES = (
    Family("olmo_hybrid", layer_types={"linear_attention"}),
    Family("olmoe", reads={"sliding_window"}),
)
