"""A share of the exact oracle's campaign, scripts/campaigns/exact_oracle.py: random cases, failures, planted faults."""

import pytest

from runtime.text.corpus import Corpus
from scripts.campaigns import cases
from scripts.campaigns.exact_oracle import count_cases, fail_everywhere, find
from scripts.campaigns.faults import FAULTS, planted

QUICKLY_FOUND = (
    "core.batch:pack without 12",
    "loop.step:release_all drop 1",
    "engine.engine:Engine._forward drop 2",
    "loop.step:judge one-more 0",
    "core.kv_cache:BlockManager._allocate drop 0",
    "core.kv_cache:BlockManager._insert without 0",
    "core.states:StateManager.admit without 4",
    "core.states:StateManager.keep without 2",
    "core.states:copy_slot exchange 0",
    "core.states:_Kept.match_len without 14",
    "core.verify:_verify_probs exchange 0",
    "core.verify:verify_tokens without 1",
)
FOUND_LATER = (
    "drafters.draft_target:DraftModel._draft_tokens one-more 0",
    "engine.engine:Engine.catch_up drop 0",
    "loop.scheduler:Scheduler._make_room drop 0",
    "core.request:Sequence.commit drop 2",
)


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


@pytest.mark.parametrize("fault", [*QUICKLY_FOUND, *(pytest.param(one, marks=pytest.mark.slow) for one in FOUND_LATER)])
def test_planted_fault_is_found(fault: str, corpus: Corpus) -> None:
    assert find(fault, corpus, most=100)


def test_every_fault_can_be_planted() -> None:
    for fault in FAULTS:
        with planted(fault):
            pass
