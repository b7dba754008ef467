"""Drafters side by side on recorded outputs, without a model: tokens per step, acceptance rate, cost of a proposal.

Every line of the traces has `prompt_ids`, `output_ids` and, if it likes, `category`. Public text is that of the lines
before. `times as fast` is by counts: steps without drafts over steps and drafted tokens, each at `--price` of a step.
The cost is that of a proposal after 50,000 tokens of history, made of the traces and growing by one to four
tokens at a time, with the pool as the replay left it. Half the lines are also counted apart from the other half.

    python -m scripts.bench.drafters TRACES [--max-draft-len 10] [--max-new-tokens N] [--price 0.04] [--json]
"""

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from runtime.core.request import Request, Sequence
from runtime.core.stats import RequestStats
from runtime.drafters.adaptive import AdaptiveDrafter
from runtime.drafters.chain import BestOf, FirstOf
from runtime.drafters.ngram import NgramLookup
from runtime.drafters.pool import NgramPool
from runtime.drafters.protocol import Drafter
from runtime.drafters.suffix import SuffixLookup
from runtime.measure.tuning.replay import replay
from runtime.text.trace_lines import Trace
from runtime.util.errors import SpecDecError

PRICE = 0.04
"""A draft token's price in steps, about the 101 M model's in float32."""


def automatic(drafter: Drafter, price: float) -> AdaptiveDrafter:
    """Its drafts cut to what pays at this price."""
    return AdaptiveDrafter(drafter, lambda batch_size, context_len, draft_len: 1 + price * draft_len)


def both(price: float) -> BestOf:
    """The drafts that `--drafters ngram,suffix` sends."""
    vocab_size = 2**31  # ids are not checked
    lookups: list[Drafter] = [NgramLookup(2), SuffixLookup()]
    return BestOf(lookups, [], lambda batch_size, context_len, draft_len: 1 + price * draft_len, vocab_size)


HISTORY, NUM_UNTIMED, NUM_TIMED = 50_000, 100, 1000
DRAFTERS: dict[str, Callable[[float], Drafter]] = {
    "n-gram 3, leftmost": lambda _: NgramLookup(3, ranking="leftmost"),
    "n-gram 3, oldest": lambda _: NgramLookup(3),
    "n-gram 3, recent": lambda _: NgramLookup(3, ranking="recent"),
    "n-gram 3, frequent": lambda _: NgramLookup(3, ranking="frequent"),
    "n-gram 6 to 3 recent, then 2 frequent": lambda _: FirstOf(
        [NgramLookup(6, min_matching_ngram_size=3, ranking="recent"), NgramLookup(2, ranking="frequent")]
    ),
    "suffix": lambda _: SuffixLookup(),
    "suffix, growth 4": lambda _: SuffixLookup(growth=4),
    "n-gram 2, auto": lambda price: automatic(NgramLookup(2), price),
    "suffix, auto": lambda price: automatic(SuffixLookup(), price),
    "both, auto": lambda price: automatic(both(price), price),
    "suffix, n-gram 2 where it finds none, auto": lambda price: automatic(
        FirstOf([SuffixLookup(), NgramLookup(2)]), price
    ),
    "n-gram 3, oldest, public": lambda _: NgramLookup(3, pool=NgramPool()),
    "n-gram 3, frequent, public": lambda _: NgramLookup(3, ranking="frequent", pool=NgramPool()),
    "suffix, public": lambda _: SuffixLookup(pool=NgramPool()),
    "suffix, growth 4, public": lambda _: SuffixLookup(growth=4, pool=NgramPool()),
    "suffix, auto, public": lambda price: automatic(SuffixLookup(pool=NgramPool()), price),
}


@dataclass(frozen=True)
class Settings:
    max_draft_len: int
    max_new_tokens: int | None
    price: float


def read_traces(path: Path) -> list[Trace]:
    """SpecDecError if there are none, or a line is no trace."""
    traces = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            traces.append(Trace(tuple(record["prompt_ids"]), tuple(record["output_ids"]), record.get("category")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecDecError(
            f"cannot read traces ({type(error).__name__}: {error}): {path}",
            hint='one JSON object a line: {"prompt_ids": [...], "output_ids": [...], "category": "..."}',
        ) from error
    if not traces:
        raise SpecDecError(f"no traces in the file: {path}")
    return traces


def make_record(
    name: str, traces: list[Trace], stats: Seq[RequestStats], times: list[float], price: float
) -> dict[str, Any]:
    """Figures of one drafter, over all traces, by category and by half."""
    total = counts(stats)
    price_of_all = total["num_steps"] + price * total["num_draft_tokens"]
    categories = sorted({trace.category for trace in traces if trace.category is not None})
    by_category = {c: [s for t, s in zip(traces, stats, strict=True) if t.category == c] for c in categories}
    return {
        "drafter": name,
        **total,
        "times_as_fast": total["num_generated_tokens"] / price_of_all if price_of_all else None,
        "by_category": {c: counts(of_category) for c, of_category in by_category.items()},
        "by_half": [counts(stats[::2]), counts(stats[1::2])],
        "mean_us_per_step": mean(times),
        "median_us_per_step": median(times),
    }


def counts(stats: Iterable[RequestStats]) -> dict[str, Any]:
    total = dict.fromkeys(("num_generated_tokens", "num_steps", "num_draft_tokens", "num_accepted_draft_tokens"), 0)
    for one in stats:
        for key in total:
            total[key] += getattr(one, key)
    drafted, steps = total["num_draft_tokens"], total["num_steps"]
    return total | {
        "tokens_per_step": total["num_generated_tokens"] / steps if steps else None,
        "draft_acceptance_rate": total["num_accepted_draft_tokens"] / drafted if drafted else None,
    }


def time_proposals(traces: list[Trace], propose: Callable[[Sequence], object]) -> list[float]:
    """Microseconds of each proposal after HISTORY tokens; the first ones, which read the history, are left out."""
    text = itertools.cycle([token for trace in traces for token in (*trace.prompt_tokens, *trace.output_tokens)])
    sequence = Sequence.start(Request(-1, tuple(itertools.islice(text, HISTORY)), 10 * HISTORY))
    rng, times = random.Random(0), []
    for _ in range(NUM_UNTIMED + NUM_TIMED):
        sequence.tokens.extend(itertools.islice(text, rng.randint(1, 4)))
        start = time.perf_counter()
        propose(sequence)
        times.append((time.perf_counter() - start) * 1e6)
    return times[NUM_UNTIMED:]


def measure(traces: list[Trace], settings: Settings) -> Iterable[dict[str, Any]]:
    for name, make in DRAFTERS.items():
        drafter = make(settings.price)
        stats = replay(traces, drafter, settings.max_draft_len, max_new_tokens=settings.max_new_tokens)
        times = time_proposals(traces, lambda s, d=drafter: d.propose([s], settings.max_draft_len))
        yield make_record(name, traces, stats, times, settings.price)


def print_table(records: Iterable[dict[str, Any]], traces: list[Trace]) -> None:
    """Markdown, a row as soon as it is measured."""
    categories = sorted({trace.category for trace in traces if trace.category is not None})
    columns = [
        "drafter",
        "tokens per step",
        *categories,
        "even / odd lines",
        "acceptance rate",
        "times as fast",
        "µs per step",
    ]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for record in records:
        cells = [record["drafter"], f"{record['tokens_per_step']:.3f}"]
        cells += [f"{record['by_category'][c]['tokens_per_step']:.2f}" for c in categories]
        cells.append(" / ".join(f"{half['tokens_per_step'] or 1:.3f}" for half in record["by_half"]))
        cells += [f"{record[key] or 0:.3f}" for key in ("draft_acceptance_rate", "times_as_fast")]
        cells.append(f"{record['mean_us_per_step']:.0f}")
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path, help=".jsonl with prompt_ids, output_ids and category")
    parser.add_argument("--max-draft-len", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, help="budget of every request instead of its output's length")
    parser.add_argument("--price", type=float, default=PRICE, help="of a draft token, in steps")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    settings = Settings(arguments.max_draft_len, arguments.max_new_tokens, arguments.price)
    try:
        traces = read_traces(arguments.traces)
    except SpecDecError as error:
        parser.exit(1, f"error: {error.message}\nhint: {error.hint}\n")
    if arguments.json:
        print(
            json.dumps(
                {"settings": vars(settings), "num_traces": len(traces), "drafters": list(measure(traces, settings))}
            )
        )
    else:
        print_table(measure(traces, settings), traces)


if __name__ == "__main__":
    main()
