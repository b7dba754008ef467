"""Automatic draft lengths: as many tokens as pay for themselves, and no draft if none pays.

A step with more draft tokens takes longer (known from the engine's cost model) and yields more tokens (known from how
often such drafts were right so far). A draft token is worth sending if it takes less time for each token that it
promises than tokens take on average. With R tokens per second so far, the number of draft tokens is chosen for which
(expected tokens - R x seconds) is largest (Dinkelbach 1967, on ratios). Expected tokens follow from the survival of
each position, not from one rate for all. Every row of a batch gets a length of its own (`allocate`).

Drafts never change the text, so the generated text shows how many tokens of a draft would have been accepted, even if
it was not sent. So lookups learn from every proposal, and while nothing pays only the looking costs time. The cost
model was measured when the engine was built, with drafts of equal lengths. With a `clock` the drafter also measures the
present cost of drafts and of looking (`runtime.drafters.meter`).

A draft model is asked for no more tokens than pay, and while none pays, it is asked only now and then. It computes the
tokens of all rows in the same steps, so it is asked for one length for all rows, of which each row's part is sent.

If a user's drafter draws tokens from a distribution, all of them are sent. Their number may depend on the tokens
themselves, and leaving some out for that reason would change the distribution of the text. A drafter that has drawn
tokens once is from then on asked like a draft model, for a length chosen before anything is drawn.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from math import ceil, inf
from time import thread_time

from runtime.core.request import Draft, Sequence
from runtime.drafters.acceptance_stats import MODEL_PRIOR, AcceptanceStats
from runtime.drafters.meter import Clock, Meter
from runtime.drafters.protocol import CompositeDrafter, Drafter, knows

IterationSeconds = Callable[[int, int, float], float]
"""Function (batch size, context length, mean draft length) -> seconds: `CostModel.iteration_s`."""
DraftSeconds = Callable[[int, int], float]
"""Function (batch size, context length) -> seconds for one more token of every draft, or `at_once` for all."""

_PROBE_INTERVAL, _PROBE_SHARE = 16, 0.03
"""Steps without a draft, after which a draft model is asked for a token to see whether it pays again: at least 16, and
as many more as are needed for the test to take no larger share of the time than 3 %.
"""
_LOOK_INTERVAL, _LOOK_SHARE, _LONGEST_REST = 4, 0.005, 64
"""While steps gain too little by looking, a lookup looks at every fourth step, or so rarely that looking takes half a
percent of the time, but at least at every 64th step.
"""
_LOOK_S = 20e-6
"""Approximate seconds that a lookup and the counting of its outcomes take for a sequence, used if there is no clock."""
_LARGE_BATCH, _FIRST_GAIN, _GAIN_MEMORY = 4, 6.0, 0.93
"""Parameters of the mean gain, which is counted in times of looking. It starts at 6, so that 16 steps without a gain
end looking. In batches of four or more, whose steps are compute-bound and seldom pay for drafts, it starts too low for
looking to go on.
"""
_LEAST_GAIN = 2.0
"""Mean gain from which on looking goes on. It is above 1, the time of looking, because drafts that are chosen for their
promises yield less, and steps with drafts take more time than is measured.
"""
_RATE_MEMORY = 0.98
_CAUTION = 0.25
"""Margin by which a lookup's token must gain more than its own time, as a share of the tokens that steps without drafts
yield in that time.
"""
_CONTEXT_STEP = 64
"""Contexts are rounded to a multiple of this number, so that the cost model need not be asked anew at every step."""


def allocate(survivals: Seq[Seq[float]], costs: Seq[float]) -> list[int]:
    """The draft length of each row for which the number of accepted tokens, less their cost, is largest; of equally
    good lengths, the shortest. survivals[i][k] is the probability that the first k + 1 tokens of row i's draft are
    accepted, which falls with k. costs[n] is the cost of n draft tokens in the step, in accepted tokens too.

    A step's cost depends on the number of tokens in all its rows together, not on their rows (`runtime.core.batch`
    folds rows). And a draft token is never more probable than the token before it. So for any number of tokens the most
    probable tokens are the best choice, and these are beginnings of drafts: only one allocation for each number has to
    be considered. With survivals of (0.9, 0.2) and (0.5, 0.4) and 0.3 for a token, 0.9, 0.5 and 0.4 are worth it:
    lengths 1 and 2.
    """
    offers = sorted(((p, -i) for i, row in enumerate(survivals) for p in row), reverse=True)
    best_num, best_value, promised = 0, -costs[0], 0.0
    for num, (survives, _) in enumerate(offers, 1):
        promised += survives
        value = promised - costs[num]
        if value > best_value:
            best_num, best_value = num, value
    lengths = [0] * len(survivals)
    for _, i in offers[:best_num]:
        lengths[-i] += 1
    return lengths


class AdaptiveDrafter(CompositeDrafter):
    """Drafts of another drafter, cut to the length that pays. With `draft_s`, the cost of drafting, the other drafter
    is asked for at most as many tokens as pay for a row. `at_once`: it drafts all tokens of a draft in one pass.

    `clock` times steps (`runtime.drafters.meter`); without a clock, `iteration_s` gives all prices.
    """

    def __init__(
        self,
        drafter: Drafter,
        iteration_s: IterationSeconds,
        draft_s: DraftSeconds | None = None,
        clock: Clock | None = None,
        *,
        at_once: bool = False,
    ) -> None:
        super().__init__([drafter])
        self._iteration_s = iteration_s
        self._draft_s, self._at_once = draft_s, at_once
        self._is_asked_for_what_pays = draft_s is not None
        self._match_len = 0 if draft_s is None else MODEL_PRIOR
        self._outcomes = AcceptanceStats(are_cut=draft_s is not None)
        self._num_tokens = self._num_without = 0.0
        """Tokens that past steps should yield, and that their time should yield without drafts; both decay."""
        self._num_off = 0
        """Number of steps in a row in which nothing was drafted, or while looking gains too little."""
        self._mean_gains: dict[int, float] = {}
        """Mean gain of past steps, in multiples of the time of looking, by batch size; it decays."""
        self._meter = Meter(clock) if clock is not None else None
        self._known_prices: dict[tuple[int, int, int], _Prices] = {}
        self.last_choice: tuple[list[list[float]], list[float]] = [], []
        """Survivals of each row and costs, as `allocate` has them, from which the last lengths were chosen."""

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        if not sequences:
            return []
        prices = self._prices_of(sequences, max_draft_len)
        if self._meter is not None:
            self._meter.see(sequences)
        num_known = sum([knows(self.members[0], sequence) for sequence in sequences])
        rests = self._nothing_pays(prices) or (not num_known and self._rests(prices))
        if rests and not self._is_asked_for_what_pays:  # `_propose_what_pays` decides that by itself
            self._num_off += 1
            self._count(len(sequences), prices, 0.0)
            return [Draft([])] * len(sequences)
        start = thread_time()  # time of looking up itself, without other threads
        for sequence in sequences:
            self._outcomes.learn(sequence)
        drafts = self._propose(sequences, max_draft_len, prices, start)
        if self._meter is not None:
            num_drafted = sum(len(draft.tokens) for draft in drafts)
            seconds = prices.of_drafts(num_drafted)
            self._meter.sent(sequences, seconds[0], seconds[num_drafted])
        return drafts

    def _propose(self, sequences: list[Sequence], max_draft_len: int, prices: "_Prices", start: float) -> list[Draft]:
        if self._is_asked_for_what_pays:
            return self._propose_what_pays(sequences, prices)
        drafts = self.members[0].propose(sequences, max_draft_len)
        if any(draft.probs is not None for draft in drafts):
            self._is_asked_for_what_pays = True
        self._remember(sequences, drafts)
        if self._is_asked_for_what_pays:
            return drafts
        survivals = [self._survivals(s, d) for s, d in zip(sequences, drafts, strict=True)]
        lengths, gain_s = self._choose(survivals, prices)
        if self._meter is not None:
            self._meter.looked(sequences, thread_time() - start)
        if any(survivals):  # or there was nothing to send, which says nothing about what pays
            look_s = _LOOK_S if self._meter is None else max(self._meter.look_s, _LOOK_S)
            mean_gain = self._mean_gain(len(sequences)) * _GAIN_MEMORY
            mean_gain += gain_s / (look_s * len(sequences)) * (1 - _GAIN_MEMORY)
            self._mean_gains[len(sequences).bit_length()] = mean_gain
            self._num_off = 0 if mean_gain >= _LEAST_GAIN else self._num_off + 1
        return [draft.cut(length) for draft, length in zip(drafts, lengths, strict=True)]

    def _propose_what_pays(self, sequences: list[Sequence], prices: "_Prices") -> list[Draft]:
        """Ask for drafts of a drafter that takes time, if they pay."""
        longest = [min(prices.max_draft_len, sequence.max_draft_len) for sequence in sequences]
        expected = [self._outcomes.survivals(s, self._match_len, n) for s, n in zip(sequences, longest, strict=True)]
        draft_len = self._best_len(expected, prices)
        lengths, _ = self._choose([row[:draft_len] for row in expected], prices, draft_len)
        self._num_off = 0 if any(lengths) else self._num_off + 1
        if not any(lengths):
            seconds = prices.of_drafts(prices.batch_size)
            probe_s = seconds[prices.batch_size] - seconds[0] + prices.drafting_s(1)
            if self._num_off % max(_PROBE_INTERVAL, ceil(probe_s / seconds[0] / _PROBE_SHARE)):
                return [Draft([])] * len(sequences)
            lengths = [1] * len(sequences)
        drafts = self.members[0].propose(sequences, max(lengths))
        self._remember(sequences, drafts)
        if self._draft_s is None:  # a user's drafter, which may draw by another rule if asked for more
            return drafts
        return [draft.cut(length) for draft, length in zip(drafts, lengths, strict=True)]

    def forget(self, request_id: int) -> None:
        self._outcomes.forget(request_id)
        super().forget(request_id)

    def _remember(self, sequences: list[Sequence], drafts: list[Draft]) -> None:
        for sequence, draft in zip(sequences, drafts, strict=True):
            if draft.survivals is not None:
                continue
            # A length that is chosen before drafting cannot depend on the match.
            match_len = self._match_len if self._is_asked_for_what_pays else draft.match_len
            self._outcomes.remember(sequence, draft.tokens, match_len)

    def _survivals(self, sequence: Sequence, draft: Draft) -> list[float]:
        if not draft.tokens:
            return []
        if draft.survivals is not None:
            return draft.survivals
        return self._outcomes.survivals(sequence, draft.match_len, len(draft.tokens))

    def _choose(self, survivals: list[list[float]], prices: "_Prices", draft_len: int = 0) -> tuple[list[int], float]:
        """Choose how many tokens of each draft to send, by `survivals` as in `allocate`, and count the choice. Returns
        the lengths, and the seconds that these drafts are expected to save. The drafts took `draft_len` steps of a
        draft model; 0 for lookups.
        """
        seconds, rate = self._seconds(prices, sum(map(len, survivals))), self._rate(prices)
        least = self._least_rate(prices)
        self.last_choice = survivals, [least * s for s in seconds]
        lengths = allocate(*self.last_choice)
        num_accepted = sum(sum(row[:length]) for row, length in zip(survivals, lengths, strict=True))
        cost_s = seconds[sum(lengths)] - seconds[0] + prices.drafting_s(draft_len)
        self._count(prices.batch_size + num_accepted, prices, cost_s)
        return lengths, num_accepted / rate - cost_s

    def _count(self, num_tokens: float, prices: "_Prices", cost_s: float) -> None:
        """Count a step's tokens, and how much longer it takes than a step without drafts."""
        self._num_tokens = self._num_tokens * _RATE_MEMORY + num_tokens
        self._num_without = self._num_without * _RATE_MEMORY + prices.batch_size + cost_s * prices.rate_without

    def _best_len(self, survivals: list[list[float]], prices: "_Prices") -> int:
        """Length to ask a draft model for: one length, because each of its steps computes a token of every row."""
        seconds = self._seconds(prices, sum(map(len, survivals)))
        rate, gains = self._rate(prices), [0.0]
        for n in range(1, max(map(len, survivals)) + 1):
            num_drafted = sum(min(n, len(row)) for row in survivals)
            num_accepted = sum(sum(row[:n]) for row in survivals)
            gains.append(num_accepted - rate * (seconds[num_drafted] - seconds[0] + prices.drafting_s(n)))
        return gains.index(max(gains))

    def _mean_gain(self, batch_size: int) -> float:
        first = _FIRST_GAIN if batch_size < _LARGE_BATCH else _GAIN_MEMORY
        return self._mean_gains.get(batch_size.bit_length(), first)

    def _rests(self, prices: "_Prices") -> bool:
        """True if the lookup rests in this step: looking does not pay, and is not due for a new measurement.

        A measurement looks up all rows: after a step, which evicts everything from the caches, the first row takes
        longer than the others together. The drafts found are judged at the next lookup.
        """
        if self._mean_gain(prices.batch_size) >= _LEAST_GAIN:
            return False
        interval = _LOOK_INTERVAL
        if self._meter is not None:
            share = self._meter.look_with_new_s * prices.rate_without  # of the time of a step
            interval = min(max(ceil(share / _LOOK_SHARE), _LOOK_INTERVAL), _LONGEST_REST)
        return self._num_off % interval != 0

    def _nothing_pays(self, prices: "_Prices") -> bool:
        """True if even a token that is certain to be accepted costs more than it gains."""
        return self._least_rate(prices) * prices.cheapest_s * self._factor >= 1

    def _seconds(self, prices: "_Prices", most: int) -> list[float]:
        """Seconds of a step with 0, 1, ... `most` draft tokens, at the present price of draft tokens (`Meter`)."""
        seconds, factor = prices.of_drafts(most), self._factor
        return seconds if factor == 1 else [seconds[0] + factor * (one - seconds[0]) for one in seconds]

    @property
    def _factor(self) -> float:
        return 1.0 if self._meter is None else self._meter.factor

    def _least_rate(self, prices: "_Prices") -> float:
        """Tokens per second that a step with drafts must yield to pay."""
        caution = 0.0 if self._is_asked_for_what_pays else _CAUTION
        return self._rate(prices) + caution * prices.rate_without

    def _rate(self, prices: "_Prices") -> float:
        """Tokens per second at these prices: the rate without drafts, multiplied by what drafts have gained so far."""
        return prices.rate_without * (self._num_tokens / self._num_without if self._num_without else 1.0)

    def _prices_of(self, sequences: list[Sequence], max_draft_len: int) -> "_Prices":
        mean_len = sum(len(sequence.tokens) for sequence in sequences) // len(sequences)
        place = len(sequences), mean_len // _CONTEXT_STEP * _CONTEXT_STEP, max_draft_len
        if place not in self._known_prices:
            self._known_prices[place] = _Prices(*place, self._iteration_s, self._draft_s, at_once=self._at_once)
        return self._known_prices[place]


class _Prices:
    """Costs of a step for a batch size and a mean context length: attention costs more after a longer context."""

    def __init__(
        self,
        batch_size: int,
        context_len: int,
        max_draft_len: int,
        iteration_s: IterationSeconds,
        draft_s: DraftSeconds | None,
        *,
        at_once: bool = False,
    ) -> None:
        self._at_once = at_once
        self.batch_size, self.max_draft_len = batch_size, max_draft_len
        self.draft_token_s = draft_s(batch_size, context_len) if draft_s else 0.0
        # Between whole numbers of tokens in a row, prices are on straight lines (`of_drafts`).
        self._by_len = [iteration_s(batch_size, context_len, float(n)) for n in range(max_draft_len + 1)]
        self._seconds = [self._by_len[0]]
        self.rate_without = batch_size / self._seconds[0]
        """Tokens per second without drafts."""
        added = ((seconds - self._by_len[0]) / n for n, seconds in enumerate(self._by_len[1:], 1))
        self.cheapest_s = min(added, default=inf) / batch_size
        """Seconds of a draft token, in drafts of the length at which tokens are cheapest."""

    def drafting_s(self, num_tokens: int) -> float:
        """Seconds to draft `num_tokens` tokens for every row; 0 for lookups."""
        return self.draft_token_s * (min(num_tokens, 1) if self._at_once else num_tokens)

    def of_drafts(self, most: int) -> list[float]:
        """Seconds of a step with 0, 1, ... draft tokens in all its rows together, up to at least `most`."""
        for num_tokens in range(len(self._seconds), most + 1):
            n, rest = divmod(num_tokens, self.batch_size)
            left, right = self._by_len[n], self._by_len[min(n + 1, len(self._by_len) - 1)]
            self._seconds.append(left + (right - left) * rest / self.batch_size)
        return self._seconds
