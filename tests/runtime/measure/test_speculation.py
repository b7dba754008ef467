"""Accounts of speculation by servers: vLLM's counters and records of responses, as those servers write them."""

from runtime.measure.benchmark.client import (
    SpeculationCounts,
    counts_of_prometheus,
    counts_of_response,
    total_counts,
)

# As vLLM 0.11 prints them, with two engines.
BEFORE = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a model, with } and position=\\"7\\""} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.758e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 4.0
vllm:generation_tokens_total{engine="0",model_name="m"} 99.0
"""
AFTER = """\
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 1.1e+02
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 330.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 162.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 88.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 54.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 20.0
"""


def test_what_counters_rose_by_is_what_this_run_did() -> None:
    before, after = counts_of_prometheus(BEFORE), counts_of_prometheus(AFTER)
    assert before is not None and after is not None
    assert after.since(before) == SpeculationCounts(100, 300, 150, (80, 50, 20))


def test_the_record_of_a_response_is_read() -> None:
    record = {
        "num_drafts": 4,
        "num_draft_tokens": 12,
        "num_accepted_tokens": 7,
        "acceptance_rate": 0.583,
        "accepted_per_position": [4, 2, 1],
        "tokens_per_step": 2.4,
    }
    chunk = {"choices": [], "usage": {"completion_tokens": 12}, "metrics": {"speculative_decoding": record}}
    assert counts_of_response(chunk) == SpeculationCounts(4, 12, 7, (4, 2, 1), 5.0)


def test_vllms_record_is_read_by_its_final_keys() -> None:
    """The example of vLLM's page on acceptance metrics: 39 drafts without an accepted token, 1 with one, 3 with all."""
    record = {
        "mean_acceptance_length": 1.2325581395348837,
        "draft_acceptance_rate": 0.07751937984496124,
        "acceptance_histogram": [39, 1, 0, 3],
        "num_spec_steps": 43,
        "num_accepted_draft_tokens": 10,
        "num_draft_tokens": 129,
        "num_spec_tokens": 3,
    }
    found = counts_of_response({"metrics": {"speculative_decoding": record}, "usage": {"completion_tokens": 53}})
    assert found == SpeculationCounts(43, 129, 10, (4, 3, 3), None)


def test_responses_are_summed_and_steps_are_known_where_all_tell() -> None:
    counts = [SpeculationCounts(4, 12, 7, (4, 2, 1), 5.0), SpeculationCounts(2, 4, 1, (1,), 3.0)]
    assert total_counts(counts) == SpeculationCounts(6, 16, 8, (5, 2, 1), 8.0)
    assert total_counts([*counts, SpeculationCounts(0, 0, 0)]).num_steps is None
