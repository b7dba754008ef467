"""Qwen 2 and 3, and the language models inside Qwen's vision and audio models."""

from runtime.model.families.family import Family
from runtime.model.replaced import EqualPositions

FAMILIES = (
    Family("qwen2", also_called={"mimo"}),
    *(Family(kind, same_on_text={"model_type": "qwen2"}) for kind in ("qwen2_vl_text", "qwen2_5_vl_text")),
    Family(
        "qwen2_5_omni_text",
        causal_class="Qwen2_5OmniThinkerTextModel",
        reads={"enable_talker", "position_id_per_seconds", "seconds_per_chunk"},
    ),
    Family("qwen3_vl_text", same_on_text={"model_type": "qwen3"}),
    Family("qwen3_vl_moe_text", same_on_text={"model_type": "qwen3_moe", "norm_topk_prob": True}),
    Family(
        "qwen3_omni_moe_text",
        replaced={"Qwen3OmniMoeThinkerTextRotaryEmbedding": EqualPositions},
        causal_class="Qwen3OmniMoeThinkerTextModel",
        reads={"interleaved", "position_id_per_seconds", "seconds_per_chunk", "shared_expert_intermediate_size"},
        always={"use_qk_norm": True},
    ),
)
