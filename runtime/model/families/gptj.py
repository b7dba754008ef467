"""GPT-J, CodeGen, GPT-Neo and GPT-NeoX Japanese, which compute attention in a method of their own."""

from runtime.model.families.family import Family
from runtime.model.replaced import OwnAttention, OwnAttentionModel

FAMILIES = (
    Family(
        "gptj",
        replaced={"GPTJAttention": OwnAttention, "GPTJForCausalLM": OwnAttentionModel},
        hands_over=True,
        reads={"rotary"},
        always={"scale_attn_weights": True},
    ),
    Family(
        "codegen", replaced={"CodeGenAttention": OwnAttention, "CodeGenForCausalLM": OwnAttentionModel}, hands_over=True
    ),
    Family(
        "gpt_neo",
        replaced={"GPTNeoSelfAttention": OwnAttention, "GPTNeoForCausalLM": OwnAttentionModel},
        hands_over=True,
        reads={"attention_layers"},
    ),
    Family("gpt_neox", reads={"rotary_emb_base", "rotary_pct"}),
    Family(
        "gpt_neox_japanese",
        replaced={"GPTNeoXJapaneseAttention": OwnAttention, "GPTNeoXJapaneseForCausalLM": OwnAttentionModel},
        hands_over=True,
        reads={"rotary_emb_base", "rotary_pct"},
    ),
)
