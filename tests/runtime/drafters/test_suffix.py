"""The suffix automaton knows what a brute-force search of the text finds, and drafts are what its docstring says."""

import random

import pytest
from counting import CountingList, Reads
from hypothesis import given, settings
from hypothesis import strategies as st
from strength import examples

from runtime.drafters.pool import NgramPool
from runtime.drafters.suffix import MAX_COUNTED, History, SuffixAutomaton, SuffixLookup
from runtime.errors import UsageError
from runtime.request import Draft, Request, Sequence

PUBLIC_MARGIN = 2


def start(
    tokens: list[int], max_new_tokens: int = 1000, request_id: int = 0, end_ids: tuple[int, ...] = ()
) -> Sequence:
    return Sequence(Request(request_id, tuple(tokens), max_new_tokens, frozenset(end_ids)), list(tokens))


def propose(drafter: SuffixLookup, sequence: Sequence, max_draft_len: int = 10) -> list[int]:
    (draft,) = drafter.propose([sequence], max_draft_len)
    assert draft.probs is None
    return draft.tokens


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


def brute_force(
    text: list[int],
    draft_len: int,
    max_counted: int,
    public: NgramPool | None,
    drafted: list[int] = [],  # noqa: B006
) -> list[int]:
    draft: list[int] = []
    while len(draft) < draft_len:
        tail = text + drafted + draft
        n, found = followers(text, tail, max_counted - 1)
        earlier = public.find(tail) if public else None
        if earlier is not None and (n == 0 or earlier[0] > n + PUBLIC_MARGIN):
            draft.append(earlier[1])
        elif n:
            draft.append(most_frequent(found))
        else:
            break
    return draft


runs = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8)


@given(runs=runs, max_counted=st.sampled_from([2, 3, 5, MAX_COUNTED]))
@settings(max_examples=examples(500), deadline=None, derandomize=True)
def test_automaton_equals_brute_force(runs: list[list[int]], max_counted: int) -> None:
    """The longest repeated end, occurrences of every pattern, and each one's followers, after every run."""
    automaton, text = SuffixAutomaton(max_counted), list[int]()
    for run in runs:
        for token in run:
            automaton.append(token)
        text += run
        assert automaton.match_len == longest_match(text)
        for first in range(len(text)):
            state = 0
            for end in range(first + 1, min(first + max_counted, len(text)) + 1):
                state = automaton.next[state][text[end - 1]]
                pattern = text[first:end]
                assert automaton.num_occurrences[state] == len(ends_of(text, pattern))
                if len(pattern) < max_counted:
                    found = [text[e] for e in ends_of(text, pattern) if e < len(text)]
                    assert automaton.followers(state) == {token: found.count(token) for token in found}
                    assert automaton.best[state] == (most_frequent(found) if found else -1)
        state, n = automaton.match()
        assert n == followers(text, text, max_counted - 1)[0]


@given(
    runs=runs,
    earlier=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=9), max_size=3),
    max_draft_len=st.integers(0, 8),
    max_counted=st.sampled_from([2, 3, 5, MAX_COUNTED]),
    max_new_tokens=st.integers(1, 40),
)
@settings(max_examples=examples(1000), deadline=None, derandomize=True)
def test_draft_equals_brute_force(
    runs: list[list[int]], earlier: list[list[int]], max_draft_len: int, max_counted: int, max_new_tokens: int
) -> None:
    """Private where there is no earlier text; grown by runs of random length, as accepted drafts make it grow."""
    pool = NgramPool() if earlier else None
    for tokens in earlier:
        assert pool is not None
        pool.add(Sequence(Request(9, (), 10), tokens))
    drafter, sequence = SuffixLookup(pool=pool), start(runs[0], max_new_tokens)
    drafter._histories[0] = History(sequence, SuffixAutomaton(max_counted))
    for run in [[], *runs[1:]]:
        sequence.tokens += run
        draft_len = max(min(max_draft_len, sequence.num_remaining - 1), 0)
        expected = brute_force(sequence.tokens, draft_len, max_counted, pool)
        assert propose(drafter, sequence, max_draft_len) == expected
        # As if these came next: what follows them is looked for in what is known, and nothing is learned.
        drafted = earlier[0] if earlier else run[::-1]
        ahead = drafter.look_ahead(sequence, drafted, draft_len)
        assert ahead.tokens == brute_force(sequence.tokens, draft_len, max_counted, pool, drafted)
        assert propose(drafter, sequence, max_draft_len) == expected


def test_of_a_sequence_that_was_never_looked_at_nothing_is_known() -> None:
    assert SuffixLookup().look_ahead(start([1, 2, 1, 2]), [1], 4).tokens == []


def test_tokens_that_came_since_it_was_asked_are_looked_at_too() -> None:
    """Resting, an `AdaptiveDrafter` does not ask. 4 follows 1 2 3; what follows 3 most often is 5."""
    drafter, sequence = SuffixLookup(), start([1, 2, 3, 4, 9, 3, 5, 8, 3, 5, 0, 1])
    propose(drafter, sequence)
    sequence.tokens.append(2)
    assert drafter.look_ahead(sequence, [3], 1) == Draft([4], match_len=3)


def test_longest_match_wins() -> None:
    """9 follows 3 twice, 7 follows 1 2 3 once."""
    assert propose(SuffixLookup(), start([3, 9, 3, 9, 1, 2, 3, 7, 5, 1, 2, 3]), 2) == [7, 5]


def test_most_frequent_continuation_wins_then_the_latest() -> None:
    assert propose(SuffixLookup(), start([1, 5, 1, 5, 1, 6, 1]), 1) == [5]
    assert propose(SuffixLookup(), start([1, 5, 1, 6, 1]), 1) == [6]


def test_repetition_goes_on_in_the_draft() -> None:
    assert propose(SuffixLookup(), start([1, 2, 3, 1, 2, 3]), 7) == [1, 2, 3, 1, 2, 3, 1]


def test_nothing_repeated_is_no_draft() -> None:
    assert propose(SuffixLookup(), start([1, 2, 3])) == []
    assert propose(SuffixLookup(), start([1])) == []


def test_draft_ends_before_the_first_end_id() -> None:
    assert propose(SuffixLookup(), start([1, 2, 3, 9, 4, 1], end_ids=(9,))) == [2, 3]


def test_draft_leaves_room_for_the_targets_own_token() -> None:
    for max_new_tokens, draft in ((4, [2, 3, 1]), (2, [2]), (1, [])):
        assert propose(SuffixLookup(), start([1, 2, 3, 1], max_new_tokens)) == draft


@pytest.mark.parametrize(
    ("repeated", "growth", "draft_len"),
    [(1, 1.0, 1), (3, 1.0, 3), (3, 1.5, 4), (3, 0.1, 1), (3, 9.0, 10), (40, 0.2, 8)],
)
def test_drafts_grow_with_the_match(repeated: int, growth: float, draft_len: int) -> None:
    """A match longer than what is counted has its full length."""
    phrase = list(range(100, 100 + repeated))
    sequence = start([*phrase, *range(20), *phrase])
    assert propose(SuffixLookup(growth=growth), sequence) == list(range(20))[:draft_len]


@pytest.mark.parametrize("growth", [0.0, -1.0, float("nan")])
def test_growth_that_is_none_is_refused(growth: float) -> None:
    with pytest.raises(UsageError, match="growth is not above 0"):
        SuffixLookup(growth=growth)


def test_much_longer_public_match_is_followed() -> None:
    """The sequence's own follower of 4 is 9; 1 2 3 4 had 5 after it in an earlier output."""
    pool = NgramPool()
    pool.add(Sequence(Request(9, (), 10), [1, 2, 3, 4, 5, 6]))
    sequence = start([4, 9, 1, 2, 3, 4])
    assert propose(SuffixLookup(), sequence, 1) == [9]
    assert propose(SuffixLookup(pool=pool), sequence, 2) == [5, 6]
    assert propose(SuffixLookup(pool=pool), start([4, 9, 8, 2, 3, 4]), 1) == [9]


def test_requests_do_not_see_each_other() -> None:
    first, second = start([1, 2, 3, 1], request_id=0), start([5, 1], request_id=1)
    drafts = SuffixLookup().propose([first, second], 10)
    assert [draft.tokens[:3] for draft in drafts] == [[2, 3, 1], []]


def test_forget_drops_the_state() -> None:
    drafter = SuffixLookup()
    assert propose(drafter, start([1, 2, 3, 1]), 1) == [2]
    drafter.forget(0)
    drafter.forget(0)
    assert propose(drafter, start([7, 8, 1])) == []


def reads_of_steps(tokens: list[int], num_steps: int = 200) -> int:
    """Items that the last tokens make the drafter read, of the sequence and of its automaton, one step for each."""
    drafter, sequence = SuffixLookup(), start(tokens[:-num_steps], max_new_tokens=1000)
    propose(drafter, sequence)
    automaton, reads = drafter._histories[0].automaton, Reads()
    for name in ("next", "links", "lengths", "num_occurrences", "best"):
        setattr(automaton, name, CountingList(getattr(automaton, name), reads))
    sequence.tokens = CountingList(sequence.tokens, reads)
    for token in tokens[-num_steps:]:
        sequence.tokens.append(token)
        propose(drafter, sequence)
    return reads.number


@pytest.mark.parametrize("alphabet", [1, 20], ids=["one token", "twenty tokens"])
def test_cost_of_a_step_does_not_grow_with_the_sequence(alphabet: int) -> None:
    """Forty times the text: about the same step, and less than a thousand reads of it."""
    rng = random.Random(0)
    tokens = [rng.randrange(alphabet) for _ in range(20_000)]
    short, long = reads_of_steps(tokens[:500]), reads_of_steps(tokens)
    assert 0 < long < 1.5 * short
    assert long / 200 < 1000
