"""DeepSeek V2 to V4, and DeepSeek-OCR 2."""

from runtime.model.families.family import Family
from runtime.model.replaced import Indexed, Indexer, RotaryOfPairs


class RealRotary(RotaryOfPairs):
    heads_dim = 1


FAMILIES = (
    Family("deepseek_v2", replaced={"DeepseekV2RotaryEmbedding": RealRotary}, ignores={"norm_topk_prob"}),
    Family("deepseek_v3", always={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}),
    Family(
        "deepseek_v32", replaced={"DeepseekV32Indexer": Indexer, "DeepseekV32Attention": Indexed}, ignores={"mlp_bias"}
    ),
    Family(
        "deepseek_v4",
        reads={"compress_rate_csa", "compress_rate_hca", "compress_ratios", "qk_rope_head_dim"},
        ignores={"attention_bias", "n_shared_experts", "norm_topk_prob"},
    ),
    Family("deepseek_ocr2_text", causal_class="DeepseekOcr2TextModel", weights_as="deepseek_ocr2"),
)
