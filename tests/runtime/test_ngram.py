"""The n-gram drafter proposes what a brute-force search of the sequence finds."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.drafters.ngram import NgramDrafter
from runtime.request import Request, Sequence


def start(
    tokens: list[int], max_new_tokens: int = 1000, request_id: int = 0, end_ids: tuple[int, ...] = ()
) -> Sequence:
    return Sequence(Request(request_id, tuple(tokens), max_new_tokens, frozenset(end_ids)), list(tokens))


def propose(drafter: NgramDrafter, sequence: Sequence, max_draft_len: int = 10) -> list[int]:
    (draft,) = drafter.propose([sequence], max_draft_len)
    assert draft.probs is None
    return draft.tokens


def brute_force(tokens: list[int], max_ngram: int, draft_len: int, end_ids: tuple[int, ...]) -> list[int]:
    """The longest tail that occurred before with a token after it; what followed its first occurrence."""
    for n in range(max_ngram, 0, -1):
        for i in range(len(tokens) - n):
            if tokens[i : i + n] == tokens[-n:]:
                continuation = tokens[i + n :][: max(draft_len, 0)]
                ends = [j for j, token in enumerate(continuation) if token in end_ids]
                return continuation[: ends[0]] if ends else continuation
    return []


@given(
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    runs=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=8),
    max_ngram=st.integers(1, 4),
    max_draft_len=st.integers(0, 6),
    max_new_tokens=st.integers(1, 40),
    end_ids=st.sampled_from([(), (2,), (0, 2)]),
)
@settings(max_examples=1000, deadline=None, derandomize=True)
def test_draft_equals_brute_force(
    prompt: list[int],
    runs: list[list[int]],
    max_ngram: int,
    max_draft_len: int,
    max_new_tokens: int,
    end_ids: tuple[int, ...],
) -> None:
    """Grown by runs of random length, as accepted drafts make it grow."""
    drafter, sequence = NgramDrafter(max_ngram), start(prompt, max_new_tokens, end_ids=end_ids)
    for run in [[], *runs]:
        sequence.tokens += run
        draft_len = min(max_draft_len, sequence.num_remaining - 1)
        expected = brute_force(sequence.tokens, max_ngram, draft_len, end_ids)
        assert propose(drafter, sequence, max_draft_len) == expected


def test_longest_pattern_wins() -> None:
    """3 was followed by 9 first, but 2 3 by 7."""
    assert propose(NgramDrafter(2), start([3, 9, 2, 3, 7, 5, 2, 3])) == [7, 5, 2, 3]
    assert propose(NgramDrafter(1), start([3, 9, 2, 3, 7, 5, 2, 3])) == [9, 2, 3, 7, 5, 2, 3]


def test_oldest_occurrence_wins() -> None:
    assert propose(NgramDrafter(2), start([1, 2, 5, 1, 2, 6, 1, 2]), max_draft_len=1) == [5]


def test_the_tail_does_not_match_itself() -> None:
    assert propose(NgramDrafter(2), start([1, 2, 3])) == []
    assert propose(NgramDrafter(2), start([1])) == []


def test_overlapping_occurrence_is_found() -> None:
    assert propose(NgramDrafter(2), start([4, 4, 4])) == [4]


def test_draft_leaves_room_for_the_targets_own_token() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 1]
    for max_new_tokens, draft in ((5, [2, 3, 4, 5]), (2, [2]), (1, [])):
        assert propose(NgramDrafter(2), start(tokens, max_new_tokens)) == draft


def test_draft_ends_before_the_first_end_id() -> None:
    assert propose(NgramDrafter(2), start([1, 2, 3, 9, 4, 9, 1], end_ids=(9,))) == [2, 3]
    assert propose(NgramDrafter(2), start([1, 9, 3, 1], end_ids=(9,))) == []


def test_requests_do_not_see_each_other() -> None:
    drafter = NgramDrafter(2)
    first, second = start([1, 2, 3, 1], request_id=0), start([5, 1], request_id=1)
    drafts = drafter.propose([first, second], 10)
    assert [draft.tokens for draft in drafts] == [[2, 3, 1], []]


def test_forget_drops_the_state() -> None:
    """A request id that is used again starts from nothing."""
    drafter = NgramDrafter(2)
    assert propose(drafter, start([1, 2, 3, 4, 5, 6, 1])) == [2, 3, 4, 5, 6, 1]
    drafter.forget(0)
    drafter.forget(0)
    assert propose(drafter, start([7, 8, 1])) == []


class CountingTokens(list[int]):
    """Counts the tokens that are read."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        item = super().__getitem__(index)
        CountingTokens.num_read += len(item) if isinstance(index, slice) else 1
        return item

    def __iter__(self) -> Any:
        raise AssertionError("the whole sequence is read")


def test_cost_of_a_step_does_not_grow_with_the_sequence() -> None:
    """Tokens read for one more token, after a prompt of 100 and of 10,000 tokens."""
    num_read = []
    for length in (100, 10_000):
        drafter = NgramDrafter(3)
        sequence = start([i * i % 50 for i in range(length)])
        sequence.tokens = CountingTokens(sequence.tokens)
        propose(drafter, sequence)
        CountingTokens.num_read = 0
        for _ in range(5):
            sequence.tokens.append(7)
            propose(drafter, sequence)
        num_read.append(CountingTokens.num_read)
    assert 0 < num_read[1] <= num_read[0] * 2
    assert num_read[1] < 500
