"""Suffix matching drafts what a brute-force search of the text finds, and what its docstring says."""

import random

import pytest
from calls import num_calls
from drafting import propose, start
from hypothesis import given, settings
from hypothesis import strategies as st
from occurrences import followers, longest_match, most_frequent
from strength import examples

from runtime.core.request import Draft, Request, Sequence
from runtime.drafters.lookup import MAX_OCCURRENCES
from runtime.drafters.ngram_pool import NgramPool
from runtime.drafters.suffix import SuffixLookup

PUBLIC_MARGIN = 2
LONGEST_MATCH = 31


def brute_force(
    text: list[int],
    draft_len: int,
    longest: int,
    public: NgramPool | None,
    drafted: list[int] = [],  # noqa: B006
) -> list[int]:
    draft: list[int] = []
    while len(draft) < draft_len:
        tail = text + drafted + draft
        n, found = followers(text, tail, longest + len(draft))
        earlier = public.find(tail) if public else None
        if earlier is not None and (n == 0 or earlier[0] > n + PUBLIC_MARGIN):
            draft.append(earlier[1])
        elif n:
            draft.append(most_frequent(found))
        else:
            break
    return draft


runs = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8)


@given(
    runs=runs,
    earlier=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=9), max_size=3),
    max_draft_len=st.integers(0, 8),
    longest=st.sampled_from([1, 2, 4, LONGEST_MATCH]),
    max_new_tokens=st.integers(1, 40),
)
@settings(max_examples=examples(1000), deadline=None, derandomize=True)
def test_draft_equals_brute_force(
    runs: list[list[int]], earlier: list[list[int]], max_draft_len: int, longest: int, max_new_tokens: int
) -> None:
    """Private where there is no earlier text; grown by runs of random length, as accepted drafts make it grow."""
    pool = NgramPool() if earlier else None
    for tokens in earlier:
        assert pool is not None
        pool.add(Sequence(Request(9, (), 10), tokens))
    drafter, sequence = SuffixLookup(pool=pool), start(runs[0], max_new_tokens)
    drafter._longest_match = longest
    for run in [[], *runs[1:]]:
        sequence.tokens += run
        draft_len = max(min(max_draft_len, sequence.num_remaining - 1), 0)
        expected = brute_force(sequence.tokens, draft_len, longest, pool)
        (draft,) = drafter.propose([sequence], max_draft_len)
        assert draft.tokens == expected
        if pool is None and expected:
            assert draft.match_len == min(longest_match(sequence.tokens), longest)
        # As if these came next: what follows them is looked for in what is known, and nothing is learned.
        drafted = earlier[0] if earlier else run[::-1]
        ahead = drafter.look_ahead(sequence, drafted, draft_len)
        assert ahead.tokens == brute_force(sequence.tokens, draft_len, longest, pool, drafted)
        assert propose(drafter, sequence, max_draft_len) == expected


def test_tokens_that_came_since_it_was_asked_are_looked_at_too() -> None:
    """Resting, an `AdaptiveDrafter` does not ask. 4 follows 1 2 3; what follows 3 most often is 5."""
    drafter, sequence = SuffixLookup(), start([1, 2, 3, 4, 9, 3, 5, 8, 3, 5, 0, 1])
    propose(drafter, sequence)
    sequence.tokens.append(2)
    assert drafter.look_ahead(sequence, [3], 1) == Draft([4], match_len=3)


def test_of_many_occurrences_the_last_count() -> None:
    """5 follows most of them, 6 most of the last ones, and nothing else repeats."""
    texts = [[1, 5, 100 + i] for i in range(MAX_OCCURRENCES)] + [[1, 6, 500 + i] for i in range(MAX_OCCURRENCES // 2)]
    text = [token for one in texts for token in one]
    assert propose(SuffixLookup(), start([*text, 1]), 1) == [6]
    assert propose(SuffixLookup(), start([*text[:-3], 1]), 1) == [5]


def test_ids_of_any_size_are_looked_up() -> None:
    """There are 1,114,112 characters, and surrogates among them."""
    for token in (0, 0xD800, 0x10FFFF, 0x110000, 2**40):
        assert propose(SuffixLookup(), start([token, 5, token]), 1) == [5]


def calls_of_steps(tokens: list[int], num_steps: int = 200) -> int:
    """Calls that the last tokens make the drafter do, one step for each."""
    drafter, sequence = SuffixLookup(), start(tokens[:-num_steps], max_new_tokens=1000)
    propose(drafter, sequence)

    def steps() -> None:
        for token in tokens[-num_steps:]:
            sequence.tokens.append(token)
            drafter.propose([sequence], 10)

    return num_calls(steps)


@pytest.mark.parametrize("alphabet", [1, 20], ids=["one token", "twenty tokens"])
def test_a_step_searches_no_oftener_in_a_long_sequence(alphabet: int) -> None:
    """Forty times the text: about as many calls, of which some read it once."""
    rng = random.Random(0)
    tokens = [rng.randrange(alphabet) for _ in range(20_000)]
    short, long = calls_of_steps(tokens[:500]), calls_of_steps(tokens)
    assert 0 < long < 1.5 * short
    assert long / 200 < 300
