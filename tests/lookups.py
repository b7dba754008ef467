"""Every kind of lookup, and what they are put together in, for tests that hold for all of them.

A lookup of which no variation is named here is there by its spec.
"""

from collections.abc import Callable
from typing import Any

from runtime.drafters.adaptive import AdaptiveDrafter
from runtime.drafters.chain import FirstOf
from runtime.drafters.ngram import NgramLookup
from runtime.drafters.ngram_pool import NgramPool
from runtime.drafters.owner_pools import OwnerPools, PooledLookup
from runtime.drafters.protocol import Drafter
from runtime.drafters.specs import lookups
from runtime.drafters.suffix import SuffixLookup

MAKE_DRAFTER: dict[str, Callable[[], Drafter]] = {
    "oldest": lambda: NgramLookup(3),
    "leftmost": lambda: NgramLookup(3, ranking="leftmost"),
    "recent": lambda: NgramLookup(3, ranking="recent"),
    "frequent": lambda: NgramLookup(3, ranking="frequent"),
    "frequent, from 2 tokens": lambda: NgramLookup(4, min_matching_ngram_size=2, ranking="frequent"),
    "frequent, public": lambda: NgramLookup(3, ranking="frequent", pool=NgramPool()),
    "suffix": lambda: SuffixLookup(),
    "suffix, public": lambda: SuffixLookup(pool=NgramPool()),
    "suffix, small pool": lambda: SuffixLookup(pool=NgramPool(max_tokens=30)),
    "suffix, owner": lambda: PooledLookup(SuffixLookup(), OwnerPools()),
    "adaptive": lambda: AdaptiveDrafter(SuffixLookup(), lambda batch_size, context_len, draft_len: 1 + 0.1 * draft_len),
    "adaptive, public": lambda: AdaptiveDrafter(
        NgramLookup(3, pool=NgramPool()), lambda batch_size, context_len, draft_len: 1 + 0.004 * draft_len * batch_size
    ),
    "chain": lambda: FirstOf([NgramLookup(4, min_matching_ngram_size=3), SuffixLookup(pool=NgramPool())]),
}


def by_spec(spec: Callable[..., Any]) -> Callable[[], Drafter]:
    return lambda: spec().lookup(None)  # type: ignore[no-any-return]


_NAMED = {type(make()) for make in MAKE_DRAFTER.values()}
MAKE_DRAFTER |= {spec.description.name: make for spec in lookups() if type((make := by_spec(spec))()) not in _NAMED}
