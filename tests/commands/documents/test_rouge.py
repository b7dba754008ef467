"""ROUGE scores against hand-worked examples and the `rouge_score` package used directly."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sentences import Said
from waiting import HANG_S

from commands.summarize.rouge import ROUGE_TYPES, rouge_scores
from runtime.util.errors import SpecDecError

ROOT = Path(__file__).parents[3]
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


def test_cat_sat_scores_equal_the_values_worked_by_hand() -> None:
    # 3 of 3 words and 2 of 2 bigrams of the prediction occur; 3 of 6 and 2 of 5 of the reference do.
    # F1 = 2PR/(P+R): P=1, R=1/2 -> 2/3; P=1, R=2/5 -> 4/7. The longest common subsequence is all 3 words.
    scores = rouge_scores(["the cat sat"], ["the cat sat on the mat"])
    assert scores == pytest.approx({"rouge1": 200 / 3, "rouge2": 400 / 7, "rougeL": 200 / 3, "rougeLsum": 200 / 3})


def test_word_order_counts_for_rouge_l_and_not_for_rouge_1() -> None:
    # Reversed: all 3 words match, no bigram does, and the longest common subsequence has 1 of 3 words.
    scores = rouge_scores(["sat cat the"], ["the cat sat"])
    assert scores == pytest.approx({"rouge1": 100, "rouge2": 0, "rougeL": 100 / 3, "rougeLsum": 100 / 3})


def test_repeated_words_count_at_most_as_often_as_in_the_reference() -> None:
    # "the" occurs 4 times in the prediction, twice in the reference: P = 2/4, R = 2/3, F1 = 4/7.
    assert rouge_scores(["the the the the"], ["the cat the"])["rouge1"] == pytest.approx(400 / 7)


def test_swapped_lines_lower_rouge_l_and_not_rouge_l_sum() -> None:
    # Lines are sentences to rougeLsum alone: each line matches whole there; in one run of words 2 of 4 do.
    scores = rouge_scores(["red cat\nblue dog"], ["blue dog\nred cat"])
    assert scores["rougeLsum"] == pytest.approx(100)
    assert scores["rougeL"] == pytest.approx(50)


def test_case_is_ignored_and_endings_are_not_stemmed() -> None:
    assert rouge_scores(["The CAT"], ["the cat"])["rouge1"] == pytest.approx(100)
    assert rouge_scores(["running"], ["run"])["rouge1"] == 0


def test_published_example_scores_one_hundred() -> None:
    # The example in the docstring of evaluate's rouge.py.
    texts = ["hello there", "general kenobi"]
    assert rouge_scores(texts, texts) == dict.fromkeys(ROUGE_TYPES, 100)


def test_scores_equal_evaluates_own_computation_exactly() -> None:
    predictions, references = random_texts(20, seed=1), random_texts(20, seed=2)
    assert rouge_scores(predictions, references) == reference_scores(predictions, references)


def test_score_is_the_median_of_a_thousand_bootstrap_means_and_not_the_mean() -> None:
    predictions, references = random_texts(9, seed=5), random_texts(9, seed=6)
    single = [
        rouge_scores([prediction], [reference])["rouge1"]
        for prediction, reference in zip(predictions, references, strict=True)
    ]
    draws = np.random.RandomState(0)
    means = [np.mean(draws.choice(single, size=9)) for _ in range(1000)]
    score = rouge_scores(predictions, references)["rouge1"]
    assert score == pytest.approx(np.median(means), abs=1e-9)
    assert 0.01 < abs(score - np.mean(single)) < 2


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


def test_unequal_counts_are_refused() -> None:
    with pytest.raises(AssertionError):
        rouge_scores(["a"], ["a", "b"])


TWO_PROCESSES = """
import os, sys
from commands.summarize.rouge import rouge_scores
assert "evaluate" not in sys.modules and "torch" not in sys.modules
import evaluate  # which takes seconds, once for both
children = []
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        print(rouge_scores(["the cat sat"] * 50, ["the cat sat on the mat"] * 50)["rouge1"], flush=True)
        os._exit(0)
    children.append(pid)
sys.exit(any(os.waitpid(pid, 0)[1] for pid in children))
"""


@pytest.mark.slow
def test_processes_score_at_once_offline_and_leave_no_file(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path / "home"),
        "TMPDIR": str(tmp_path / "tmp"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-c", TWO_PROCESSES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert [round(float(line), 6) for line in done.stdout.splitlines()] == [66.666667, 66.666667]
    assert list(tmp_path.rglob("*")) == [tmp_path / "tmp"]
