"""A share of scripts/campaigns/distributions.py, and that it finds what is wrong."""

from typing import Any

import pytest

from runtime.core.request import Draft, Sequence
from runtime.text.corpus import Corpus
from scripts.campaigns.distributions import (
    SAMPLINGS,
    SMALLEST_P_VALUE,
    Drawing,
    adapted,
    make_corpus,
    make_drafter,
    make_target,
    measure,
)

NUM_TEXTS = 1000
FOUND = 0.2
"""Total variation distance that so many texts show with 99 %; the campaign's show less."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.one_in(13)
@pytest.mark.parametrize(
    ("drafter", "lengths", "loop", "sampling"),
    [
        ("suffix, pool", "auto", "leader", "penalties"),
        # Draws by tokens are compared with Hugging Face's one by one in `test_sampling.py`.
        pytest.param("draft model", "fixed", "orchestrator", "cuts", marks=pytest.mark.slow),
        ("draft model by logits", "auto", "leader", "plain"),
        ("draft model by logits", "fixed", "orchestrator", "penalties"),
        ("chain", "fixed", "leader", "both"),
        ("custom by probs", "fixed", "orchestrator", "cuts"),
        ("self", "auto", "orchestrator", "both"),
        ("self by logits", "fixed", "leader", "penalties"),
        ("self by logits", "auto", "orchestrator", "plain"),
        ("self by confidence_stop", "fixed", "orchestrator", "cuts"),
        ("self by confidence_stop", "auto", "leader", "penalties"),
        ("chain with self", "fixed", "leader", "cuts"),
        ("parallel by logits", "fixed", "leader", "plain"),
        ("parallel by confidence_stop", "auto", "orchestrator", "penalties"),
    ],
)
def test_next_three_tokens_follow_the_targets_distribution(
    drafter: str, lengths: str, loop: str, sampling: str, corpus: Corpus
) -> None:
    engine = make_target()
    opened: Any = make_drafter(drafter, corpus, engine)
    fit = measure(adapted(opened) if lengths == "auto" else opened, loop, SAMPLINGS[sampling], NUM_TEXTS, engine)
    assert fit.p_value > SMALLEST_P_VALUE
    assert fit.detectable is not None and fit.detectable < FOUND
    assert 0 < fit.num_accepted < fit.num_drafted


@pytest.mark.slow
def test_automatic_lengths_of_drafts_that_end_at_an_end_id(corpus: Corpus) -> None:
    drafter: Any = make_drafter("custom by probs", corpus, make_target())
    assert measure(adapted(drafter), "leader", SAMPLINGS["plain"], 2 * NUM_TEXTS).p_value > SMALLEST_P_VALUE


class Boaster:
    """Says that its tokens were drawn evenly, which they were not."""

    def __init__(self) -> None:
        self.drawing = Drawing(gives_probs=True)

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        drafts = self.drawing.propose(sequences, max_draft_len)
        return [Draft(d.tokens, None if d.probs is None else 0 * d.probs + 0.25) for d in drafts]

    def forget(self, request_id: int) -> None:
        """Nothing is kept."""


def test_wrong_probabilities_are_found() -> None:
    assert measure(Boaster(), "leader", SAMPLINGS["plain"], NUM_TEXTS // 3).p_value < SMALLEST_P_VALUE
