"""Sizes of the chunks in which prompts are computed beside sequences that generate, found by measuring.

A sequence that generates waits for a chunk and then for its own step. The chunk may take so long that both together
take 2.5 steps, or `max_gap_s` if that is longer. With steps of 10 ms a chunk may take 15 ms: if 100 tokens took 30 ms,
the next chunk has 50.
"""

_MAX_STEPS = 2.5
_LEAST_TOKENS = 4
"""Least number of tokens of a chunk: prompts make progress, however slow they are."""
_FIRST_TOKENS = 32
_WEIGHT = 0.2
"""Weight of the last step in the running mean of the steps' times."""


class ChunkSizes:
    """The size of the next chunk, `num_tokens`, computed from the times of earlier chunks and steps."""

    def __init__(self, max_num_tokens: int, max_gap_s: float) -> None:
        self._most, self._max_gap_s = max_num_tokens, max_gap_s
        self.num_tokens = min(_FIRST_TOKENS, max_num_tokens)
        self._step_s: float | None = None

    def step_took(self, seconds: float) -> None:
        """Note the time of a step of generating sequences, without the chunks before it."""
        before = seconds if self._step_s is None else self._step_s
        self._step_s = before + _WEIGHT * (seconds - before)

    @property
    def chunk_s(self) -> float:
        """Seconds that a chunk may take; 0 before a step was timed."""
        return 0.0 if self._step_s is None else max(_MAX_STEPS * self._step_s, self._max_gap_s) - self._step_s

    def chunk_took(self, num_tokens: int, seconds: float) -> None:
        """Note the time of a chunk. The next chunk is at most twice as long, and at least half as long. The last chunk
        of a prompt is ignored if it is short, since it says little of longer chunks.
        """
        if self._step_s is None or 2 * num_tokens < self.num_tokens:
            return
        wanted = num_tokens * self.chunk_s / max(seconds, 1e-9)
        size = min(max(wanted, self.num_tokens / 2), 2 * self.num_tokens)
        self.num_tokens = min(max(round(size), _LEAST_TOKENS), self._most)
