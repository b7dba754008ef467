"""The public pool is the statistics of its last texts, whatever went through it, and stays within its bound."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strength import examples

from runtime.core.request import Request, Sequence
from runtime.drafters.ngram import NgramLookup
from runtime.drafters.ngram_pool import NgramPool
from runtime.drafters.suffix import SuffixLookup

Text = tuple[list[int], list[int]]
"""Prompt and output."""


def sequence_of(text: Text, request_id: int = 0, max_new_tokens: int = 100) -> Sequence:
    prompt, output = text
    return Sequence(Request(request_id, tuple(prompt), max_new_tokens), prompt + output)


def kept(texts: list[Text], max_tokens: int) -> list[Text]:
    """The last texts that fit together; of one too long for the pool the end, what is before it counts as prompt."""
    cut = []
    for prompt, output in texts:
        too_many = max(len(output) - max_tokens, 0)
        cut.append((prompt + output[:too_many], output[too_many:]))
    while sum(len(output) for _, output in cut) > max_tokens:
        cut = cut[1:]
    return cut


def brute_force(texts: list[Text], size: int, tail: list[int]) -> tuple[int, int] | None:
    """The longest pattern that has a follower in an output; its most frequent one, the latest of equals."""
    for n in range(min(size, len(tail)), 0, -1):
        followers = [
            tokens[end]
            for prompt, output in texts
            for tokens in [prompt + output]
            for end in range(max(len(prompt), n), len(tokens))
            if tokens[end - n : end] == tail[-n:]
        ]
        if followers:
            return n, max(reversed(followers), key=followers.count)
    return None


tokens = st.lists(st.integers(0, 2), max_size=8)


@given(
    texts=st.lists(st.tuples(tokens, tokens), max_size=12),
    max_tokens=st.integers(1, 30),
    size=st.integers(1, 4),
    tail=tokens,
)
@settings(max_examples=examples(1000), deadline=None, derandomize=True)
def test_pool_is_the_statistics_of_its_last_texts(
    texts: list[Text], max_tokens: int, size: int, tail: list[int]
) -> None:
    pool = NgramPool(max_tokens, size)
    for i, text in enumerate(texts):
        pool.add(sequence_of(text))
        assert pool.num_tokens == sum(len(output) for _, output in kept(texts[: i + 1], max_tokens))
    assert pool.find(tail) == brute_force(kept(texts, max_tokens), size, tail)
    fresh = NgramPool(max_tokens, size)
    for text in kept(texts, max_tokens):
        fresh.add(sequence_of(text))
    assert pool._followers == fresh._followers


@pytest.mark.parametrize(
    "make",
    [lambda pool: NgramLookup(2, pool=pool), lambda pool: SuffixLookup(pool=pool)],
    ids=["n-gram", "suffix"],
)
def test_requests_learn_from_finished_requests_only(make: Any) -> None:
    drafter = make(NgramPool())
    first, second = sequence_of(([1], [7, 8]), 0), sequence_of(([5], [7]), 1)
    assert [draft.tokens for draft in drafter.propose([first, second], 3)] == [[], []]
    first.tokens.append(9)  # the tokens of a last step come after the last proposal
    drafter.forget(0)
    (draft,) = drafter.propose([second], 3)
    assert draft.tokens == [8, 9]
    drafter.forget(0)
    assert drafter.pool.num_tokens == 3
