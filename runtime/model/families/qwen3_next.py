"""Qwen3-Next, Qwen 3.5 and similar models: three layers of a gated delta rule, then a layer of attention."""

from runtime.model.families.family import Family
from runtime.model.mixers import DeltaNet
from runtime.model.replaced import EqualPositions

FAMILIES = (
    Family(
        "qwen3_next",
        layer_types={"linear_attention"},
        reads={"full_attention_interval"},
        replaced={"Qwen3NextGatedDeltaNet": DeltaNet},
    ),
    *(
        Family(
            kind,
            layer_types={"linear_attention"},
            reads={"full_attention_interval"},
            always={"attn_output_gate": True},
            replaced={f"{name}GatedDeltaNet": DeltaNet, f"{name}TextRotaryEmbedding": EqualPositions},
        )
        for kind, name in (("qwen3_5_text", "Qwen3_5"), ("qwen3_5_moe_text", "Qwen3_5Moe"))
    ),
    Family("qwen4_exp_text", reads={"full_attention_interval"}, ignores={"split_ngram_parts"}),
)
