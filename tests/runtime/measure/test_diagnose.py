"""Judgements against numbers by hand, at both sides of limits; what is found in engines: `test_cli_doctor.py`."""

from dataclasses import replace
from pathlib import Path

import pytest
from sentences import Said

from runtime.checkpoint.config import MachineSpeed, StepCost
from runtime.core.stats import LoopTimes, StateStats
from runtime.measure.diagnosis import diagnose
from runtime.measure.diagnosis.diagnose import (
    CacheUse,
    DraftedStep,
    Drafting,
    DraftModelPair,
    ExpectedAcceptance,
    Machine,
    Observations,
    Outputs,
    StateUse,
    StepTime,
    Weights,
    judge,
)

MS = 1e-3
# 10 ms for one token, 1 ms more for each further one, whatever the context.
COSTS = tuple(StepCost(1, 0, num_tokens, (9 + num_tokens) * MS) for num_tokens in (1, 11))
MACHINE = Machine(
    now=MachineSpeed(4, 20e9),
    when_built=MachineSpeed(4, 20e9),
    num_cores=4,
    cpu_share=1.0,
    num_numa_nodes=1,
    huge_pages="madvise",
    memory_bytes=1 << 30,
)
PAIR = DraftModelPair(6, 0, True, ("a", "a"), (), False)
CACHE = CacheUse(0, 100, 50, 400, 380)


def drafting(steps: list[DraftedStep], draft_time_s: float = 0.0) -> Drafting:
    """N-gram lookup, in a loop that takes no time of its own."""
    target_s = sum((10 + step.num_drafted) * MS for step in steps)
    times = LoopTimes(target_s + draft_time_s, draft_time_s, 0.0, target_s, len(steps))
    return Drafting({"ngram": sum(step.num_drafted for step in steps)}, "fixed", tuple(steps), times, COSTS)


GOOD = drafting([DraftedStep(100 + i, 4, 3) for i in range(60)])
HEALTHY = Observations(
    outputs=Outputs(4, 0, 0),
    drafting=GOOD,
    draft_model=PAIR,
    cache=CACHE,
    states=StateUse(StateStats(num_evictions=5, num_hits=3), 10),
    steps=(StepTime(COSTS[0], 10 * MS), StepTime(COSTS[1], 20 * MS)),
    machine=MACHINE,
    weights=Weights(1000, 0),
)


def found(observed: Observations) -> set[str]:
    return {name for name, judgement in judge(observed).items() if judgement is not None and judgement.is_fault}


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert found(HEALTHY) == set()
    assert [name for name, judgement in judge(HEALTHY).items() if judgement is None] == ["acceptance_below_profile"]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("draft_tokenizer_differs", {"draft_model": replace(PAIR, num_texts_tokenized_otherwise=1)}),
        ("draft_chat_template_differs", {"draft_model": replace(PAIR, chat_templates=("a", "ab"))}),
        ("draft_rope_differs", {"draft_model": replace(PAIR, rope_differences=("rope_theta 1 beside 2",))}),
        ("draft_model_is_target", {"draft_model": replace(PAIR, has_same_weights=True)}),
        ("speculation_changes_output", {"outputs": Outputs(4, 1, 0)}),
        ("output_not_repeatable", {"outputs": Outputs(4, 1, 1)}),
        ("cache_preempts", {"cache": replace(CACHE, num_preemptions=1)}),
        ("reuse_never_hits", {"cache": replace(CACHE, num_found=0)}),
        ("state_slots_full", {"states": StateUse(StateStats(num_waits=1, num_hits=8), 10)}),
        ("state_slots_full", {"states": StateUse(StateStats(num_evictions=1, num_hits=8, num_misses=1), 10)}),
        ("state_hits_missed", {"states": StateUse(StateStats(num_hits=4, num_misses=3), 10)}),
        ("memory_slower_than_built", {"machine": replace(MACHINE, now=MachineSpeed(4, 7.9e9))}),
        ("fewer_threads_than_built", {"machine": replace(MACHINE, now=MachineSpeed(3, 20e9))}),
        ("more_threads_than_cores", {"machine": replace(MACHINE, num_cores=2.5)}),
        ("busy_machine", {"machine": replace(MACHINE, cpu_share=0.39)}),
        ("several_numa_nodes", {"machine": replace(MACHINE, num_numa_nodes=2)}),
        ("no_huge_pages", {"machine": replace(MACHINE, huge_pages="never")}),
        ("denormal_weights", {"weights": Weights(1000, 11)}),
    ],
)
def test_what_is_wrong_is_found_and_nothing_else(name: str, wrong: dict[str, object]) -> None:
    assert found(replace(HEALTHY, **wrong)) == {name}


@pytest.mark.parametrize(
    "right",
    [
        {"machine": replace(MACHINE, now=MachineSpeed(4, 8.1e9))},
        {"machine": replace(MACHINE, num_cores=3.5)},  # 4 threads have something to do there
        {"machine": replace(MACHINE, cpu_share=0.41)},
        {"machine": replace(MACHINE, now=MachineSpeed(1, 20e9), when_built=None)},
        {"machine": replace(MACHINE, num_numa_nodes=2, memory_bytes=1 << 20)},
        {"machine": replace(MACHINE, huge_pages="never", memory_bytes=1 << 20)},
        {"machine": replace(MACHINE, huge_pages=None, when_built=None)},
        {"cache": replace(CACHE, num_findable=0, num_found=0)},
        {"states": None},
        {"states": StateUse(StateStats(), 10)},
        {"states": StateUse(StateStats(num_hits=3, num_misses=2), 10)},
        {"states": StateUse(StateStats(num_hits=5, num_misses=3), 10)},
        {"weights": Weights(0, 0)},
        {"weights": Weights(1000, 9)},
        {"steps": ()},
        {"draft_model": None, "drafting": None},
    ],
)
def test_what_is_nearly_wrong_or_unknown_is_not_found(right: dict[str, object]) -> None:
    assert found(replace(HEALTHY, **right)) == set()


@pytest.mark.parametrize(("factor", "is_found"), [(1.9, False), (2.1, True)])
def test_steps_are_compared_kind_by_kind(factor: float, is_found: bool) -> None:
    steps = tuple(StepTime(cost, cost.seconds * factor) for cost in COSTS)
    judgement = diagnose.steps_slower_than_built(replace(HEALTHY, steps=steps))
    assert judgement is not None and judgement.is_fault == is_found
    assert judgement.number == pytest.approx(factor)


@pytest.mark.parametrize(("accepted", "is_found"), [(0, True), (1, True), (2, False)])
def test_acceptance_is_held_against_the_profiles(accepted: int, is_found: bool) -> None:
    steps = [DraftedStep(100 + i, 4, accepted) for i in range(20)]
    expected = ExpectedAcceptance(Path("profile.json"), 0.9)
    judgement = diagnose.acceptance_below_profile(
        replace(HEALTHY, drafting=replace(drafting(steps), expected=expected))
    )
    assert judgement is not None and judgement.is_fault == is_found
    assert judgement.number == accepted / 4


def falling(early: int, late: int, drafts: int = 40) -> Drafting:
    """Counts of drafts in either half, and of those that begin right."""
    halves = [(i, early if i < drafts else late) for i in range(2 * drafts)]
    return drafting([DraftedStep(i, 1, int(i % drafts < right)) for i, right in halves])


@pytest.mark.parametrize(
    ("drafting", "is_found"),
    [
        (falling(36, 4), True),
        (falling(36, 20), False),  # more than half of what it was
        (falling(8, 0), False),  # it never was much
        (falling(4, 36), False),  # it rises
        (falling(20, 20), False),
    ],
)
def test_acceptance_that_falls_is_more_than_noise(drafting: Drafting, is_found: bool) -> None:
    judgement = diagnose.acceptance_falls_with_context(replace(HEALTHY, drafting=drafting))
    assert judgement is not None and judgement.is_fault == is_found


def test_too_few_drafts_are_not_judged() -> None:
    assert diagnose.acceptance_falls_with_context(replace(HEALTHY, drafting=falling(20, 0, drafts=20))) is None
    few = drafting([DraftedStep(i, 0, 0) for i in range(15)])
    assert diagnose.drafter_never_used(replace(HEALTHY, drafting=few)) is None


WRONG = drafting([DraftedStep(i, 10, 0) for i in range(30)])
SLOW_LOOP = replace(WRONG, times=replace(WRONG.times, wall_s=WRONG.times.wall_s + 30 * 10 * MS))
SLOW_LOOKUP = drafting([DraftedStep(i, 10, 0) for i in range(30)], draft_time_s=30 * 30 * MS)
FOUR_RIGHT = drafting([DraftedStep(i, 10, 4) for i in range(30)])
BY_MODEL = replace(
    drafting([DraftedStep(i, 10, 1) for i in range(30)]),
    num_tokens_by_drafter={"draft-target": 300},
    draft_token_s=10 * MS,
)
HALF_BY_MODEL = replace(BY_MODEL, num_tokens_by_drafter={"ngram": 150, "draft-target": 150})


@pytest.mark.parametrize(
    ("drafts", "number", "best"),
    [
        pytest.param(WRONG, 20 / 10, "0", id="never right"),
        pytest.param(SLOW_LOOP, 30 / 20, "0", id="slow loop"),
        pytest.param(SLOW_LOOKUP, 50 / 10, "0", id="slow lookup"),
        pytest.param(FOUR_RIGHT, 20 / 14, "4", id="four right"),
        pytest.param(BY_MODEL, 60 / 10, "0", id="draft model"),
        pytest.param(HALF_BY_MODEL, 35 / 8, "1", id="draft model in a chain"),
    ],
)
def test_drafts_are_longer_than_pays_by_this_factor(drafts: Drafting, number: float, best: str, said: Said) -> None:
    """Milliseconds of a token with these drafts over those with drafts of the best length, computed by hand."""
    judgement = diagnose.drafts_longer_than_pays(replace(HEALTHY, drafting=drafts))
    assert judgement is not None and judgement.is_fault
    assert judgement.number == pytest.approx(number)
    said(judgement.message, best)


def test_of_a_chain_the_idle_one_is_named() -> None:
    idle = replace(GOOD, num_tokens_by_drafter={"ngram": 240, "draft-target": 0})
    judgement = diagnose.drafter_never_used(replace(HEALTHY, drafting=idle))
    assert judgement is not None and judgement.is_fault and "draft-target" in judgement.message
