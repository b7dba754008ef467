"""The language model inside ERNIE 4.5's vision models."""

from runtime.model.families.family import Family

FAMILIES = (Family("ernie4_5_vl_moe_text", causal_class="Ernie4_5_VLMoeTextModel", weights_as="ernie4_5_vl_moe"),)
