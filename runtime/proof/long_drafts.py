"""Outputs that are computed as long drafts: the logits at all their positions, several outputs at a time."""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

from torch import Tensor

from runtime.core.batch import Row, context_row
from runtime.core.request import Request, Sequence
from runtime.core.sampling import Positions, Sampler
from runtime.engine.engine import SHORT_ROW, Engine
from runtime.loop.step import make_room
from runtime.util.errors import SpecDecError

_MOST_LOGITS = 1 << 23
"""Logits (numbers) of an output that are computed at once."""
_MOST_LOGITS_OF_GROUP = 1 << 25
"""Logits (numbers) of all outputs that are computed together."""
_MOST_IN_GROUP = 1000
"""Items in a group, with items that are not computed."""


@dataclass
class LongDraft:
    """An output, and how many of its rows of logits have been judged. Row i comes after i of the output's tokens."""

    request: Request
    output: tuple[int, ...]
    num_rows: int
    """Number of rows of logits that are wanted, at most one more than the output's tokens."""
    num_judged: int = 0
    problem: str | None = None
    """Reason why the engine cannot compute the output; None if it can."""
    is_over: bool = False
    """True once no more rows are wanted."""
    sequence: Sequence = field(init=False)
    """Sequence of the tokens to compute: the prompt, and the output's tokens before the last row."""
    sampler: Sampler = field(init=False)

    def __post_init__(self) -> None:
        self.sequence = Sequence(self.request, self.prefix(self.num_rows - 1))
        self.sampler = Sequence(self.request, list(self.request.prompt_tokens)).sampler

    def prefix(self, place: int) -> list[int]:
        """The prompt, and the first `place` tokens of the output."""
        return [*self.request.prompt_tokens, *self.output[:place]]

    def token_at(self, place: int) -> int | None:
        return self.output[place] if place < len(self.output) else None

    def positions(self, place: int, logits: Tensor) -> Positions:
        """Positions for logits [rows, vocab], whose first row comes after `place` tokens of the output."""
        return Positions(self.sampler, self.prefix(place), self.output[place : place + len(logits) - 1], logits)

    def margin(self, place: int, row: Tensor, token: int, other: int) -> float | None:
        """The `margin` of the sampler after `place` tokens of the output, for the logits `row` [vocab]."""
        return self.sampler.margin(self.prefix(place), row, token, other)


Item = TypeVar("Item")
Draft = TypeVar("Draft", bound=LongDraft)
Judge = Callable[[list[Draft], list[Tensor]], None]


def in_groups(items: Iterable[Item], engine: Engine, num_rows_of: Callable[[Item], int]) -> Iterator[list[Item]]:
    """The items in groups to compute together, in their order. `num_rows_of` gives an item's rows of logits, 0 if the
    item is not computed.
    """
    group: list[Item] = []
    num_drafts = num_logits = 0
    for item in items:
        group.append(item)
        num_rows = num_rows_of(item)
        num_drafts += num_rows > 0
        num_logits += num_rows * engine.config.vocab_size
        is_full = num_drafts == engine.max_batch_size or num_logits > _MOST_LOGITS_OF_GROUP
        if is_full or len(group) > _MOST_IN_GROUP:
            yield group
            group, num_drafts, num_logits = [], 0, 0
    yield group


@dataclass
class LongDrafts(Generic[Draft]):
    """Computes outputs on an engine; `judge` gets the next rows of each, at most `most_rows` rows at once."""

    engine: Engine
    judge: Judge[Draft]
    most_rows: int | None = None

    def compute(self, drafts: list[Draft]) -> None:
        """Compute all outputs, in their order."""
        while drafts:
            some = partial(self._compute_without_disk, drafts)
            drafts = self.engine.turns.take_with_room(some)

    def _compute_without_disk(self, drafts: list[Draft]) -> list[Draft] | None:
        with self.engine.without_disk():
            return self._compute_some(drafts)

    def _compute_some(self, drafts: list[Draft]) -> list[Draft] | None:
        """Compute some of the outputs, from the first on; returns the others. None if other generations hold the K/V
        blocks and must be continued first.

        Short outputs are computed together, up to the first long one, which uses the whole machine by itself; the next
        outputs may find its keys and values. So for eight answers to one prompt, the prompt is computed once.
        """
        admitted: list[Draft] = []
        try:
            for draft in drafts[: self.engine.max_batch_size]:
                if not self._admit(draft):
                    break
                admitted.append(draft)
                if len(draft.sequence.tokens) - draft.sequence.num_computed > SHORT_ROW:
                    break
            if not admitted:
                return self._make_room(drafts)
            while going := [one for one in admitted if not (one.is_over or one.problem or _is_done(one))]:
                all_logits = self._forward(going)
                with self.engine.alone():
                    self.judge(going, all_logits)
                for draft, logits in zip(going, all_logits, strict=True):
                    draft.num_judged += len(logits)
        finally:
            for draft in reversed(admitted):
                if draft.sequence.block_table:
                    self.engine.release(draft.sequence)
        return drafts[len(admitted) :]

    def _make_room(self, drafts: list[Draft]) -> list[Draft] | None:
        """Have other generations give blocks to the first output, and return as `_compute_some` does. The output gets a
        problem if it does not fit into the whole cache, or no generation can give blocks.
        """
        first, num_tokens = drafts[0], self.engine.num_cache_tokens
        if self.engine.cache_usage == 0:
            num_needed = len(first.sequence.tokens)
            first.problem = f"it does not fit into the K/V cache of {num_tokens} tokens: {num_needed}"
            return drafts[1:]
        try:
            return drafts if make_room(self.engine, None, first.request) else None
        except SpecDecError as error:
            first.problem = error.message
            return drafts[1:]

    def _admit(self, draft: Draft) -> bool:
        """Give the draft K/V blocks for all its tokens, some perhaps from the cache. False if there is no room now; a
        draft that can never be computed gets a problem.
        """
        sequence, tokens = draft.sequence, draft.sequence.tokens
        most = self.engine.config.build_config.max_request_len
        if len(tokens) > most:
            draft.problem = f"it is longer than the {most} tokens that the engine takes: {len(tokens)}"
            return True
        sequence.tokens = tokens[: len(draft.request.prompt_tokens)]
        try:
            has_room = self.engine.admit(sequence)
        except SpecDecError as error:
            draft.problem = error.message
            return True
        finally:
            sequence.tokens = tokens
        if has_room and self.engine.extend(sequence):
            return True
        if has_room:
            self.engine.release(sequence)
        return False

    def _forward(self, drafts: Seq[Draft]) -> list[Tensor]:
        """Logits [rows, vocab] for each draft: its next rows."""
        engine = self.engine
        most = max(1, min(self.most_rows or engine.max_num_tokens, _MOST_LOGITS // engine.config.vocab_size))
        rows: list[Row] = []
        for draft in drafts:
            sequence = draft.sequence
            while (num_before := len(draft.request.prompt_tokens) - 1 - sequence.num_computed) > engine.max_num_tokens:
                engine.compute_context(sequence, engine.max_num_tokens)
            num_before = max(num_before, 0)
            num_tokens = min(len(sequence.tokens) - sequence.num_computed, num_before + most)
            rows.append(replace(context_row(sequence, num_tokens), num_logits=num_tokens - num_before))
        all_logits = engine.step(rows)
        for draft, row in zip(drafts, rows, strict=True):
            draft.sequence.num_computed += len(row.tokens)
        return all_logits


def _is_done(draft: LongDraft) -> bool:
    return draft.num_judged >= draft.num_rows
