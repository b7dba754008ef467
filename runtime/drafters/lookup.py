"""What all lookups have in common: how long a draft may be, and where it ends early."""

from runtime.request import Sequence


def room(sequence: Sequence, max_draft_len: int) -> int:
    """Tokens a draft may have: the target adds a token of its own to whatever it accepts."""
    return max(min(max_draft_len, sequence.num_remaining - 1), 0)


def cut_at_end_id(tokens: list[int], end_ids: frozenset[int]) -> list[int]:
    """The tokens before the first end id. It need not be drafted: it comes as the bonus token at no cost."""
    for i, token in enumerate(tokens):
        if token in end_ids:
            return tokens[:i]
    return tokens
