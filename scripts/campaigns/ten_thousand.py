"""10,000 requests in leader mode in one run, beside the same requests one by one.

python -m scripts.campaigns.ten_thousand [--requests 10000] [--pools 1 1.5 8] [--drafters none "ngram, pool"]

Prompts have 1 to 600 tokens; outputs end at budgets, end ids and stop words; some are sampled, with penalties and cuts.
The K/V cache has room for `pool` times the longest request. Every output must be what the exact model says of its text
alone (oracle.py); in the end every block is free again, and holds what it is published as; and resident memory is
within 2 % of what it was when the tenth part had finished. Exit 1 if one of these is not so.
"""

import argparse
import gc
import random
import sys
import time
from collections import Counter

import psutil

from runtime.checkpoint.config import BuildConfig
from runtime.core.params import GREEDY, SamplingConfig
from runtime.core.request import Request
from runtime.drafters.chain import FirstOf
from runtime.drafters.ngram import NgramLookup
from runtime.drafters.ngram_pool import NgramPool
from runtime.drafters.protocol import Drafter
from runtime.drafters.suffix import SuffixLookup
from runtime.engine.engine import KVCacheConfig
from runtime.loop import scheduler
from scripts.campaigns.cases import TARGET, VOCAB_SIZE, StopAt
from scripts.campaigns.oracle import CheckedEngine, one_by_one

MAX_PROMPT, MAX_NEW_TOKENS, MAX_DRAFT_LEN = 600, 24, 6
DRAFTERS = ("none", "ngram, pool", "suffix", "chain")


def make_request(number: int) -> Request:
    """Half of the prompts share a beginning with others, of any length."""
    chosen = random.Random(number)
    shared = random.Random(number % 20).choices(range(VOCAB_SIZE), k=MAX_PROMPT)
    length = chosen.randint(1, MAX_PROMPT)
    num_shared = chosen.choice([0, chosen.randint(0, length)])
    prompt = [*shared[:num_shared], *chosen.choices(range(VOCAB_SIZE), k=length - num_shared)]
    sampling = SamplingConfig(
        temperature=chosen.choice([0.7, 1.0]),
        top_k=chosen.choice([0, 5]),
        top_p=chosen.choice([1.0, 0.9]),
        repetition_penalty=chosen.choice([1.0, 1.2]),
        random_seed=number,
    )
    return Request(
        number,
        tuple(prompt),
        chosen.randint(1, MAX_NEW_TOKENS),
        end_ids=frozenset(chosen.choice([(), (), (chosen.randrange(VOCAB_SIZE),)])),
        stop_check=chosen.choice([None, None, StopAt(chosen.choices(range(VOCAB_SIZE), k=2))]),
        sampling=chosen.choice([GREEDY, GREEDY, sampling]),
    )


def make_engine(pool: float, *, reuse: bool = True) -> CheckedEngine:
    longest = MAX_PROMPT + MAX_NEW_TOKENS
    build = BuildConfig("aot", 8, MAX_PROMPT, longest + MAX_DRAFT_LEN, MAX_DRAFT_LEN, 16, "draft_tokens_external")
    return CheckedEngine(TARGET, build, KVCacheConfig(block_reuse=reuse, max_tokens=int(longest * pool)), 512)


def make_drafter(name: str) -> Drafter | None:
    match name:
        case "none":
            return None
        case "ngram, pool":
            return NgramLookup(3, ranking="frequent", pool=NgramPool(max_tokens=2000))
        case "suffix":
            return SuffixLookup()
    return FirstOf([NgramLookup(4, min_matching_ngram_size=3), SuffixLookup(pool=NgramPool(max_tokens=2000))])


def run(engine: CheckedEngine, drafter: Drafter | None, num_requests: int) -> tuple[Counter[str], list[str]]:
    """Counts, and what is not as it should be."""
    counts: Counter[str] = Counter()
    wrong = []
    requests = [make_request(i) for i in range(num_requests)]
    early_bytes = 0
    for sequence, _ in scheduler.generate(engine, requests, drafter, MAX_DRAFT_LEN if drafter else 0):
        if sequence.finish_reason is None:
            continue
        counts.update({"finished": 1, f"ended by {sequence.finish_reason}": 1, "tokens": sequence.num_generated})
        counts["accepted draft tokens"] += sequence.stats.num_accepted_draft_tokens
        counts["reused tokens"] += sequence.stats.num_reused_tokens
        if sequence.output_tokens != one_by_one(TARGET, sequence.request):
            wrong.append(f"output of request {sequence.request.id}")
        if counts["finished"] == num_requests // 10:
            early_bytes = resident_bytes()
    late_bytes = resident_bytes()
    counts["preempted"] = engine.calls.numbers["release"] - num_requests
    counts["KB at a tenth"], counts["KB at the end"] = early_bytes // 1000, late_bytes // 1000
    if counts["finished"] != num_requests:
        wrong.append("requests are lost")
    if abs(late_bytes - early_bytes) > 0.02 * early_bytes:
        wrong.append(f"resident memory went from {early_bytes / 1e6:.1f} to {late_bytes / 1e6:.1f} MB")
    engine.check_books()
    return counts, wrong


def resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--pools", type=float, nargs="+", default=[1, 1.5, 8])
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=["none", "ngram, pool"])
    options = parser.parse_args()
    any_wrong = False
    for pool in options.pools:
        for name in options.drafters:
            start = time.monotonic()
            counts, wrong = run(make_engine(pool), make_drafter(name), options.requests)
            print(f"cache of {pool} longest requests, drafter {name}, {time.monotonic() - start:.0f} s: {dict(counts)}")
            print("\n".join(wrong[:10]) or "all as one by one; blocks are accounted for; memory flat", flush=True)
            any_wrong |= bool(wrong)
    return 1 if any_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
