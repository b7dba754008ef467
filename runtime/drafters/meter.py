"""Measures what drafts cost now, relative to the costs measured at build, and how long lookups take.

The costs were measured when the engine was built, in steps whose rows had equally long drafts, perhaps on a busier
machine. Here a line is fitted to the times of steps by least squares, with old times fading: a step's time against the
price of its drafts, both divided by the price of a step without drafts. The slope is the factor by which draft costs
are multiplied; it is divided by the line's value at 0 if all steps are slower than measured.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq

from runtime.core.request import Sequence

Clock = Callable[[], float]
"""Function that returns seconds since some moment, such as `time.perf_counter`."""

_MEMORY, _LOOK_MEMORY = 0.98, 0.9
_PRIOR, _PRIOR_SLOPE, _PRIOR_SPREAD = 12.0, 1.3, 0.2
"""The slope before anything is measured: its weight in steps, the slope itself (the ratio of the drafts' real cost to
the measured cost), and the spread of the prices. The ratio is above 1 because rows of unequal lengths cost more than
measured rows (1.1 to 2 times, SmolLM2 135M, 2 to 16 rows).
"""
_MOST = 4.0
"""Ratio of a step's time to its predicted time from which on the step is taken to be disturbed. Also the largest
factor, and the inverse of the smallest.
"""


class Meter:
    """Learns `factor`, by which the price of draft tokens is multiplied, and the time of looking for drafts."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = clock()
        self._ids: set[int] = set()
        self._prices = (0.0, 0.0)
        """Predicted seconds of the running step: without drafts, and with the drafts that were sent."""
        self._weight = self._mean_added = self._mean_time = 0.0
        self._added_squares = self._products = 0.0
        """Sums of (added - its mean)^2 and of (added - its mean) x (time - its mean), which decay."""
        self._looked: set[int] = set()
        self._num_looks = self._num_looks_with_new = 0.0
        """Number of past looks; it decays."""
        self.look_s = 0.0
        """Mean seconds of a look for a sequence, in looks without a new sequence."""
        self.look_with_new_s = 0.0
        """Mean seconds of a look for a sequence, in all looks; the first look for a new sequence takes longer."""

    @property
    def factor(self) -> float:
        if not self._added_squares:
            return _PRIOR_SLOPE
        prior = _PRIOR * (self._added_squares / self._weight + _PRIOR_SPREAD**2)
        slope = (self._products + _PRIOR_SLOPE * prior) / (self._added_squares + prior)
        alone = self._mean_time - slope * self._mean_added
        # If every step is slower, draft tokens cost the same share of a step as before.
        return min(max(slope / max(alone, 1.0), 1 / _MOST), _MOST)

    def see(self, sequences: Seq[Sequence]) -> None:
        """Learn from the time of the step that `sent` began, unless it computed the prompt of a new sequence."""
        if not self._ids:
            return
        seconds, ids = self._clock() - self._last, {sequence.request.id for sequence in sequences}
        (alone_s, price_s), is_known = self._prices, ids <= self._ids
        self._ids = set()
        if is_known and 0 < seconds < _MOST * price_s:
            self._learn(price_s / alone_s - 1, seconds / alone_s)

    def _learn(self, added: float, time: float) -> None:
        self._weight = self._weight * _MEMORY + 1
        beyond = added - self._mean_added
        self._mean_added += beyond / self._weight
        self._mean_time += (time - self._mean_time) / self._weight
        self._added_squares = self._added_squares * _MEMORY + beyond * (added - self._mean_added)
        self._products = self._products * _MEMORY + beyond * (time - self._mean_time)

    def sent(self, sequences: Seq[Sequence], alone_s: float, price_s: float) -> None:
        """Note that a step with these sequences begins, and its prices without and with their drafts."""
        self._ids = {sequence.request.id for sequence in sequences}
        self._prices = alone_s, price_s
        self._last = self._clock()

    def looked(self, sequences: Seq[Sequence], seconds: float) -> None:
        """Note how many `seconds` the lookups for these sequences took together."""
        ids, each_s = {sequence.request.id for sequence in sequences}, seconds / len(sequences)
        if ids <= self._looked:
            self._num_looks = self._num_looks * _LOOK_MEMORY + 1
            self.look_s += (each_s - self.look_s) / self._num_looks
        self._num_looks_with_new = self._num_looks_with_new * _MEMORY + 1
        self.look_with_new_s += (each_s - self.look_with_new_s) / self._num_looks_with_new
        self._looked = ids
