"""Language models inside vision and audio models that need only an output layer."""

from runtime.model.families.family import Family
from runtime.model.replaced import EqualPositions

FAMILIES = (
    Family(
        "cosmos3_edge_text",
        replaced={"Cosmos3EdgeTextRotaryEmbedding": EqualPositions},
        causal_class="Cosmos3EdgeTextModel",
    ),
    Family("granite4_vision_text", causal_class="Granite4VisionTextModel"),
    Family("granite_docling_text", causal_class="GraniteDoclingTextModel"),
    Family("molmo2_text", causal_class="Molmo2TextModel", weights_as="molmo2"),
    Family("emu3_text_model", causal_class="Emu3ForCausalLM"),
    Family("mllama_text_model", causal_class="MllamaForCausalLM", reads={"attention_heads", "cross_attention_layers"}),
    Family("muse_glimmer_text", causal_class="MuseGlimmerTextModel"),
    Family("muse_spark_text", causal_class="MuseSparkTextModel"),
    Family("paddleocr_vl_text", causal_class="PaddleOCRTextModel"),
)
