"""ROUGE scores of generated text, computed where no hub can be reached.

`evaluate.load("rouge")` downloads the metric's script, and `evaluate` alone takes 4 s to import, so this module does
what the script does: scores of the `rouge_score` package (no stemmer, one reference per prediction), aggregated by
bootstrap. The same texts always give the same numbers.
"""

from collections.abc import Sequence
from functools import lru_cache

from runtime.errors import SpecDecError

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def rouge_scores(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """F-measures x 100 of `ROUGE_TYPES`, prediction i against reference i.

    A score is the median of 1,000 bootstrap means, not the mean of the samples: that is what evaluate's
    metric returns and TensorRT-LLM's `examples/summarize.py` prints. The draws are seeded with 0 as there;
    the global state of `np.random` is put back afterwards. `rougeLsum` takes each line as a sentence.

    Raises SpecDecError where there is nothing to score.
    """
    assert len(predictions) == len(references), (len(predictions), len(references))
    if not predictions:
        raise SpecDecError("no text to score with ROUGE", hint="generate at least one output")
    return dict(_scores(tuple(predictions), tuple(references)))


@lru_cache  # resampling takes seconds, and systems that are lossless give the same texts
def _scores(predictions: tuple[str, ...], references: tuple[str, ...]) -> dict[str, float]:
    import numpy as np  # on demand, with what scores: `--help` must not wait
    from rouge_score import rouge_scorer, scoring

    scorer = rouge_scorer.RougeScorer(ROUGE_TYPES, use_stemmer=False)
    aggregator = scoring.BootstrapAggregator()
    for prediction, reference in zip(predictions, references, strict=True):
        aggregator.add_scores(scorer.score(reference, prediction))
    state = np.random.get_state()
    np.random.seed(0)
    try:
        aggregated = aggregator.aggregate()
    finally:
        np.random.set_state(state)
    return {rouge_type: 100 * float(aggregated[rouge_type].mid.fmeasure) for rouge_type in ROUGE_TYPES}
