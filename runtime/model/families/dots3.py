"""dots 3 note, which chooses keys by an index."""

from runtime.model.families.family import Family
from runtime.model.replaced import Indexed, Indexer

FAMILIES = (
    Family(
        "dots3_note_text",
        replaced={"Dots3NoteTextIndexer": Indexer, "Dots3NoteTextAttention": Indexed},
        weights_as="qwen2_moe",
    ),
)
