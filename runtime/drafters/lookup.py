"""What all lookups have in common: where a draft ends early."""


def cut_at_end_id(tokens: list[int], end_ids: frozenset[int]) -> list[int]:
    """The tokens before the first end id. It need not be drafted: it comes as the bonus token at no cost."""
    for i, token in enumerate(tokens):
        if token in end_ids:
            return tokens[:i]
    return tokens
