"""GLM's models that choose keys by an index, and the language models inside GLM's vision models."""

from runtime.model.families.family import Family
from runtime.model.mixers import KimiDelta
from runtime.model.replaced import Indexed, Indexer

FAMILIES = (
    Family("glm_moe_dsa", replaced={"GlmMoeDsaIndexer": Indexer, "GlmMoeDsaAttention": Indexed}, ignores={"mlp_bias"}),
    Family(
        "glm5_next_text",
        replaced={
            "Glm5NextTextIndexer": Indexer,
            "Glm5NextTextAttention": Indexed,
            "Glm5NextTextLinearAttention": KimiDelta,
        },
        causal_class="Glm5NextTextModel",
        layer_types={"linear_attention"},
    ),
    Family("glm4v_text", causal_class="Glm4vTextModel", reads={"attention_bias"}),
    Family("glm4v_moe_text", causal_class="Glm4vMoeTextModel", weights_as="glm4v_moe"),
    Family("glm_ocr_text", causal_class="GlmOcrTextModel", reads={"attention_bias"}),
)
