"""Service level objectives: which requests were answered fast enough."""

import math
from collections.abc import Sequence as Seq
from typing import Literal, get_args

from runtime.errors import UsageError

Objective = Literal["ttft", "tpot", "e2el"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


def parse_objectives(pairs: Seq[str]) -> dict[Objective, float]:
    """Milliseconds by metric, of words such as `ttft:200`; UsageError for what is none, or two for one metric."""
    objectives: dict[Objective, float] = {}
    for pair in pairs:
        word, _, value = pair.partition(":")
        name = next((one for one in OBJECTIVES if one == word), None)
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name is None or not 0 <= limit < math.inf:
            raise UsageError(
                f"not an objective of service: {pair}", hint="ttft, tpot or e2el with its milliseconds, as ttft:200"
            )
        if name in objectives:
            raise UsageError(f"two objectives for one metric: {pair}", hint="give one")
        objectives[name] = limit
    return objectives
