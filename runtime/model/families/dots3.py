"""dots 3 note: an index of keys."""

from runtime.model.families.family import Family

FAMILIES = (Family("dots3_note_text", weights_as="qwen2_moe"),)
