"""A share of the exact oracle's campaign, scripts/campaigns/exact_oracle.py: random cases, and failures."""

import pytest

from runtime.text.corpus import Corpus
from scripts.campaigns import cases
from scripts.campaigns.exact_oracle import count_cases, fail_everywhere


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return cases.make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("first", [36, *(pytest.param(first, marks=pytest.mark.slow) for first in (0, 12, 24))])
def test_random_cases_have_the_models_own_outputs(first: int, corpus: Corpus) -> None:
    counts, failed = count_cases(first, 12, corpus)
    assert not failed
    assert counts["outputs"] > 20 and counts["accepted draft tokens"] > 20 and counts["with states"] > 4


# All have states: in orchestrator mode, with a copy in leader mode, and with a draft engine; their calls are few.
@pytest.mark.parametrize("case", [10, *(pytest.param(case, marks=pytest.mark.slow) for case in (235, 76, 96, 43, 6))])
def test_whichever_call_fails_everything_is_given_back_and_the_next_run_is_right(case: int, corpus: Corpus) -> None:
    counts, failed = fail_everywhere(case, 1, corpus)
    assert not failed
    assert all(counts[f"failures of {name}"] for name in ("admit", "step", "commit", "release"))
