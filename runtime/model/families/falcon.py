"""Falcon: attention of its own, and linear layers of its own."""

from runtime.model.families.family import Family, Refusal

FAMILIES = (
    Family(
        "falcon",
        hands_over=True,
        refusals=(
            Refusal(
                "alibi",
                (None, False),
                "transformers adds the bias of positions (`alibi`) once by its default attention and twice by its "
                "eager one, so that a right output is not known",
            ),
        ),
    ),
)
