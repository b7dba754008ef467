"""The numbers of a benchmark, compared with numpy and with brute force over the same answers."""

import random

import numpy as np
import pytest
from sentences import Said

from runtime.measure.benchmark.client import Answer, SpeculationCounts
from runtime.measure.benchmark.load_generator import LoadResult
from runtime.measure.benchmark.results import parse_objectives, results
from runtime.util.errors import UsageError

START_S = 1000.0


def answer(start: float, pieces: list[float], num_tokens: int, **given: object) -> Answer:
    """Sent at `start`, of pieces that came so many seconds after that."""
    times = [START_S + start + piece for piece in pieces]
    made = Answer(START_S + start - 0.25, START_S + start, times[-1], times, "text", 10, num_tokens)
    return made if not given else Answer(**(vars(made) | given))


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    chosen = random.Random(1)
    made = []
    for i in range(37):
        pieces = np.cumsum([chosen.uniform(0.05, 0.4) for _ in range(chosen.randint(1, 12))]).tolist()
        made.append(answer(i * 0.31, pieces, len(pieces) + chosen.randint(0, 9)))
    return made


def numbers(answers: list[Answer], **given: object) -> dict[str, object]:
    result = LoadResult("m", answers, START_S, 20.0, given.pop("counts", None), given.pop("source", None))  # type: ignore[arg-type]
    return results(result, given.pop("objectives", {}), [50.0, 90.0, 99.9])  # type: ignore[arg-type]


def test_percentiles_are_numpys(answers: list[Answer]) -> None:
    found = numbers(answers)
    ttfts = [a.piece_times[0] - a.start_s for a in answers]
    tpots = [(a.piece_times[-1] - a.piece_times[0]) / (a.num_tokens - 1) for a in answers if a.num_tokens > 1]
    series = {
        "ttft": ttfts,
        "tpot": tpots,
        "itl": [gap for a in answers for gap in np.diff(a.piece_times)],
        "e2el": [a.piece_times[-1] - a.start_s for a in answers],
    }
    for name, values in series.items():
        milliseconds = np.array(values) * 1e3
        assert found[f"mean_{name}_ms"] == pytest.approx(np.mean(milliseconds))
        assert found[f"median_{name}_ms"] == pytest.approx(np.median(milliseconds))
        assert found[f"std_{name}_ms"] == pytest.approx(np.std(milliseconds))
        for percentile, key in ((50, "p50"), (90, "p90"), (99.9, "p99.9")):
            assert found[f"{key}_{name}_ms"] == pytest.approx(np.percentile(milliseconds, percentile))


def test_throughput_is_counts_over_the_whole_time(answers: list[Answer]) -> None:
    found = numbers(answers)
    tokens = sum(a.num_tokens for a in answers)
    assert found["completed"] == 37 and found["failed"] == 0
    assert found["request_throughput"] == 37 / 20
    assert found["output_throughput"] == tokens / 20
    assert found["total_token_throughput"] == (370 + tokens) / 20


def test_the_tokens_of_all_seconds_are_all_tokens(answers: list[Answer]) -> None:
    """A chunk of a request with more tokens than chunks has several; the busiest second is found among all."""
    found = numbers(answers)
    seconds = found["output_tokens_by_second"]
    assert isinstance(seconds, list)
    assert sum(seconds) == pytest.approx(sum(a.num_tokens for a in answers))
    third = sum(a.num_tokens / len(a.piece_times) for a in answers for time in a.piece_times if 3 <= time - START_S < 4)
    assert seconds[3] == pytest.approx(third)
    assert found["max_output_tokens_per_s"] == max(seconds)


def test_goodput_counts_those_that_meet_every_objective() -> None:
    made = [
        answer(0, [0.1, 0.3], 11),  # TTFT 100 ms, TPOT 20 ms, latency 300 ms
        answer(0, [0.3, 0.4], 11),  # too late
        answer(0, [0.1, 1.0], 11),  # too slow
        answer(0, [0.1], 1),  # one token has no time per token to miss
    ]
    objectives = {"ttft": 200.0, "tpot": 50.0}
    assert numbers(made, objectives=objectives)["request_goodput"] == 2 / 20
    assert numbers(made, objectives=objectives | {"e2el": 250.0})["request_goodput"] == 1 / 20
    assert numbers(made)["request_goodput"] is None


def test_those_that_failed_count_nowhere_and_say_why() -> None:
    failed = answer(1, [0.1, 0.9], 5, error="the server answers 500: no", piece_times=[])
    found = numbers([answer(0, [0.1, 0.3], 11), failed])
    assert found["completed"] == 1 and found["failed"] == 1
    assert found["total_output_tokens"] == 11
    assert found["errors"] == ["", "the server answers 500: no"]
    assert found["ttfts"] == pytest.approx([0.1, 0.0]) and found["output_lens"] == [11, 0]
    assert found["itls"] == [pytest.approx([0.2]), []]
    assert found["start_times"] == pytest.approx([0, 1]) and found["queue_times"] == pytest.approx([0.25, 0.25])


def test_speculation_has_vllms_keys_and_tokens_per_step() -> None:
    """11 tokens of which 6 were accepted took 5 steps: each makes one token of its own."""
    made = [answer(0, [0.1, 0.3], 11)]
    found = numbers(made, counts=SpeculationCounts(4, 12, 6, (4, 2, 0)), source="prometheus")
    assert found["spec_decode_acceptance_rate"] == 50.0
    assert found["spec_decode_acceptance_length"] == 2.5
    assert found["spec_decode_per_position_acceptance_rates"] == [1.0, 0.5, 0.0]
    assert (found["num_steps"], found["tokens_per_step"]) == (5, 11 / 5)
    told = numbers(made, counts=SpeculationCounts(4, 12, 6, (4, 2, 0), 6.0), source="responses")
    assert (told["num_steps"], told["tokens_per_step"]) == (6, 11 / 6)
    none = numbers(made, counts=SpeculationCounts(0, 0, 0), source="responses")
    assert none["spec_decode_acceptance_rate"] is None and none["tokens_per_step"] == 1.0


@pytest.mark.parametrize("wrong", ["ttft", "ttft:", "itl:5", "ttft:-1", "ttft:nan", "tpot:inf", ":5", "ttft:1:2"])
def test_what_is_no_objective_is_named(wrong: str, said: Said) -> None:
    with pytest.raises(UsageError) as caught:
        parse_objectives([wrong])
    said(caught, wrong)
