"""Step 3.5."""

from runtime.model.families.family import Family

FAMILIES = (
    Family(
        "step3p5",
        causal_class="Step3p7TextModel",
        experts_class="Step3p7Experts",
        weights_as="step3p7",
        is_published_alone=True,
        reads={"attention_other_setting", "max_seq_len", "moe_layers_enum", "partial_rotary_factors"},
        always={
            "att_impl_type": "GQA",
            "use_qk_norm": True,
            "zero_centered": True,
            "use_head_wise_attn_gate": True,
            "yarn_only_types": ["full_attention"],
            "use_moe": True,
            "moe_layer_offset": 0,
            "moe_every_n_layer": 1,
            "moe_router_activation": "sigmoid",
            "use_moe_router_bias": True,
            "norm_expert_weight": True,
            "need_fp32_gate": True,
        },
    ),
)
