"""Replays beyond a budget, and prompt lookup beside transformers' own and on Spec-Bench."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from runtime.core.request import Draft, Request, Sequence
from runtime.core.stats import sum_stats
from runtime.drafters.ngram import NgramLookup
from runtime.measure.tuning.replay import replay_batches
from runtime.text.trace_lines import Trace

SAMPLE = Path(__file__).parents[2] / "data" / "traces.jsonl"
"""Greedy outputs of the shipped model `demo`: its first articles, and one that is not let end and repeats itself."""
SPEC_BENCH = Path(__file__).parents[3] / "../shared/data/spec_bench/vicuna_traces.jsonl"


def read_traces(path: Path) -> list[Trace]:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Trace(tuple(one["prompt_ids"]), tuple(one["output_ids"]), one.get("category")) for one in records]


class Oracle:
    """Drafts what is right up to `num_right` tokens, then what is wrong."""

    def __init__(self, trace: Trace, num_right: int) -> None:
        self.trace, self.num_right = trace, num_right

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        (sequence,) = sequences
        right = list(self.trace.output_tokens[sequence.num_generated :][: self.num_right])
        return [Draft((right + [999] * max_draft_len)[:max_draft_len])]

    def forget(self, request_id: int) -> None:
        """Forget nothing."""


def test_budget_beyond_the_output_changes_what_is_drafted_and_no_step() -> None:
    trace = Trace((1, 2), tuple(range(10, 20)))
    (stats,) = replay_batches([trace], Oracle(trace, 3), 5, max_new_tokens=100).stats
    assert stats.per_step_drafted == [5, 5, 5] and stats.per_step_accepted == [3, 3, 2]
    assert (stats.num_steps, stats.num_generated_tokens) == (3, 10)
    (cut,) = replay_batches([trace], Oracle(trace, 3), 5, max_new_tokens=6).stats
    assert (cut.num_steps, cut.num_generated_tokens) == (2, 6)


@pytest.mark.parametrize("num_end_ids", [0, 2])
@pytest.mark.parametrize("max_ngram", [1, 3])
def test_leftmost_is_transformers_prompt_lookup(max_ngram: int, num_end_ids: int) -> None:
    """Draft for draft over the sample, at every step up to the budget; end ids are the commonest tokens."""
    traces, num_drafts, num_shorter = read_traces(SAMPLE), 0, 0
    common = Counter(token for trace in traces for token in trace.output_tokens).most_common(num_end_ids)
    end_ids = [token for token, _ in common]
    for trace in traces:
        theirs = PromptLookupCandidateGenerator(
            eos_token_id=torch.tensor(end_ids) if end_ids else None,
            num_output_tokens=10,
            max_matching_ngram_size=max_ngram,
            max_length=len(trace.prompt_tokens) + len(trace.output_tokens),
        )
        ours = NgramLookup(max_ngram, ranking="leftmost")
        request = Request(0, trace.prompt_tokens, len(trace.output_tokens), frozenset(end_ids))
        sequence = Sequence(request, list(trace.prompt_tokens))
        while sequence.num_remaining > 0:
            candidates, _ = theirs.get_candidates(torch.tensor([sequence.tokens]))
            (draft,) = ours.propose([sequence], 10)
            assert draft.tokens == candidates[0, len(sequence.tokens) :].tolist()
            num_drafts += bool(draft.tokens)
            num_shorter += 0 < len(draft.tokens) < 10
            right = trace.output_tokens[sequence.num_generated :]
            num_equal = next(
                (i for i, token in enumerate(draft.tokens) if right[i : i + 1] != (token,)), len(draft.tokens)
            )
            sequence.tokens += right[: num_equal + 1]
    assert num_drafts > 50 and num_shorter > 5


@pytest.mark.slow  # what it drafts is transformers' by the test above
@pytest.mark.skipif(not SPEC_BENCH.is_file(), reason="shared data spec_bench is absent")
def test_prompt_lookup_on_spec_bench_gives_the_published_figure() -> None:
    """1.755, of which Spec-Bench's own run gave 1.75, over 560 outputs of Vicuna 7B."""
    total = sum_stats(replay_batches(read_traces(SPEC_BENCH), NgramLookup(3, ranking="leftmost"), 10).stats).counts(10)
    assert total["tokens_per_step"] == pytest.approx(1.755, abs=0.001)
    assert total["draft_acceptance_rate"] == pytest.approx(0.122, abs=0.0005)
