"""ROUGE scores against hand-worked examples and the `rouge_score` package used directly."""

import random

import numpy as np
import pytest
from sentences import Said

from commands.summarize.rouge import ROUGE_TYPES, rouge_scores
from runtime.util.errors import SpecDecError

WORDS = [
    "the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "table", "red", "blue", "and", "then", "it", "was",
]  # fmt: skip


def random_texts(count: int, seed: int) -> list[str]:
    generator = random.Random(seed)
    return [
        "\n".join(" ".join(generator.choices(WORDS, k=generator.randint(1, 9))) for _ in range(3)) for _ in range(count)
    ]


def reference_scores(predictions: list[str], references: list[str]) -> dict[str, float]:
    """Compute as evaluate's rouge.py does, in plain calls, seeded as TensorRT-LLM's summarize.py seeds it."""
    from rouge_score import rouge_scorer, scoring

    scorer = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"])
    aggregator = scoring.BootstrapAggregator()
    for prediction, reference in zip(predictions, references, strict=True):
        aggregator.add_scores(scorer.score(target=reference, prediction=prediction))
    state = np.random.get_state()
    np.random.seed(0)
    result = aggregator.aggregate()
    np.random.set_state(state)
    return {key: score.mid.fmeasure * 100 for key, score in result.items()}


def test_scores_equal_evaluates_own_computation_exactly() -> None:
    predictions, references = random_texts(20, seed=1), random_texts(20, seed=2)
    assert rouge_scores(predictions, references) == reference_scores(predictions, references)


def test_same_texts_score_the_same_whatever_the_global_seed_which_stays_untouched() -> None:
    predictions, references = random_texts(7, seed=3), random_texts(7, seed=4)
    np.random.seed(11)
    expected_draw = np.random.RandomState(11).rand()
    first = rouge_scores(predictions, references)
    assert np.random.rand() == expected_draw
    np.random.seed(12)
    assert rouge_scores(predictions, references) == first


def test_empty_prediction_scores_zero() -> None:
    assert rouge_scores([""], ["the cat"]) == dict.fromkeys(ROUGE_TYPES, 0)


def test_nothing_to_score_is_an_error(said: Said) -> None:
    with pytest.raises(SpecDecError) as error:
        rouge_scores([], [])
    said(error)
