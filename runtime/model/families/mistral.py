"""Ministral 3, Mistral 4 and Mistral Large 4."""

from runtime.model.families.family import Family
from runtime.model.replaced import Indexed, Indexer

FAMILIES = (
    Family("ministral3", reads={"llama_4_scaling_beta"}),
    Family("mistral4", causal_class="Mistral4ForCausalLM", reads={"llama_4_scaling_beta"}),
    Family(
        "mistral_large4_text",
        replaced={"MistralLarge4TextIndexer": Indexer, "MistralLarge4TextAttention": Indexed},
        causal_class="MistralLarge4TextModel",
    ),
)
