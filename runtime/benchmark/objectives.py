"""Service level objectives: which requests were answered fast enough."""

import math
from collections.abc import Sequence as Seq

from runtime.errors import UsageError

OBJECTIVES = ("ttft", "tpot", "e2el")


def parse_objectives(pairs: Seq[str]) -> dict[str, float]:
    """Milliseconds by metric, of words such as `ttft:200`; UsageError for what is none, or two for one metric."""
    objectives: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in OBJECTIVES or not 0 <= limit < math.inf:
            raise UsageError(
                f"not an objective of service: {pair}", hint="ttft, tpot or e2el with its milliseconds, as ttft:200"
            )
        if name in objectives:
            raise UsageError(f"two objectives for one metric: {pair}", hint="give one")
        objectives[name] = limit
    return objectives
