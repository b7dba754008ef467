"""Hunyuan V4, which chooses keys by an index, and the language model inside Hunyuan's vision models."""

from runtime.model.families.family import Family
from runtime.model.replaced import Indexed, Indexer

FAMILIES = (
    Family("hy_v4", replaced={"HYV4Indexer": Indexer, "HYV4Attention": Indexed}),
    Family("hunyuan_vl_text", causal_class="HunYuanVLTextModel", reads={"attention_heads", "cross_attention_layers"}),
)
