"""ROUGE scores of generated text, computed without access to a hub.

`evaluate.load("rouge")` downloads the metric's script, so this module holds the metric itself: an `evaluate.Metric`
over the `rouge_score` package with the settings of evaluate's own `metrics/rouge/rouge.py` (no stemmer, one reference
per prediction, bootstrap aggregation). It keeps two invariants: the same texts always give the same numbers, and
nothing is left on disk, so any number of processes may score at once.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from tempfile import TemporaryDirectory
from typing import Any

from runtime.util.errors import SpecDecError

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def rouge_scores(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """F-measures x 100 of `ROUGE_TYPES`, prediction i against reference i.

    A score is the median of 1,000 bootstrap means, not the mean of the samples: that is what evaluate's metric returns
    and TensorRT-LLM's `examples/summarize.py` prints. The draws are seeded with 0 as there; the global state of
    `np.random` is put back afterwards. `rougeLsum` takes each line as a sentence.

    Raises SpecDecError if there is nothing to score.
    """
    assert len(predictions) == len(references), (len(predictions), len(references))
    if not predictions:
        raise SpecDecError("no text to score with ROUGE", hint="generate at least one output")
    return dict(_scores(tuple(predictions), tuple(references)))


def num_without_letters(references: Iterable[str]) -> int:
    """Number of texts without a letter a to z: `rouge_score` drops all other characters, so their scores are
    meaningless.
    """
    return sum(re.search("[a-z]", reference.lower()) is None for reference in references)


@lru_cache  # resampling takes seconds, and systems that are lossless give the same texts
def _scores(predictions: tuple[str, ...], references: tuple[str, ...]) -> dict[str, float]:
    with TemporaryDirectory(prefix="specdec-rouge-") as directory:
        # Metric makes its cache directory even when it keeps the samples in memory.
        metric = _metric_class()(keep_in_memory=True, cache_dir=directory, seed=0)
        fmeasures = metric.compute(predictions=list(predictions), references=list(references))
    return {rouge_type: 100 * float(fmeasures[rouge_type]) for rouge_type in ROUGE_TYPES}


@contextmanager
def _hidden(name: str) -> Iterator[None]:
    """Make imports of a package fail within the block, as if it were not installed."""
    before = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]  # what the import system documents for it
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


def _metric_class() -> Any:
    """The metric's class. It is made on demand: its base class takes seconds to import, and `--help` must not wait."""
    import datasets
    import numpy as np
    from rouge_score import rouge_scorer, scoring

    with _hidden("transformers"):  # evaluate's evaluators import its pipelines, which takes seconds, and do without
        import evaluate

    class Aggregator(scoring.BootstrapAggregator):  # type: ignore[misc]  # rouge_score ships no types
        """`rouge_score`'s aggregator, drawing and averaging its 1,000 samples at once: the same bits, 30 times as
        fast.
        """

        def _bootstrap_resample(self, matrix: Any) -> Any:
            drawn = np.random.choice(len(matrix), size=(self._n_samples, len(matrix)))
            delta = (1 - self._confidence_interval) / 2
            return np.percentile(matrix[drawn].mean(axis=1), [100 * delta, 50, 100 * (1 - delta)], axis=0)

    class Rouge(evaluate.Metric):  # type: ignore[misc]  # evaluate ships no types
        def _info(self) -> Any:
            text = datasets.Value("string")
            return evaluate.MetricInfo(
                description="ROUGE F-measures, as evaluate's own metric computes them.",
                citation="Lin 2004, ROUGE: A Package for Automatic Evaluation of Summaries",
                inputs_description="One reference text for each prediction.",
                features=datasets.Features({"predictions": text, "references": text}),
            )

        def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
            scorer = rouge_scorer.RougeScorer(ROUGE_TYPES, use_stemmer=False)
            aggregator = Aggregator()
            for prediction, reference in zip(predictions, references, strict=True):
                aggregator.add_scores(scorer.score(reference, prediction))
            return {key: score.mid.fmeasure for key, score in aggregator.aggregate().items()}

    return Rouge
