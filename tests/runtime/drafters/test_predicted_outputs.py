"""A predicted output is drafted as far as it is right, and again after what changed."""

import random
from itertools import pairwise

from runtime.core.request import Draft, Request, Sequence, VerifyResult
from runtime.drafters.prediction import CopiedTexts, PredictionLookup

PROMPT = (1, 2, 3)
END = 0


def replay(output: list[int], drafter: PredictionLookup, max_draft_len: int = 10) -> Sequence:
    """Generate `output` with the drafter, as a model would that says just that: the verdicts are by comparison."""
    request = Request(7, PROMPT, len(output), frozenset({END}))
    sequence = Sequence.start(request)
    while not sequence.is_over:
        (draft,) = drafter.propose([sequence], max_draft_len)
        assert len(draft.tokens) <= min(max_draft_len, sequence.max_draft_len)
        rest = output[sequence.num_generated :]
        num_accepted = 0
        while num_accepted < len(draft.tokens) and draft.tokens[num_accepted] == rest[num_accepted]:
            num_accepted += 1
        sequence.commit(draft, VerifyResult(num_accepted, rest[num_accepted]))
    assert sequence.output_tokens == output
    assert sequence.stats.num_predicted_tokens == sequence.stats.num_draft_tokens
    assert sequence.stats.num_accepted_predicted_tokens == sequence.stats.num_accepted_draft_tokens
    drafter.forget(7)
    return sequence


def file_of(num_lines: int, seed: int) -> list[list[int]]:
    """Lines of code as tokens: a few words come again and again, as names and keywords do."""
    rng = random.Random(seed)
    return [
        [10, *(rng.choice([rng.randint(20, 60), rng.randint(100, 4000)]) for _ in range(8)), 11]
        for _ in range(num_lines)
    ]


def flat(lines: list[list[int]]) -> list[int]:
    return [token for line in lines for token in line]


def test_what_is_predicted_right_takes_as_few_steps_as_can_be() -> None:
    output = flat(file_of(44, 1))
    assert replay(output, PredictionLookup(output)).stats.num_steps == len(output) // 11


def test_an_edit_of_three_lines_yields_six_tokens_a_step() -> None:
    """400 tokens: one line is another, one has two tokens more in its middle, one has lost its end."""
    for seed in range(10):
        lines = file_of(40, seed)
        edited = list(lines)
        edited[5] = file_of(1, 1000 + seed)[0]
        edited[19] = [*lines[19][:4], 5001, 5002, *lines[19][4:]]
        edited[33] = [*lines[33][:5], 11]
        sequence = replay(flat(edited), PredictionLookup(flat(lines)))
        assert len(sequence.output_tokens) > 390
        assert (sequence.stats.tokens_per_step or 0) >= 6, seed


def test_what_was_not_predicted_is_soon_not_drafted() -> None:
    output = flat(file_of(20, 5))
    sequence = replay(output, PredictionLookup(flat([[5000 + i] * 3 for i in range(60)])))
    assert sequence.stats.num_spec_steps <= 3
    assert replay(output, PredictionLookup([])).stats.num_spec_steps == 0


def test_requests_follow_one_prediction_each_at_its_own_place() -> None:
    predicted = flat(file_of(10, 7))
    drafter = PredictionLookup(predicted)
    first, second = (Sequence.start(Request(i, PROMPT, 90)) for i in range(2))
    first.commit(Draft([]), VerifyResult(0, predicted[0]))
    drafts = drafter.propose([first, second], 4)
    assert [draft.tokens for draft in drafts] == [predicted[1:5], predicted[:4]]
    drafter.forget(0)
    assert drafter._places.keys() == {1}


def test_parts_of_a_text_are_drafted_once_they_have_begun() -> None:
    """Four tokens of it say that it is copied; they are no prediction of the request's."""
    text = flat(file_of(30, 8))
    output = [*range(7000, 7012), *text[100:180], *range(7020, 7030), *text[30:60]]
    copied = CopiedTexts()
    copied.add(1, text)
    sequence, other = Sequence.start(Request(1, PROMPT, len(output))), Sequence.start(Request(2, PROMPT, 9))
    while not sequence.is_over:
        draft, none = copied.propose([sequence, other], 10)
        assert none.tokens == [] and (not draft.tokens or sequence.num_generated >= 16)
        rest = output[sequence.num_generated :]
        num_accepted = next((i for i, token in enumerate(draft.tokens) if token != rest[i]), len(draft.tokens))
        sequence.commit(draft, VerifyResult(num_accepted, rest[num_accepted]))
    stats = sequence.stats
    assert sequence.output_tokens == output and stats.num_predicted_tokens == 0
    assert stats.num_accepted_draft_tokens >= 0.8 * (80 + 30) - 8
    copied.forget(1)
    assert copied.propose([sequence], 10)[0].tokens == []


def test_the_pairs_of_a_prediction_are_what_it_is_found_by() -> None:
    """Pairs lead to the place, of several, that is nearest to where the output left."""
    predicted = [20, 21, 30, 31, 20, 21, 40, 41, 20, 21, 50, 51]
    drafter = PredictionLookup(predicted)
    assert all(pair in drafter._ends for pair in pairwise(predicted))
    sequence = Sequence.start(Request(1, PROMPT, 50))
    for token in (20, 21, 30, 31, 99, 20, 21):
        sequence.commit(Draft([]), VerifyResult(0, token))
        (draft,) = drafter.propose([sequence], 3)
    assert draft.tokens == [40, 41, 20]
