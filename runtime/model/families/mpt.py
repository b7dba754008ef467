"""MPT: a logit loses with each token between query and key."""

from runtime.model.families.family import Family

FAMILIES = (
    Family(
        "mpt",
        hands_over=True,
        ignores={"embedding_fraction", "expansion_ratio", "learned_pos_emb", "logit_scale", "no_bias", "norm_type"},
        key_of_positions="max_seq_len",
    ),
)
