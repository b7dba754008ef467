"""A commit cuts tokens, K/V and counters at the same place."""

import pytest

from runtime.request import Draft, Request, Sequence, Verdict

PROMPT = (1, 2, 3)
DRAFT = [11, 12, 13]


def commit(request: Request, num_accepted: int = 3, next_token: int = 14) -> tuple[Sequence, list[int]]:
    """Commit 11 12 13 14 as an engine leaves it: the accepted tokens' K/V computed, the last token's not."""
    sequence = Sequence.start(request)
    sequence.num_computed = len(sequence.tokens) + num_accepted
    new_tokens = sequence.commit(Draft(DRAFT), Verdict(num_accepted, next_token))
    return sequence, new_tokens


def check_cut(sequence: Sequence, new_tokens: list[int], num_new: int, finish_reason: str | None) -> None:
    """After `num_new` of 11 12 13 14, three of them draft tokens."""
    assert new_tokens == sequence.output_tokens == [11, 12, 13, 14][:num_new]
    assert sequence.finish_reason == finish_reason
    assert sequence.num_generated == num_new
    assert sequence.num_computed == min(len(PROMPT) + 3, len(PROMPT) + num_new)
    stats = sequence.stats
    assert (stats.num_steps, stats.num_spec_steps, stats.num_generated_tokens) == (1, 1, num_new)
    assert (stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (3, min(num_new, 3))
    assert stats.acceptance_histogram == [0] * min(num_new, 3) + [1]
    assert stats.accepted_per_position == [1] * min(num_new, 3)
    assert stats.per_step_accepted == [min(num_new, 3)]
    assert (stats.end_s is None) == (finish_reason is None)


def test_without_a_reason_to_end_everything_is_kept() -> None:
    sequence, new_tokens = commit(Request(0, PROMPT, 10))
    check_cut(sequence, new_tokens, 4, None)
    assert sequence.num_remaining == 6


@pytest.mark.parametrize("position", range(4))
def test_end_id_cuts_an_accepted_run(position: int) -> None:
    """The end id itself is kept, as Hugging Face keeps it."""
    end_ids = frozenset([99, [11, 12, 13, 14][position]])
    check_cut(*commit(Request(0, PROMPT, 10, end_ids)), position + 1, "end_id")


@pytest.mark.parametrize("position", range(4))
def test_stop_word_cuts_an_accepted_run(position: int) -> None:
    last = [11, 12, 13, 14][position]

    def stop_check(tokens: list[int], num_prompt_tokens: int) -> bool:
        assert num_prompt_tokens == 3 and len(tokens) > 3
        return tokens[-1] == last

    check_cut(*commit(Request(0, PROMPT, 10, stop_check=stop_check)), position + 1, "stop")


@pytest.mark.parametrize("max_new_tokens", range(1, 5))
def test_budget_cuts_an_accepted_run(max_new_tokens: int) -> None:
    sequence, new_tokens = commit(Request(0, PROMPT, max_new_tokens))
    check_cut(sequence, new_tokens, max_new_tokens, "length")
    assert sequence.num_remaining == 0


def test_end_id_comes_before_stop_word_before_budget() -> None:
    def stops(tokens: list[int], num_prompt_tokens: int) -> bool:
        return tokens[-1] == 12

    for end_ids, stop_check, finish_reason in (
        (frozenset([12]), stops, "end_id"),
        (frozenset[int](), stops, "stop"),
        (frozenset[int](), None, "length"),
    ):
        sequence, new_tokens = commit(Request(0, PROMPT, 2, end_ids, stop_check))
        check_cut(sequence, new_tokens, 2, finish_reason)


def test_end_id_in_the_prompt_or_after_a_rejection_does_not_end() -> None:
    sequence, new_tokens = commit(Request(0, PROMPT, 10, frozenset([2, 12])), num_accepted=1, next_token=20)
    assert (new_tokens, sequence.finish_reason) == ([11, 20], None)
    assert sequence.num_computed == len(PROMPT) + 1


def test_recovered_token_is_not_counted_as_accepted() -> None:
    sequence, new_tokens = commit(Request(0, PROMPT, 10), num_accepted=0, next_token=20)
    assert new_tokens == [20]
    stats = sequence.stats
    assert (stats.num_accepted_draft_tokens, stats.acceptance_histogram, stats.accepted_per_position) == (0, [1], [])


def test_sequence_does_not_change_the_prompt() -> None:
    request = Request(0, PROMPT, 10)
    commit(request)
    assert request.prompt_tokens == PROMPT and Sequence.start(request).tokens == [1, 2, 3]
