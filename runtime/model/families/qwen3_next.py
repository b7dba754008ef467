"""Qwen3-Next, Qwen 3.5 and their like: three layers of a gated delta rule, then one of attention."""

from runtime.model.families.family import Family

FAMILIES = (
    Family("qwen3_next", layer_types={"linear_attention"}, reads={"full_attention_interval"}),
    *(
        Family(
            kind, layer_types={"linear_attention"}, reads={"full_attention_interval"}, always={"attn_output_gate": True}
        )
        for kind in ("qwen3_5_text", "qwen3_5_moe_text")
    ),
    Family("qwen4_exp_text", reads={"full_attention_interval"}, ignores={"split_ngram_parts"}),
)
