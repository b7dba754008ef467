"""Old answers beside a new engine: the tokens that a changed engine chooses otherwise, without generating the answers
again.

An old answer is a long draft for the new engine. The two answers part at the first token that the new engine would not
choose. They would part at the same token if the new answer were generated, unless an engine's bits depend on the step.
Behind that token the old answer is still a text on which the two engines can be compared.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.core.params import GREEDY
from runtime.core.request import Request, Sequence
from runtime.core.sampling import NoValidToken, choose_all
from runtime.core.stats import LoopTimes
from runtime.drafters.prediction import PredictionLookup
from runtime.engine.engine import Engine
from runtime.loop.scheduler import Scheduler
from runtime.loop.serving import DrafterRouter
from runtime.proof.long_drafts import LongDraft, LongDrafts, in_groups
from runtime.proof.receipts import body_of, choices_of, lines_of, parse_line, read_row, rows_in
from runtime.proof.records import Receipt
from runtime.text.trace_lines import Trace
from runtime.util.errors import SpecDecError
from runtime.util.reading import shown

_NUM_CHOSEN = 32
"""Rows for which tokens are chosen at once. Behind a token that differs, the rows are asked for again."""
_NUM_UNTIL_CHANGE = 32
"""Rows that are computed at once for an answer that is compared up to its first change."""


@dataclass(frozen=True)
class OldAnswer:
    """An answer to compare with. Without a `receipt` its request is not known, and counts as greedy."""

    where: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    receipt: Receipt | None = None
    problem: str | None = None
    """Sentence that says why the line has no answer to compare."""
    is_foreign: bool = False
    """True for a line that is no answer at all: not JSON, or with neither token ids nor a receipt."""

    def request(self, make: Callable[[Receipt], Request], end_ids: frozenset[int]) -> Request:
        """The request that was answered; without a receipt, a greedy request for the same number of tokens."""
        if self.receipt is not None:
            return make(self.receipt)
        return Request(0, self.prompt, len(self.output), end_ids, sampling=GREEDY)


@dataclass
class Positions:
    """Sums by position in the output, over the answers that were compared at that position."""

    num: list[int] = field(default_factory=list)
    num_agreeing: list[int] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)

    def add(self, first: int, agreeing: Seq[bool], kl: Seq[float]) -> None:
        missing = first + len(agreeing) - len(self.num)
        for values in (self.num, self.num_agreeing, self.kl):
            values += [0] * missing
        for place, agrees in enumerate(agreeing, first):
            self.num[place] += 1
            self.num_agreeing[place] += agrees
        for place, value in enumerate(kl, first):
            self.kl[place] += value


@dataclass(kw_only=True)
class Compared(LongDraft):
    """An old answer, and the new engine's choices. `place` is the index of the first old token that it does not choose;
    `new_token` is its own, None if no token can be chosen there.
    """

    old: OldAnswer
    place: int | None = None
    new_token: int | None = None
    gap: float | None = None
    """Difference of the new engine's logits of its own token and the old token; None if one cannot be chosen."""
    num_agreeing: int = 0
    kl: float = 0.0
    """Divergence (KL) of the new probabilities from the old engine's, in nats, summed over the positions."""
    new_output: list[int] | None = None
    old_logits: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, old: OldAnswer, request: Request) -> "Compared":
        """An old answer before its comparison."""
        return cls(request, old.output, max(len(old.output), 1), old=old)

    @classmethod
    def refused(cls, old: OldAnswer, problem: str) -> "Compared":
        """An old answer that cannot be compared, with the reason."""
        return cls(Request(0, (), 1), (), 1, old=old, problem=problem)

    @property
    def has_diverged(self) -> bool:
        return self.place is not None


class Comparison:
    """Comparison of a new engine with old answers, and perhaps with the old engine on these answers.

    With `until_change` each answer is compared only up to its first change. If token 40 of 512 changes, 64 tokens are
    computed, since 32 are computed at once.
    """

    def __init__(self, new: Engine, old: Engine | None = None, *, until_change: bool = False) -> None:
        self.new, self.old, self.positions, self._until_change = new, old, Positions(), until_change

    def compare(self, answers: Iterable[Compared]) -> Iterator[Compared]:
        """The answers in their order, compared. Answers with a problem come back unchanged."""
        for group in in_groups(answers, self.new, lambda one: one.num_rows if one.problem is None else 0):
            yield from self._compared(group)

    def _compared(self, group: list[Compared]) -> list[Compared]:
        if self.old is not None:
            asked = [one for one in group if one.problem is None]
            befores = [Compared(one.request, one.output, one.num_rows, old=one.old) for one in asked]
            LongDrafts(self.old, _keep_logits).compute(befores)
            for one, before in zip(asked, befores, strict=True):
                one.old_logits, one.problem = before.old_logits, before.problem
        most_rows = _NUM_UNTIL_CHANGE if self._until_change else None
        LongDrafts(self.new, self._judge, most_rows).compute([one for one in group if one.problem is None])
        for one in group:
            one.old_logits.clear()
        return group

    def _judge(self, group: Seq[Compared], all_logits: Seq[Tensor]) -> None:
        for one, logits in zip(group, all_logits, strict=True):
            first = one.num_judged
            agreeing = self._choices(one, logits)
            kl = (
                [] if self.old is None else _divergences(torch.cat(one.old_logits)[first : first + len(logits)], logits)
            )
            self.positions.add(first, agreeing, kl)
            one.num_agreeing += sum(agreeing)
            one.kl += sum(kl)
            one.is_over = self._until_change and one.has_diverged

    def _choices(self, one: Compared, logits: Tensor) -> list[bool]:
        """True for each old token that the new engine chooses after the old tokens before it. With `until_change` the
        list ends at the first token that the engine does not choose.
        """
        agreeing: list[bool] = []
        first = one.num_judged
        while len(agreeing) < len(logits):
            rest = logits[len(agreeing) :][:_NUM_CHOSEN]
            chosen = choose_all([one.positions(first + len(agreeing), rest)])[0]
            for _ in range(len(rest)):
                place = first + len(agreeing)
                try:
                    token = next(chosen)
                except NoValidToken:
                    token = -1
                agrees = token == one.output[place]
                agreeing.append(agrees)
                if not agrees:
                    if one.place is None:
                        self._note(one, place, token, logits[place - first])
                    if self._until_change:
                        return agreeing
                    break  # the kernels choose no further than a token that is not the draft's
        return agreeing

    def _note(self, one: Compared, place: int, token: int, row: Tensor) -> None:
        one.place = place
        if token >= 0:
            one.new_token = token
            one.gap = one.margin(place, row, token, one.output[place])


def _keep_logits(group: Seq[Compared], all_logits: Seq[Tensor]) -> None:
    for one, logits in zip(group, all_logits, strict=True):
        one.old_logits.append(logits.clone())


def _divergences(old: Tensor, new: Tensor) -> list[float]:
    """Kullback-Leibler divergence of logits `new` [rows, vocab] from logits `old`, in nats, for each row."""
    old_logs, new_logs = (logits.float().log_softmax(-1) for logits in (old, new))
    found: list[float] = (old_logs.exp() * (old_logs - new_logs)).nan_to_num(0.0).sum(-1).clamp_min(0).tolist()
    return found


def generate_new(engine: Engine, diverged: Seq[Compared]) -> None:
    """Generate the new answers from their first change on, with the old answers as drafts."""
    router = DrafterRouter(None)
    loop = Scheduler(engine, router if engine.max_draft_len else None, times=LoopTimes())
    sequences: dict[int, Compared] = {}
    for number, one in enumerate(diverged):
        if one.place is None or one.new_token is None:
            continue
        room = engine.config.build_config.max_request_len - len(one.request.prompt_tokens)
        request = replace(one.request, id=number, max_new_tokens=min(one.request.max_new_tokens, room))
        sequence = Sequence.start(request)
        sequence.tokens = [*one.prefix(one.place), one.new_token]
        sequence.finish_reason = sequence.reason_to_finish()
        if sequence.finish_reason is not None:
            one.new_output = sequence.output_tokens
            continue
        router.assign(number, PredictionLookup(list(one.output)))
        loop.add(sequence)
        sequences[number] = one
    with closing(_finished(loop)) as finished:
        for sequence in finished:
            sequences[sequence.request.id].new_output = sequence.output_tokens


def _finished(loop: Scheduler) -> Generator[Sequence]:
    """Sequences as they finish."""
    try:
        while loop.has_work:
            for sequence, _ in loop.step():
                if sequence.finish_reason is not None:
                    yield sequence
    finally:
        loop.engine.turns.do_or_leave(loop.release_all)


ReadTrace = Callable[[dict[str, Any], str], Trace]


def read_old_answers(path: Path, read_trace: ReadTrace) -> Iterator[OldAnswer]:
    """The answers in a file, line after line: traces, receipts, or a batch's results with token ids or receipts. If
    something is wrong with a line, its own answer says so. `read_trace` reads a trace from a line's JSON object.
    """
    for line, where in lines_of(path):
        yield from _read_line(line, where, read_trace)


def check_has_answers(path: Path) -> None:
    """SpecDecError for a file without any answer, right or wrong. That shows without the engine and its tokenizer."""
    problem = None
    for old in read_old_answers(path, lambda row, where: Trace((), ())):
        if not old.is_foreign:
            return
        problem = problem or old.problem
    raise SpecDecError(f"the file has no answers: {problem or path}", hint="give another file")


def _read_line(line: bytes, where: str, read_trace: ReadTrace) -> Iterator[OldAnswer]:
    try:
        data = parse_line(line, where)
    except SpecDecError as error:
        yield OldAnswer(where, (), (), problem=error.message, is_foreign=True)
        return
    try:
        yield from _answers_in(data, where, read_trace)
    except SpecDecError as error:
        yield OldAnswer(where, (), (), problem=error.message)


def _answers_in(data: Any, where: str, read_trace: ReadTrace) -> Iterator[OldAnswer]:
    rows = list(rows_in(data))
    for row in rows:
        read = read_row(row, where, {})
        receipt = read.receipt
        if read.problem is not None or receipt is None or not receipt.prompt_ids or not receipt.output_ids:
            yield OldAnswer(where, (), (), problem=read.problem or f"{where} has no token ids")
        else:
            yield OldAnswer(where, receipt.prompt_ids, receipt.output_ids, receipt)
    if rows:
        return
    if isinstance(data, dict) and {"prompt", "prompt_ids"} & data.keys():
        trace = read_trace(data, where)
        yield OldAnswer(where, trace.prompt_tokens, trace.output_tokens)
        return
    found = list(_choices_with_ids(data))
    if not found:
        problem = f"{where} has neither token ids nor a receipt: {shown(data)}"
        yield OldAnswer(where, (), (), problem=problem, is_foreign=True)
    for prompt, output in found:
        yield OldAnswer(where, prompt, output)


def _choices_with_ids(data: Any) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Token ids (prompt, output) of the choices that have ids, in a batch's result or a server's answer."""
    body = body_of(data)
    for choice in choices_of(body):
        prompt, output = choice.get("prompt_token_ids", body.get("prompt_token_ids")), choice.get("token_ids")
        if _are_ids(prompt) and _are_ids(output):
            yield tuple(prompt), tuple(output)  # type: ignore[arg-type]


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int and one >= 0 for one in value)
