"""Every kind of lookup, and what they are put together in, for tests that hold for all of them."""

from collections.abc import Callable

from runtime.drafters.adaptive import AdaptiveDrafter
from runtime.drafters.chain import ChainDrafter
from runtime.drafters.ngram import NgramDrafter
from runtime.drafters.pool import NgramPool
from runtime.drafters.protocol import Drafter
from runtime.drafters.suffix import SuffixDrafter

MAKE_DRAFTER: dict[str, Callable[[], Drafter]] = {
    "oldest": lambda: NgramDrafter(3),
    "leftmost": lambda: NgramDrafter(3, ranking="leftmost"),
    "recent": lambda: NgramDrafter(3, ranking="recent"),
    "frequent": lambda: NgramDrafter(3, ranking="frequent"),
    "frequent, from 2 tokens": lambda: NgramDrafter(4, min_matching_ngram_size=2, ranking="frequent"),
    "frequent, public": lambda: NgramDrafter(3, ranking="frequent", pool=NgramPool()),
    "suffix": lambda: SuffixDrafter(),
    "suffix, growth": lambda: SuffixDrafter(growth=2),
    "suffix, public": lambda: SuffixDrafter(pool=NgramPool()),
    "suffix, small pool": lambda: SuffixDrafter(pool=NgramPool(max_tokens=30)),
    "adaptive": lambda: AdaptiveDrafter(
        SuffixDrafter(), lambda batch_size, context_len, draft_len: 1 + 0.1 * draft_len
    ),
    "adaptive, public": lambda: AdaptiveDrafter(
        NgramDrafter(3, pool=NgramPool()), lambda batch_size, context_len, draft_len: 1 + 0.004 * draft_len * batch_size
    ),
    "chain": lambda: ChainDrafter([NgramDrafter(4, min_matching_ngram_size=3), SuffixDrafter(pool=NgramPool())]),
}
