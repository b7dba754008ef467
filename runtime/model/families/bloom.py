"""BLOOM: a logit loses with each token between query and key."""

from runtime.model.families.family import Family

FAMILIES = (
    Family(
        "bloom",
        hands_over=True,
        always={
            "attention_softmax_in_fp32": True,
            "masked_softmax_fusion": True,
            "offset_alibi": 100,
            "skip_bias_add": True,
        },
    ),
)
