"""Counts and rates against an example counted by hand, and the keys that vocabulary and other tools expect."""

import pytest

from runtime.core.stats import LoopTimes, RequestStats, sum_stats

VOCABULARY_KEYS = {
    "num_spec_steps",
    "num_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "draft_acceptance_rate",
    "mean_acceptance_length",
    "tokens_per_step",
    "acceptance_histogram",
    "acceptance_rate_per_position",
    "num_reused_tokens",
}


def example() -> RequestStats:
    """Drafts of 3, 2, 0 and 3 tokens, of which 3, 0, 0 and 1 are accepted."""
    stats = RequestStats()
    for num_drafted, num_accepted in ((3, 3), (2, 0), (0, 0), (3, 1)):
        stats.record_step(num_drafted, num_accepted, num_accepted + 1)
    return stats


def test_example_counted_by_hand() -> None:
    counts = example().counts(max_draft_len=4)
    assert {key: counts[key] for key in counts if key.startswith("num_")} == {
        "num_generated_tokens": 4 + 1 + 1 + 2,
        "num_steps": 4,
        "num_spec_steps": 3,
        "num_draft_tokens": 8,
        "num_accepted_draft_tokens": 4,
        "num_reused_tokens": 0,
        "num_drafts_per_position": [3, 3, 2, 0],
    }
    assert counts["draft_acceptance_rate"] == 4 / 8
    assert counts["mean_acceptance_length"] == 1 + 4 / 3
    assert counts["tokens_per_step"] == 8 / 4
    assert counts["acceptance_histogram"] == [1, 1, 0, 1, 0]
    assert counts["acceptance_rate_per_position"] == [2 / 3, 1 / 3, 1 / 2, None]


def test_keys_are_those_of_the_vocabulary() -> None:
    assert set(example().counts(4)) >= VOCABULARY_KEYS
    record = example().as_dict(4)
    assert set(record) == set(example().counts(4)) | {"ttft_s", "tpot_s", "latency_s"}


def test_rates_are_none_where_nothing_was_drafted() -> None:
    stats = RequestStats()
    stats.record_step(0, 0, 1)
    counts = stats.counts(max_draft_len=2)
    assert counts["draft_acceptance_rate"] is None
    assert counts["mean_acceptance_length"] is None
    assert counts["tokens_per_step"] == 1
    assert counts["acceptance_histogram"] == [0, 0, 0]
    assert counts["acceptance_rate_per_position"] == [None, None]
    assert RequestStats().counts(0)["tokens_per_step"] is None


def test_draft_accepted_and_cut_counts_what_was_kept() -> None:
    """Three accepted, the end id was the second: two kept."""
    stats = RequestStats()
    stats.record_step(3, 2, 2)
    counts = stats.counts(3)
    assert (counts["num_accepted_draft_tokens"], counts["acceptance_histogram"]) == (2, [0, 0, 1, 0])


def test_sum_is_that_of_one_request_with_all_steps() -> None:
    first, second, nothing = example(), RequestStats(num_reused_tokens=7), RequestStats()
    second.record_step(4, 4, 5)
    total = sum_stats([first, second, nothing]).counts(4)
    alone = example()
    alone.record_step(4, 4, 5)
    assert total == alone.counts(4) | {"num_reused_tokens": 7}
    assert first.counts(4) == example().counts(4)


def test_times_follow_their_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Submitted at 10 s, first token at 10.5, 5 tokens by the end at 12.5."""
    clock = iter([10.0, 10.5, 12.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    stats = RequestStats()
    assert (stats.ttft_s, stats.tpot_s, stats.latency_s) == (None, None, None)
    stats.start()
    stats.record_step(0, 0, 1)
    assert (stats.ttft_s, stats.tpot_s, stats.latency_s) == (0.5, None, None)
    stats.record_step(3, 3, 4)
    stats.finish()
    assert (stats.ttft_s, stats.tpot_s, stats.latency_s) == (0.5, 2.0 / 4, 2.5)


def test_one_token_has_no_time_per_further_token(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = RequestStats()
    stats.start()
    stats.record_step(0, 0, 1)
    stats.finish()
    assert stats.tpot_s is None and stats.latency_s is not None


def test_times_of_two_loops_add_up() -> None:
    times = LoopTimes(wall_s=10.0, draft_time_s=1.0, draft_model_time_s=0.5, target_time_s=6.0, num_iterations=3)
    times.add(LoopTimes(wall_s=20.0, draft_time_s=2.0, draft_model_time_s=0.25, target_time_s=7.0, num_iterations=4))
    assert times == LoopTimes(30.0, 3.0, 0.75, 13.0, 7)


def test_host_time_is_what_remains() -> None:
    assert LoopTimes(wall_s=10.0, draft_time_s=1.0, target_time_s=6.0).host_time_s == 3.0
