"""Counts and rates against an example counted by hand, and the keys that vocabulary and other tools expect."""

import random

import pytest

from runtime.core.stats import RequestStats, sum_stats


def test_example_counted_by_hand() -> None:
    """Drafts of 3, 2, 0 and 3 tokens, of which 3, 0, 0 and 1 are accepted."""
    stats = RequestStats()
    for num_drafted, num_accepted in ((3, 3), (2, 0), (0, 0), (3, 1)):
        stats.record_step(num_drafted, num_accepted, num_accepted + 1)
    counts = stats.counts(max_draft_len=4)
    assert set(stats.as_dict(4)) == set(counts) | {"ttft_s", "tpot_s", "latency_s"}
    assert {key: counts[key] for key in counts if key.startswith("num_")} == {
        "num_generated_tokens": 4 + 1 + 1 + 2,
        "num_steps": 4,
        "num_spec_steps": 3,
        "num_draft_tokens": 8,
        "num_accepted_draft_tokens": 4,
        "num_reused_tokens": 0,
        "num_drafts_per_position": [3, 3, 2, 0],
        "num_spec_tokens": 4,
    }
    assert counts["draft_acceptance_rate"] == 4 / 8
    assert counts["mean_acceptance_length"] == 1 + 4 / 3
    assert counts["tokens_per_step"] == 8 / 4
    assert counts["acceptance_histogram"] == [1, 1, 0, 1, 0]
    assert counts["acceptance_rate_per_position"] == [2 / 3, 1 / 3, 1 / 2, None]


def test_vllms_keys_follow_from_the_recorded_steps() -> None:
    """Definitions of its page on acceptance metrics, over the random steps of a sum."""
    generator = random.Random(1)
    all_stats, steps = [RequestStats() for _ in range(3)], list[tuple[int, int]]()
    for stats in all_stats:
        for _ in range(40):
            num_drafted = generator.randrange(6)
            step = num_drafted, generator.randint(0, num_drafted)
            stats.record_step(*step, step[1] + 1)
            steps.append(step)
    snapshot = all_stats[0].copy()
    before = snapshot.speculation_record(5)
    all_stats[0].record_step(5, 5, 6)
    steps.append((5, 5))
    assert snapshot.speculation_record(5) == before
    found = sum_stats(all_stats).speculation_record(5)
    drafts = [(drafted, accepted) for drafted, accepted in steps if drafted]
    num_drafted, num_accepted = (sum(column) for column in zip(*drafts, strict=True))
    assert found == {
        "mean_acceptance_length": 1 + num_accepted / len(drafts),
        "draft_acceptance_rate": num_accepted / num_drafted,
        "acceptance_histogram": [sum(accepted == j for _, accepted in drafts) for j in range(6)],
        "acceptance_histogram_by_draft_length": {
            str(k): [drafts.count((k, j)) for j in range(k + 1)] for k in range(1, 6)
        },
        "num_spec_steps": len(drafts),
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_drafted,
        "num_spec_tokens": 5,
    }
    assert RequestStats().speculation_record(2)["acceptance_histogram"] == [0, 0, 0]


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
