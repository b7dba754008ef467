"""Automatic draft lengths never lose more than two hundredths, in the currency of prices that `build` measured.

Steps are replayed and priced: no clock is looked at. `step_prices.json` holds [batch size, context, tokens of a row,
microseconds] as measured on 2 cores of an AMD EPYC (Zen 4); steps of more than 64 tokens are suddenly dearer there.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.checkpoint.config import StepCost
from runtime.checkpoint.costs import CostModel
from runtime.drafters.adaptive import AdaptiveDrafter
from runtime.drafters.chain import BestOf
from runtime.drafters.ngram import NgramLookup
from runtime.drafters.protocol import Drafter
from runtime.drafters.suffix import SuffixLookup
from runtime.measure.tuning.replay import replay_batches
from runtime.measure.tuning.search import step_s
from runtime.text.trace_lines import Trace

DATA = Path(__file__).parents[2] / "data"
PRICES = json.loads((DATA / "step_prices.json").read_text())
MOST_LOST = 0.02
NUM_TOKENS, MAX_DRAFT_LEN = 64, 10
MAKE: dict[str, Callable[[CostModel], Drafter]] = {
    "n-gram": lambda costs: NgramLookup(2),
    "suffix": lambda costs: SuffixLookup(),
    "both": lambda costs: BestOf([NgramLookup(2), SuffixLookup()], [], costs.iteration_s, 2**31),
}


def cost_model(name: str) -> CostModel:
    table = PRICES[name]
    steps = [StepCost(batch, context, tokens, us / 1e6) for batch, context, tokens, us in table["steps"]]
    return CostModel(steps, table["host_us"] / 1e6)


def recorded(category: str) -> list[Trace]:
    rows = [json.loads(line) for line in (DATA / "traces.jsonl").read_text().splitlines()]
    traces = [Trace(tuple(row["prompt_ids"]), tuple(row["output_ids"]), row["category"]) for row in rows]
    return [trace for trace in traces if trace.category == category] * 3


def drawn(num_words: int) -> list[Trace]:
    """Traces of so many words, each as likely: the fewer, the more often the last few occurred before by chance."""
    words = random.Random(num_words)
    texts = [tuple(words.randrange(num_words) for _ in range(200)) for _ in range(16)]
    return [Trace(text[: 200 - NUM_TOKENS], text[200 - NUM_TOKENS :]) for text in texts]


TEXTS = {
    "copies": lambda: recorded("digest"),
    "describes": lambda: recorded("describe"),
    "30 words": lambda: drawn(30),
    "3 words": lambda: drawn(3),
    "half and half": lambda: [trace for pair in zip(recorded("digest"), drawn(30), strict=False) for trace in pair],
}


def seconds(traces: list[Trace], drafter: Drafter | None, costs: CostModel, batch_size: int) -> float:
    steps = replay_batches(traces, drafter, MAX_DRAFT_LEN, batch_size).steps
    return sum(step_s(step, costs, 512) for step in steps if not step.is_first)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("drafter", MAKE)
@pytest.mark.parametrize("batch_size", [1, 4, 16])
@pytest.mark.parametrize("prices", PRICES)
@pytest.mark.parametrize("text", TEXTS)
def test_automatic_is_never_slower_than_no_drafter(text: str, prices: str, batch_size: int, drafter: str) -> None:
    costs, traces = cost_model(prices), TEXTS[text]()
    automatic = seconds(traces, AdaptiveDrafter(MAKE[drafter](costs), costs.iteration_s), costs, batch_size)
    assert automatic <= seconds(traces, None, costs, batch_size) * (1 + MOST_LOST)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("prices", PRICES)
@pytest.mark.parametrize("text", TEXTS)
def test_both_lookups_are_as_fast_as_the_better_one(text: str, prices: str, batch_size: int) -> None:
    """Nearly: which that is has to be learned."""
    costs, traces = cost_model(prices), TEXTS[text]()
    each = {
        name: seconds(traces, AdaptiveDrafter(make(costs), costs.iteration_s), costs, batch_size)
        for name, make in MAKE.items()
    }
    assert each["both"] <= min(each["n-gram"], each["suffix"]) * 1.04


@pytest.mark.parametrize("prices", PRICES)
def test_where_fixed_drafts_lose_automatic_ones_gain(prices: str) -> None:
    """Sixteen at once, half of which copy: all of every draft costs more than it gains."""
    costs, traces = cost_model(prices), TEXTS["half and half"]()
    none = seconds(traces, None, costs, 16)
    assert seconds(traces, NgramLookup(2), costs, 16) > none
    assert seconds(traces, AdaptiveDrafter(NgramLookup(2), costs.iteration_s), costs, 16) < none * 0.99
