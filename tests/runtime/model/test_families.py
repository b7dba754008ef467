"""Greedy output equals Hugging Face `generate`, token for token, for every family that docs/models.md names."""

from pathlib import Path
from typing import Any

import pytest
from shared import shared_engine
from tiny import (
    ATTENTIONS,
    FAMILIES,
    OWN_ATTENTION,
    REPLACED,
    SLIDING_WINDOW,
    WITHOUT_ATTENTION,
    hf_greedy,
    make_config,
    make_model,
    repetitive_prompt,
)
from transformers import PreTrainedModel

from runtime.core.request import Request, Sequence
from runtime.core.stats import sum_stats
from runtime.drafters.ngram import NgramLookup
from runtime.engine.engine import Engine
from runtime.loop.orchestrator import generate
from runtime.model.model import probe_config
from runtime.util.files import read_json
from scripts.tools.families import POPULARITY, recorded

STORIES_DIR = Path(__file__).parents[3] / "../shared/data/stories260k"
NUM_NEW_TOKENS = 32


def run(engine: Engine, prompts: list[list[int]], num_new_tokens: int, *, ngram: bool) -> list[Sequence]:
    requests = [Request(i, tuple(prompt), num_new_tokens) for i, prompt in enumerate(prompts)]
    drafter = NgramLookup(2) if ngram else None
    finished = {s.request.id: s for s, _ in generate(engine, requests, drafter, 10) if s.finish_reason is not None}
    assert len(finished) == len(prompts)
    return [finished[i] for i in range(len(prompts))]


def check_greedy(engine: Engine, model: PreTrainedModel) -> None:
    """A batch of 3, without drafts and with n-gram drafts [10,2], of which some are accepted and some rejected."""
    vocab_size = model.config.vocab_size
    prompts = [repetitive_prompt(seed, length, vocab_size) for seed, length in ((0, 21), (1, 34), (2, 5))]
    assert all(len(prompt) + NUM_NEW_TOKENS > 4 * SLIDING_WINDOW for prompt in prompts)
    expected = [hf_greedy(model, prompt, NUM_NEW_TOKENS) for prompt in prompts]
    assert len({tuple(ids) for ids in expected}) == 3
    plain, speculative = (run(engine, prompts, NUM_NEW_TOKENS, ngram=ngram) for ngram in (False, True))
    for sequences in (plain, speculative):
        assert [s.output_tokens for s in sequences] == expected
    total = sum_stats(s.stats for s in speculative)
    assert 0 < total.num_accepted_draft_tokens < total.num_draft_tokens
    assert total.num_steps < sum_stats(s.stats for s in plain).num_steps


# Whose parts others have too, or that other tests compare with Hugging Face's.
LIKE_OTHERS = {
    *("llama", "opt", "qwen3.5"),  # by most tests, at every position by `test_build.py`, and by `test_mtp.py`
    "mpt",  # whose scores lose with distance, as Bloom's
    *REPLACED[1:],
    *("falcon-mamba", "gemma2", "qwen3", "mistral-sliding", "mixtral"),  # Mamba 2, Gemma 3 and Llama 4 have them
    "lfm2",  # Qwen3.5 has a convolution, too
    *("mistral", "qwen2", "qwen2-moe", "olmo2", "smollm3", "gpt-neo", "gpt-neox", "granite", "mamba", "phi3"),
}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LIKE_OTHERS else ())
        for name in (*FAMILIES, *ATTENTIONS, *OWN_ATTENTION, *REPLACED, *WITHOUT_ATTENTION)
    ],
)
def test_greedy_output_equals_hf(family: str, make_engine: Any) -> None:
    model = make_model(family)
    check_greedy(make_engine(model), model)


def test_families_that_people_run_most_are_recorded_as_equal() -> None:
    """Families of the first two tiers."""
    found = recorded()
    most = [found[family] for family, tier in POPULARITY.items() if tier < 3]
    assert len(most) > 30
    assert [one.family for one in most if one.verdict != "equal"] == []
    said = {(one.family, way): one.ways.get(way, "") for one in most for way in ("compiled", "self-draft", "int4")}
    assert {at: one for at, one in said.items() if one != "yes"} == {}


def test_sliding_window_of_each_layer_is_known() -> None:
    windows = {
        family: [layer.sliding_window for layer in probe_config(make_config(family)).layers]
        for family in ("mistral", "mistral-sliding", "gemma3")
    }
    assert windows == {
        "mistral": [None, None],
        "mistral-sliding": [SLIDING_WINDOW, SLIDING_WINDOW],
        "gemma3": [SLIDING_WINDOW, None, SLIDING_WINDOW],
    }


@pytest.mark.skipif(not STORIES_DIR.is_dir(), reason="shared data stories260k is absent")
def test_stories260k_equals_its_reference(shared: Path) -> None:
    reference = read_json(STORIES_DIR / "reference.json")
    with Engine.open(shared_engine(shared / "engines", STORIES_DIR)) as engine:
        (sequence,) = run(engine, [reference["prompt_ids"]], len(reference["greedy_ids"]), ngram=True)
    assert sequence.output_tokens == reference["greedy_ids"]
