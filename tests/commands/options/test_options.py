"""What the command line's own parts make of names and flags."""

from typing import Any

import pytest

from commands.options.drafting import DraftLenMode
from commands.options.shared import (
    check_drafter_flags,
    check_orchestrator_flags,
    sampling_params,
)
from runtime.errors import SpecDecError, UsageError
from runtime.sampling import GREEDY, SamplingParams


@pytest.mark.parametrize(
    ("block_reuse", "num_beams", "py_session", "wrong"),
    [
        (False, 1, False, "orchestrator mode needs block reuse"),
        (True, 2, False, "beam search is not supported: `--num-beams 2`"),
        (True, 1, True, "`--use-py-session`"),
    ],
)
def test_what_orchestrator_mode_cannot_do_is_wrong_usage(
    block_reuse: bool, num_beams: int, py_session: bool, wrong: str
) -> None:
    check_orchestrator_flags(block_reuse=True, num_beams=1, py_session=False)
    with pytest.raises(UsageError) as raised:
        check_orchestrator_flags(block_reuse=block_reuse, num_beams=num_beams, py_session=py_session)
    assert wrong in raised.value.message
    assert raised.value.hint


@pytest.mark.parametrize(("check_lossless", "draft_len_mode"), [(True, None), (False, "auto")])
def test_what_needs_a_drafter_says_so(check_lossless: bool, draft_len_mode: DraftLenMode | None) -> None:
    check_drafter_flags(check_lossless=check_lossless, draft_len_mode=draft_len_mode, has_drafter=True)
    check_drafter_flags(check_lossless=False, draft_len_mode="fixed", has_drafter=False)
    with pytest.raises(UsageError, match="there is no(ne| drafter)") as raised:
        check_drafter_flags(check_lossless=check_lossless, draft_len_mode=draft_len_mode, has_drafter=False)
    assert raised.value.hint


def params(**given: Any) -> SamplingParams:
    flags = dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "no_repeat_ngram_size"))
    return sampling_params(**(flags | given))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, GREEDY),
        ({"top_k": 1}, GREEDY),
        ({"top_k": 0}, SamplingParams(top_k=0)),
        ({"top_k": 40}, SamplingParams(top_k=40)),
        ({"temperature": 0.8}, SamplingParams(temperature=0.8, top_k=0)),
        ({"temperature": 1.0}, SamplingParams(top_k=0)),
        ({"temperature": 0.0}, SamplingParams(temperature=0.0, top_k=0)),
        ({"top_p": 0.9}, SamplingParams(top_k=0, top_p=0.9)),
        ({"top_p": 1.0}, SamplingParams(top_k=0, top_p=1.0)),
        ({"min_p": 0.1}, SamplingParams(top_k=0, min_p=0.1)),
        ({"top_p": 0.0, "min_p": 0.0}, GREEDY),
        ({"temperature": 0.8, "top_k": 1}, SamplingParams(temperature=0.8)),
        ({"repetition_penalty": 1.2, "random_seed": 7}, SamplingParams(repetition_penalty=1.2, random_seed=7)),
        ({"no_repeat_ngram_size": 3}, SamplingParams(no_repeat_ngram_size=3)),
    ],
)
def test_asking_for_a_temperature_or_a_cut_is_asking_for_samples(
    given: dict[str, Any], expected: SamplingParams
) -> None:
    """Unless `--top-k` is given, which decides."""
    assert params(**given) == expected


@pytest.mark.parametrize(
    ("given", "warns"),
    [
        ({"top_k": 1}, False),
        ({"temperature": 0.8}, False),
        ({"top_k": 2, "temperature": 0.8}, False),
        ({"top_k": 1, "temperature": 0.8}, True),
        ({"top_k": 1, "top_p": 0.9}, True),
        ({"top_k": 1, "min_p": 0.1}, True),
        ({"top_k": 1, "repetition_penalty": 2.0}, False),
    ],
    ids=str,
)
def test_flags_that_greedy_leaves_without_effect_are_named(
    given: dict[str, Any], warns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    params(**given)
    warning = "warning: `--top-k 1` is greedy: `--temperature`, `--top-p` and `--min-p` have no effect\n"
    assert capsys.readouterr() == ("", warning if warns else "")


def test_wrong_usage_is_a_specdec_error() -> None:
    assert issubclass(UsageError, SpecDecError)
