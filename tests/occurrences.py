"""Places of patterns in a text, by brute force."""


def ends_of(text: list[int], pattern: list[int]) -> list[int]:
    n = len(pattern)
    return [end for end in range(n, len(text) + 1) if text[end - n : end] == pattern]


def longest_match(text: list[int]) -> int:
    return max((n for n in range(1, len(text)) if len(ends_of(text, text[-n:])) > 1), default=0)


def followers(text: list[int], tail: list[int], max_len: int) -> tuple[int, list[int]]:
    """The longest end of `tail` that has followers in `text`: its length, and they in order."""
    for n in range(min(max_len, len(tail)), 0, -1):
        found = [text[end] for end in ends_of(text, tail[-n:]) if end < len(text)]
        if found:
            return n, found
    return 0, []


def most_frequent(found: list[int]) -> int:
    return max(reversed(found), key=found.count)
