"""The joint distribution of a text's next three tokens, with every drafter, against brute force on an exact model.

python -m scripts.campaigns.distributions [--texts 4000] [--drafters custom ...] [--samplings plain ...]

Drafters, fixed and automatic draft lengths, both loops, penalties and cuts, all with all. The costs that automatic
lengths are chosen by are the worst that could be: a draft of one token or of three never pays, one of two always does,
so what is sent depends on what was drafted. Custom drafters stop at an end id, so their lengths depend on their tokens.
Each line says the total variation distance that would have been found with a probability of 99 %, of the fault that is
hardest to find (runtime/loop/lossless/chi_squared.py). Exit 1 if a distribution is another one (p below 0.00001).
"""

import argparse
import itertools
import math
import random
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.checkpoint.config import BuildConfig
from runtime.core.params import SamplingConfig
from runtime.core.request import Draft, Request, Sequence
from runtime.drafters.adaptive import AdaptiveDrafter
from runtime.drafters.chain import BestOf, DraftingModel, FirstOf
from runtime.drafters.confidence_stop import ConfidenceStop
from runtime.drafters.custom import guarded_drafter
from runtime.drafters.draft_target import DraftModel, SelfDraftModel
from runtime.drafters.ngram import CorpusLookup, NgramLookup
from runtime.drafters.ngram_pool import NgramPool
from runtime.drafters.parallel import ParallelDraftModel
from runtime.drafters.protocol import Drafter
from runtime.drafters.suffix import SuffixLookup
from runtime.engine.engine import Engine, KVCacheConfig
from runtime.loop import orchestrator, scheduler
from runtime.loop.lossless.chi_squared import detectable_total_variation, p_value_of
from runtime.text.corpus import Corpus, write_corpus
from scripts.campaigns.oracle import ExactModel, engine_config, one_by_one

VOCAB_SIZE, NUM_TOKENS, MAX_DRAFT_LEN = 4, 3, 3
END_ID = 3
PROMPT = (0, 1, 2, 0, 1, 2, 0, 1)
TARGET, OTHER = ExactModel(5, VOCAB_SIZE, 1.0), ExactModel(6, VOCAB_SIZE, 1.0)
SMALLEST_P_VALUE, CERTAINTY = 1e-5, 0.99
MIN_EXPECTED_COUNT = 5
DRAFTERS = (
    *("none", "ngram", "ngram, pool", "suffix", "suffix, pool", "corpus", "draft model", "draft model by logits"),
    *("chain", "custom", "custom by probs", "self", "self by logits", "self by confidence_stop"),
    *("chain with self", "parallel", "parallel by logits", "parallel by confidence_stop"),
)
LENGTHS = ("fixed", "auto")
LOOPS = {"orchestrator": orchestrator, "leader": scheduler}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "cuts": {"temperature": 1.3, "top_k": 3, "top_p": 0.9},
    "both": {"temperature": 0.8, "min_p": 0.3, "repetition_penalty": 0.8, "no_repeat_ngram_size": 3},
}
Text = tuple[int, ...]


class Fit(NamedTuple):
    """Fit of texts to their distribution."""

    p_value: float
    detectable: float | None
    num_texts: int
    num_drafted: int
    num_accepted: int


class Drawing:
    """A custom drafter that draws from another model, and ends a draft with the end id."""

    def __init__(self, *, gives_probs: bool) -> None:
        self.gives_probs = gives_probs

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [self._draft(sequence, max_draft_len) for sequence in sequences]

    def _draft(self, sequence: Sequence, max_draft_len: int) -> Draft:
        tokens, probs = list(sequence.tokens), []
        chance = random.Random(f"{sequence.request.sampling.random_seed} {len(tokens)}")
        while len(probs) < max_draft_len and (not probs or tokens[-1] != END_ID):
            probs.append(drawing_distribution(tuple(tokens)))
            tokens.append(chance.choices(range(VOCAB_SIZE), probs[-1].tolist())[0])
        return Draft(tokens[len(sequence.tokens) :], torch.stack(probs) if self.gives_probs and probs else None)

    def forget(self, request_id: int) -> None:
        """Nothing is kept."""


@cache
def drawing_distribution(tokens: Text) -> Tensor:
    return torch.softmax(OTHER.logits(tokens)[0].double(), dim=-1)


def worst_cost(batch_size: int, context_len: int, draft_len: float) -> float:
    """Seconds of a step: drafts of one token and of three cost what five steps do."""
    return (1.0, 5.0, 1.1, 5.0)[math.ceil(draft_len)]


def make_engine(model: ExactModel, max_draft_len: int) -> Engine:
    # One request at a time, or the others of a batch would hide what a draft's own length does.
    build = BuildConfig("none", 1, 16, 32, max_draft_len, 4, "draft_tokens_external")
    return Engine(engine_config(model, build), model, torch.device("cpu"), KVCacheConfig(), copy_step=OTHER)


def make_drafter(name: str, corpus: Corpus, engine: Engine) -> Drafter | None:
    """The engine is that of the target, which may draft for itself: its copy is as wrong as the draft model."""
    draft_model = DraftModel(make_engine(OTHER, 0), VOCAB_SIZE, use_logits=name in ("draft model by logits", "chain"))
    drafters: dict[str, Any] = {
        "none": None,
        "ngram": NgramLookup(3),
        "ngram, pool": NgramLookup(3, ranking="frequent", pool=NgramPool()),
        "suffix": SuffixLookup(),
        "suffix, pool": SuffixLookup(pool=NgramPool()),
        "corpus": CorpusLookup(corpus, 4),
        "draft model": draft_model,
        "draft model by logits": draft_model,
        "chain": FirstOf([NgramLookup(4, min_matching_ngram_size=3), draft_model]),
        "self": SelfDraftModel(engine, use_logits=False),
        "self by logits": SelfDraftModel(engine, use_logits=True),
        "chain with self": _choosing(SelfDraftModel(engine, use_logits=True)),
        "self by confidence_stop": SelfDraftModel(
            engine, use_logits=True, confidence_stop=ConfidenceStop(worst_cost, lambda *place: 0.3)
        ),
        "parallel": _parallel(use_logits=False),
        "parallel by logits": _parallel(use_logits=True),
        "parallel by confidence_stop": _parallel(ConfidenceStop(worst_cost, lambda *place: 0.3), use_logits=True),
        "custom": guarded_drafter("custom", Drawing(gives_probs=False)),
        "custom by probs": guarded_drafter("custom by probs", Drawing(gives_probs=True)),
    }
    drafter: Drafter | None = drafters[name]
    return drafter


def _parallel(confidence_stop: ConfidenceStop | None = None, *, use_logits: bool) -> ParallelDraftModel:
    """The draft model, whose second and third tokens are what it says behind mask tokens."""
    model = ParallelDraftModel(make_engine(OTHER, MAX_DRAFT_LEN), VOCAB_SIZE, 2, use_logits=use_logits)
    model.confidence_stop = confidence_stop
    return model


def _choosing(own: SelfDraftModel) -> Drafter:
    """Sends lookups as they are now, and has the copy look at them then."""
    model = DraftingModel(own, 3, lambda batch, context: 0.3, own)
    return BestOf([NgramLookup(4)], [model], lambda batch, context, draft_len: 1.0, VOCAB_SIZE)


def adapted(drafter: Drafter) -> Drafter:
    asks_for_what_pays = isinstance(drafter, DraftModel | SelfDraftModel)
    return AdaptiveDrafter(drafter, worst_cost, (lambda batch, context: 0.0) if asks_for_what_pays else None)


def next_token_distribution(tokens: Text, sampling: dict[str, Any]) -> list[float]:
    """Compute it by brute force: penalties, temperature, then the cuts, as docs/cli.md has them."""
    scores = TARGET.logits(tokens)[0].tolist()
    for token in set(tokens):
        penalty = sampling.get("repetition_penalty", 1.0)
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
        scores[token] -= sampling.get("presence_penalty", 0.0)
        scores[token] -= sampling.get("frequency_penalty", 0.0) * tokens.count(token)
    if size := sampling.get("no_repeat_ngram_size"):
        ngrams = {tokens[i : i + size] for i in range(len(tokens) - size + 1)}
        banned = [token for token in range(VOCAB_SIZE) if (*tokens[-size + 1 :], token) in ngrams]
    else:
        banned = []
    weights = [math.exp(score / sampling.get("temperature", 1.0)) for score in scores]
    for token in banned:
        weights[token] = 0.0
    order = sorted(range(VOCAB_SIZE), key=lambda token: -weights[token])
    kept = order[: sampling.get("top_k", VOCAB_SIZE)]
    sums = list(itertools.accumulate(weights[token] / sum(weights[i] for i in kept) for token in kept))
    kept = kept[: 1 + sum(total < sampling.get("top_p", 1.0) - 1e-9 for total in sums[:-1])]
    kept = [token for token in kept if weights[token] >= sampling.get("min_p", 0.0) * weights[order[0]]]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(VOCAB_SIZE)]


def text_distribution(sampling: dict[str, Any]) -> dict[Text, float]:
    """Each text of three tokens, or of fewer up to an end id, and its probability."""
    found: dict[Text, float] = {}
    texts: dict[Text, float] = {(): 1.0}
    for _ in range(NUM_TOKENS):
        longer: dict[Text, float] = {}
        for text, probability in texts.items():
            for token, share in enumerate(next_token_distribution((*PROMPT, *text), sampling)):
                place = found if token == END_ID or len(text) + 1 == NUM_TOKENS else longer
                if share:
                    place[*text, token] = probability * share
        texts = longer
    return found


def make_target() -> Engine:
    return make_engine(TARGET, MAX_DRAFT_LEN)


def measure(
    drafter: Drafter | None, loop: str, sampling: dict[str, Any], num_texts: int, engine: Engine | None = None
) -> Fit:
    """Generate a token more than is looked at, so that a draft of three tokens fits, and compare."""
    config = {"top_k": 0} | sampling
    requests = [
        Request(
            i,
            PROMPT,
            NUM_TOKENS + 1,
            frozenset([END_ID]),
            sampling=SamplingConfig(**config, random_seed=i),
        )
        for i in range(num_texts)
    ]
    counts: Counter[Text] = Counter()
    num_drafted = num_accepted = 0
    steps = LOOPS[loop].generate(engine or make_target(), requests, drafter, MAX_DRAFT_LEN if drafter else 0)
    for sequence, _ in steps:
        if sequence.finish_reason is not None:
            counts[tuple(sequence.output_tokens[:NUM_TOKENS])] += 1
            num_drafted += sequence.stats.num_draft_tokens
            num_accepted += sequence.stats.num_accepted_draft_tokens
    statistic, degrees = chi_squared(counts, text_distribution(sampling))
    detectable = detectable_total_variation(num_texts, degrees, SMALLEST_P_VALUE, CERTAINTY)
    return Fit(p_value_of(statistic, degrees), detectable, num_texts, num_drafted, num_accepted)


def chi_squared(counts: Counter[Text], distribution: dict[Text, float]) -> tuple[float, int]:
    """Statistic and degrees of freedom; texts too rare for a cell of their own share one."""
    num_texts = counts.total()
    if counts.keys() - distribution.keys():
        return math.inf, 1
    cells: dict[Text, tuple[int, float]] = {}
    for text, probability in distribution.items():
        cell = text if probability * num_texts >= MIN_EXPECTED_COUNT else ()
        counted, expected = cells.get(cell, (0, 0.0))
        cells[cell] = counted + counts[text], expected + probability * num_texts
    return sum((n - expected) ** 2 / expected for n, expected in cells.values()), len(cells) - 1


def make_corpus(directory: Path) -> Corpus:
    """Texts that the target would write."""
    documents = [(*PROMPT, *one_by_one(TARGET, Request(0, (*PROMPT, token), 12))) for token in range(VOCAB_SIZE)]
    write_corpus(directory / "corpus", documents, vocab_size=VOCAB_SIZE, tokenizer_digest="none", replace=False)
    return Corpus.open(directory / "corpus")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=4000)
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=DRAFTERS)
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=LENGTHS)
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=LOOPS)
    parser.add_argument("--samplings", nargs="+", choices=SAMPLINGS, default=SAMPLINGS)
    options = parser.parse_args()
    num_wrong = num_all = 0
    with tempfile.TemporaryDirectory(prefix="distributions-") as directory:
        corpus = make_corpus(Path(directory))
        for case in itertools.product(options.drafters, options.lengths, options.loops, options.samplings):
            name, lengths, loop, sampling = case
            engine = make_target()
            drafter = make_drafter(name, corpus, engine)
            if lengths == "auto":
                if drafter is None:
                    continue
                drafter = adapted(drafter)
            fit = measure(drafter, loop, SAMPLINGS[sampling], options.texts, engine)
            num_all += 1
            num_wrong += fit.p_value < SMALLEST_P_VALUE
            found = "-" if fit.detectable is None else f"{fit.detectable:.3f}"
            said = "ANOTHER DISTRIBUTION" if fit.p_value < SMALLEST_P_VALUE else ""
            print(
                f"{name:22} {lengths:6} {loop:13} {sampling:10} p {fit.p_value:8.2g}  would find {found}  "
                f"accepted {fit.num_accepted:,}/{fit.num_drafted:,} {said}",
                flush=True,
            )
    print(f"{num_wrong} of {num_all} are of another distribution")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
