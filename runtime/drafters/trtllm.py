"""TensorRT-LLM's flags of leader mode (V2) that drafters share, and default draft lengths.

The flags are spelled as in its quickstart_advanced.py. A flag that only one drafter has is in that drafter's spec.
"""

from runtime.checkpoint.config import MAX_DRAFT_LEN
from runtime.drafters.spec import LeaderFlag

DRAFT_LEN = 4
"""TensorRT-LLM's default."""
LONGEST_LOOKUP = 10
LONGEST_OF_BLOCKS = 7
"""Draft length of DSpark's published heads, and of DFlash heads with a block of 8."""
LONGEST_OF_PARD = 8
"""Draft length that parallel draft models are trained for (arXiv 2504.18583)."""

MAX_LEN_FLAG = LeaderFlag(
    "spec_decode_max_draft_len",
    "Most tokens in a draft.",
    shown=f"{DRAFT_LEN}; {LONGEST_OF_BLOCKS} for blocks; {LONGEST_OF_PARD} for parallel draft models; "
    f"{LONGEST_LOOKUP} for lookups, unless lengths are fixed",
    at_most=MAX_DRAFT_LEN,
)
NGRAM_SIZE_FLAG = LeaderFlag("max_matching_ngram_size", "Longest n-gram to look up.")
DRAFT_MODEL_FLAG = LeaderFlag("draft_model_dir", "The draft model, as for `--model-dir`, or a trained head.")
