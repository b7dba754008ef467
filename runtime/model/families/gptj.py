"""GPT-J, CodeGen, GPT-Neo and GPT-NeoX Japanese: attention in a method of their own."""

from runtime.model.families.family import Family

FAMILIES = (
    Family("gptj", hands_over=True, reads={"rotary"}, always={"scale_attn_weights": True}),
    Family("codegen", hands_over=True),
    Family("gpt_neo", hands_over=True, reads={"attention_layers"}),
    Family("gpt_neox", reads={"rotary_emb_base", "rotary_pct"}),
    Family("gpt_neox_japanese", hands_over=True, reads={"rotary_emb_base", "rotary_pct"}),
)
