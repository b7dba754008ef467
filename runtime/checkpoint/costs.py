"""Cost model of a step on the machine where the engine was built, interpolated from measurements.

A step takes longer with more sequences, longer contexts and more tokens in each sequence. On a CPU a draft is not free:
a step of eleven tokens may take twice as long as a step of one token.

`build` measures the costs and writes them into `config.json`. The costs of an engine that was made from a model are
measured when they are first needed, so that the first answer does not wait. They are kept in a file beside the engine's
directory; this file also says that the costs are measured this way.
"""

import dataclasses
import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from runtime.checkpoint.config import EngineConfig, StepCost, as_json, parse
from runtime.util.cache import OF_ALL_TO_READ, read_sealed, sealed
from runtime.util.errors import SpecDecError
from runtime.util.files import write_file

COSTS = ".costs"
"""Suffix of the file of measured step costs, beside an engine."""
Grid = dict[int, dict[int, float]]
"""Seconds by context length and by tokens of a row, for one batch size."""


class CostModel:
    """Seconds of a step, interpolated on straight lines between measurements and beyond them.

    With 10 ms for 1 token and 14 ms for 5, 3 tokens take 12 ms. If a measured step took longer than a larger step (with
    at least as many sequences, tokens and context), its time is lowered to the larger step's: a busy moment must have
    slowed it.
    """

    def __init__(self, costs: Iterable[StepCost], host_s: float) -> None:
        self.host_s = host_s
        self._grids: dict[int, Grid] = {}
        for cost, seconds in _without_busy_moments(list(costs)):
            self._grids.setdefault(cost.batch_size, {}).setdefault(cost.context_len, {})[cost.num_tokens] = seconds
        if not self._grids:
            raise SpecDecError(
                "the engine's step costs are unknown",
                hint="build it again, with memory free for a K/V cache to measure them with",
                code="no_step_costs",
            )
        self._known: dict[tuple[int, int, float], float] = {}

    def step_s(self, batch_size: int, context_len: int, num_tokens: float) -> float:
        """Seconds of the compiled step for `batch_size` rows, each with `num_tokens` new tokens after `context_len`
        tokens. `num_tokens` may be an average: rows are folded (`runtime.core.batch`), so short rows beside long rows
        cost little.
        """
        key = (batch_size, context_len, num_tokens)
        if key not in self._known:
            most = max(self._grids)
            if batch_size > most and len(self._grids) > 1:
                self._known[key] = self._beyond(most, batch_size, context_len, num_tokens)
            else:
                by_batch = {b: _in_grid(grid, context_len, num_tokens) for b, grid in self._grids.items()}
                self._known[key] = _on_lines(by_batch, batch_size)
        return self._known[key]

    def _beyond(self, most: int, batch_size: int, context_len: int, num_tokens: float) -> float:
        """Seconds of a step whose batch is larger than the largest measured batch, which has `most` rows.

        The cost of the same tokens in `most` longer rows, plus the price of each further row: how much longer `most`
        tokens take in `most` rows of one token than in fewer, longer rows. The price of a token is not extrapolated:
        beyond some number of tokens other kernels compute a step, and the price jumps.
        """
        fewer = max(size for size in self._grids if size < most)
        alone_s, together_s = (_in_grid(self._grids[size], context_len, most / size) for size in (most, fewer))
        row_s = max(alone_s - together_s, 0.0) / (most - fewer)
        seconds = _in_grid(self._grids[most], context_len, num_tokens * batch_size / most)
        return seconds + (batch_size - most) * row_s

    def iteration_s(self, batch_size: int, context_len: int, draft_len: float) -> float:
        """Seconds of a loop's iteration with drafts of `draft_len` tokens on average, without the time to draft."""
        return self.step_s(batch_size, context_len, draft_len + 1) + self.host_s

    def context_s(self, num_tokens: int, max_num_tokens: int) -> float:
        """Seconds to compute a prompt, `max_num_tokens` tokens at a time; the last chunk gives the first token."""
        starts = range(0, num_tokens, max_num_tokens)
        return sum(self.step_s(1, start, min(max_num_tokens, num_tokens - start)) for start in starts)


def _without_busy_moments(costs: list[StepCost]) -> Iterator[tuple[StepCost, float]]:
    """Each measured cost, and its seconds, lowered to the least time of any step with at least as much work."""
    import numpy as np  # which `--help` need not wait for

    sizes = np.array([(cost.batch_size, cost.context_len, cost.num_tokens) for cost in costs]).reshape(-1, 1, 3)
    seconds = np.array([cost.seconds for cost in costs])
    has_as_much = (sizes.reshape(1, -1, 3) >= sizes).all(axis=-1)
    return zip(costs, np.where(has_as_much, seconds, np.inf).min(axis=-1, initial=np.inf).tolist(), strict=True)


def _in_grid(grid: Grid, context_len: int, num_tokens: float) -> float:
    """Seconds after `context_len` tokens by one batch size's measurements. Chunks of prompts are measured after fewer
    context lengths than generation steps: context lengths without a row of at least `num_tokens` do not count.
    """
    rows = {c: row for c, row in grid.items() if max(row) >= num_tokens} or grid
    return _on_lines({c: _on_lines(row, num_tokens) for c, row in rows.items()}, context_len)


def _on_lines(points: dict[int, float], x: float) -> float:
    """The value at x on the line through the two nearest points, but at least half of the smallest value, so that noise
    cannot extend a line down to zero.
    """
    xs = sorted(points)
    if len(xs) == 1:
        return points[xs[0]]
    i = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    left, right = xs[i - 1], xs[i]
    value = points[left] + (points[right] - points[left]) * (x - left) / (right - left)
    return max(value, min(points.values()) / 2)


@dataclass(frozen=True)
class MeasuredCosts:
    """The measured fields of an engine's configuration."""

    step_costs: tuple[StepCost, ...] = ()
    host_s: float = 0.0
    self_draft_costs: tuple[StepCost, ...] = ()

    @staticmethod
    def of(config: EngineConfig) -> "MeasuredCosts":
        return MeasuredCosts(config.step_costs, config.host_s, config.self_draft_costs)


def keep_costs(engine_dir: Path, costs: MeasuredCosts) -> None:
    """Write the costs measured so far; if they cannot be written, they are measured again next time."""
    with suppress(OSError):
        write_file(_file(engine_dir), sealed(json.dumps(as_json(costs)).encode()), OF_ALL_TO_READ)


def are_measured_when_asked_for(engine_dir: Path) -> bool:
    return _file(engine_dir).is_file()


def with_kept_costs(config: EngineConfig, engine_dir: Path) -> EngineConfig:
    """The configuration with the costs measured since the engine was built, if there are any."""
    costs = kept_costs(engine_dir)
    return config if costs is None else dataclasses.replace(config, **vars(costs))


def kept_costs(engine_dir: Path) -> MeasuredCosts | None:
    """Step costs in the `.costs` file beside an engine's directory. None if there is no such file, or if it is damaged
    or of another version: costs are then measured again. SpecDecError if other users may write a file in the cache.
    """
    data = read_sealed(_file(engine_dir))
    if data is None:
        return None
    try:
        return parse(MeasuredCosts, json.loads(data), str(_file(engine_dir)))
    except (ValueError, SpecDecError):  # another version wrote it
        return None


def _file(engine_dir: Path) -> Path:
    return engine_dir.with_name(f"{engine_dir.name}{COSTS}")
