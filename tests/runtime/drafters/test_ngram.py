"""The n-gram drafter proposes what a brute-force search of the sequence finds."""

import pytest
from calls import num_calls
from drafting import propose, start
from hypothesis import given, settings
from hypothesis import strategies as st
from strength import examples

from runtime.core.request import Request, Sequence
from runtime.drafters.lookup import MAX_OCCURRENCES
from runtime.drafters.ngram import NgramLookup
from runtime.drafters.ngram_pool import NgramPool
from runtime.drafters.spec import NgramRanking

RANKINGS: list[NgramRanking] = ["oldest", "leftmost", "recent", "frequent"]


def choose(tokens: list[int], ends: list[int], ranking: NgramRanking) -> int:
    """Place that `ranking` means, of those where a pattern ended before a follower, in order."""
    if ranking == "frequent":
        ends = ends[-MAX_OCCURRENCES:]
        found = [tokens[end] for end in ends]
        best = max(reversed(found), key=found.count)
        ends = [end for end in ends if tokens[end] == best]
    return ends[0] if ranking in ("oldest", "leftmost") else ends[-1]


def brute_force(
    tokens: list[int],
    sizes: tuple[int, int],
    ranking: NgramRanking,
    draft_len: int,
    end_ids: tuple[int, ...],
    num_seen: int | None = None,
) -> list[int]:
    """The longest tail that occurred before with a token after it; what followed the occurrence that was chosen.

    Among the first `num_seen` tokens, where not all of them count.
    """
    num_seen = len(tokens) if num_seen is None else num_seen
    for n in range(sizes[1], sizes[0] - 1, -1):
        ends = [i + n for i in range(num_seen - n) if tokens[i : i + n] == tokens[-n:]]
        if ends:
            end, draft = choose(tokens, ends, ranking), list[int]()
            while len(draft) < draft_len and end + len(draft) < len(tokens):
                draft.append(tokens[end + len(draft)])
            while len(draft) < draft_len and ranking in ("recent", "frequent"):
                draft.append(draft[len(draft) - (len(tokens) - end)])
            cuts = [j for j, token in enumerate(draft) if token in end_ids]
            return draft[: cuts[0]] if cuts else draft
    return []


@given(
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    runs=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=8),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(lambda pair: (min(pair), max(pair))),
    ranking=st.sampled_from(RANKINGS),
    max_draft_len=st.integers(0, 6),
    max_new_tokens=st.integers(1, 40),
    end_ids=st.sampled_from([(), (2,), (0, 2)]),
)
@settings(max_examples=examples(2000), deadline=None, derandomize=True)
def test_draft_equals_brute_force(
    prompt: list[int],
    runs: list[list[int]],
    sizes: tuple[int, int],
    ranking: NgramRanking,
    max_draft_len: int,
    max_new_tokens: int,
    end_ids: tuple[int, ...],
) -> None:
    """Grown by runs of random length, as accepted drafts make it grow."""
    drafter = NgramLookup(sizes[1], min_matching_ngram_size=sizes[0], ranking=ranking)
    sequence = start(prompt, max_new_tokens, end_ids=end_ids)
    for run in [[], *runs]:
        sequence.tokens += run
        draft_len = max(min(max_draft_len, sequence.num_remaining - 1), 0)
        if ranking == "leftmost" and draft_len:
            draft_len = max_draft_len  # as transformers has it; the loops cut what the budget has no room for
        expected = brute_force(sequence.tokens, sizes, ranking, draft_len, end_ids)
        assert propose(drafter, sequence, max_draft_len) == expected
        # `look_ahead` drafts behind drafted tokens: it searches the texts that it knows, and learns nothing.
        drafted = run[::-1] or prompt[:2]
        ahead = drafter.look_ahead(sequence, drafted, max_draft_len)
        text, num_seen = sequence.tokens + drafted, len(sequence.tokens)
        assert ahead.tokens == brute_force(text, sizes, ranking, max_draft_len, end_ids, num_seen)
        assert propose(drafter, sequence, max_draft_len) == expected


def test_pool_is_asked_where_the_sequence_has_no_match() -> None:
    """7 8 9 were generated before; a match of the sequence's own comes first, however short."""
    pool = NgramPool()
    pool.add(Sequence(Request(9, (), 10), [5, 6, 7, 8, 9]))
    drafter = NgramLookup(2, ranking="frequent", pool=pool)
    assert propose(drafter, start([1, 5, 6])) == [7, 8, 9]
    assert propose(drafter, start([6, 1, 5, 6], request_id=1), max_draft_len=2) == [1, 5]
    assert propose(drafter, start([1, 5, 6], request_id=2, end_ids=(8,))) == [7]
    assert propose(drafter, start([1, 5, 6], max_new_tokens=1, request_id=3)) == []


@pytest.mark.parametrize("alphabet", [1, 50], ids=["one token", "fifty tokens"])
@pytest.mark.parametrize("ranking", RANKINGS)
def test_a_step_searches_no_oftener_in_a_long_sequence(ranking: NgramRanking, alphabet: int) -> None:
    """Calls for five more tokens, after a prompt of 4,000 and of 40,000 tokens: some of them read it once."""
    numbers = []
    for length in (4_000, 40_000):
        drafter = NgramLookup(3, ranking=ranking)
        sequence = start([i * i % alphabet for i in range(length)])
        propose(drafter, sequence)

        def steps(drafter: NgramLookup = drafter, sequence: Sequence = sequence) -> None:
            for _ in range(5):
                sequence.tokens.append(sequence.tokens[-7])
                drafter.propose([sequence], 10)

        numbers.append(num_calls(steps))
    assert 0 < numbers[1] <= numbers[0] * 1.5
    assert numbers[1] < 1000
