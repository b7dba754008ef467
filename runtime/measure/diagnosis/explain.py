"""Explains the steps of a request: each drafter's offer, the cost of its tokens, and why they were sent or cut.

The request is answered as always, with each drafter watched; the numbers of tokens are the loop's own counts.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

from runtime.checkpoint.costs import CostModel
from runtime.core.request import Draft, Request, Sequence
from runtime.core.stats import RequestStats
from runtime.drafters.adaptive import AdaptiveDrafter
from runtime.drafters.chain import BestOf
from runtime.drafters.protocol import CompositeDrafter, Drafter
from runtime.drafters.speculation import Speculation
from runtime.llm import LLM


@dataclass(frozen=True)
class Offer:
    """Draft that a drafter proposed in a step."""

    drafter: str
    num_tokens: int
    match_len: int
    """Number of tokens of the text that were found again; 0 for a model's draft."""


@dataclass(frozen=True)
class ExplainedStep:
    """A step of the target for the request."""

    context_len: int
    offers: list[Offer]
    promised: float | None
    """Tokens of the longest offer that are expected to be accepted; None for fixed draft lengths."""
    price: float | None
    """Number of tokens that must be accepted for the longest offer to pay: the tokens that the time it adds to the step
    would give otherwise. None if steps were not timed.
    """
    num_sent: int
    num_accepted: int
    num_new_tokens: int
    reason: str


@dataclass(frozen=True)
class Explanation:
    steps: list[ExplainedStep]
    stats: RequestStats
    max_draft_len: int


@dataclass
class _Seen:
    """Facts about the running step."""

    room: int | None = None
    """Most tokens that a draft could have; None while no drafter is asked."""
    offers: list[Offer] = field(default_factory=list)


class _Watched(CompositeDrafter):
    """Wrapper of a drafter that notes each of its drafts under its name. There is only one request."""

    def __init__(self, drafter: Drafter, name: str, seen: _Seen) -> None:
        super().__init__([drafter])
        self._name, self._seen = name, seen

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        drafts = self.members[0].propose(sequences, max_draft_len)
        self._seen.offers += [Offer(self._name, len(draft.tokens), draft.match_len) for draft in drafts]
        return drafts


class _Outermost(CompositeDrafter):
    """Wrapper of the whole drafter, which is asked in each step in which drafting is possible."""

    def __init__(self, drafter: Drafter, seen: _Seen) -> None:
        super().__init__([drafter])
        self._seen = seen

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        self._seen.room = max((min(one.max_draft_len, max_draft_len) for one in sequences), default=None)
        return self.members[0].propose(sequences, max_draft_len)


def explain(llm: LLM, speculation: Speculation, request: Request) -> Explanation:
    """Answer the request; returns for each step the reason for its draft's length."""
    with ExitStack() as stack:
        session = llm.open_session(speculation, stack)
        session.check_requests([request])
        seen, choosing = _Seen(), list[AdaptiveDrafter]()
        if session.opened is not None:
            choosing += _choosing(session.opened.drafter)
            _watch_leaves(session.opened.drafter, seen, speculation)
            session.opened.drafter = _Outermost(session.opened.drafter, seen)
        costs = llm.engine.config.step_costs
        prices = CostModel(costs, llm.engine.config.host_s) if costs else None
        steps, last = list[ExplainedStep](), None
        with closing(session.steps([request])) as answered:
            for sequence, new_tokens in answered:
                steps.append(_explained(sequence, len(new_tokens), seen, choosing, prices))
                seen.room, seen.offers, last = None, [], sequence
        assert last is not None
        return Explanation(steps, last.stats, session.max_draft_len)


def _choosing(drafter: Drafter) -> Iterator[AdaptiveDrafter]:
    """The drafters that choose automatic draft lengths, the outermost first."""
    if isinstance(drafter, AdaptiveDrafter):
        yield drafter
    if isinstance(drafter, CompositeDrafter):
        for member in drafter.members:
            yield from _choosing(member)


def _watch_leaves(drafter: Drafter, seen: _Seen, speculation: Speculation) -> None:
    """Have each drafter that consists of no others watched, under the name that flags use."""
    names = [part for one in speculation for part in one.parts]
    found = list(_places(drafter))
    if any(isinstance(holder, BestOf) for holder, _ in found):  # a BestOf holds lookups before models
        kinds = {one.name: one.is_model for one in speculation}
        names.sort(key=lambda name: kinds.get(name, False))
    for number, (holder, place) in enumerate(found):
        name = names[number] if len(names) == len(found) else type(holder.members[place]).__name__
        holder.members[place] = _Watched(holder.members[place], name, seen)


def _places(drafter: Drafter) -> Iterator[tuple[CompositeDrafter, int]]:
    """Each drafter that consists of no others, as the drafter that holds it and its index in `members`."""
    if not isinstance(drafter, CompositeDrafter):
        return
    for place, member in enumerate(drafter.members):
        if isinstance(member, CompositeDrafter):
            yield from _places(member)
        else:
            yield drafter, place


def _explained(
    sequence: Sequence, num_new_tokens: int, seen: _Seen, choosing: list[AdaptiveDrafter], prices: CostModel | None
) -> ExplainedStep:
    num_sent, num_accepted = sequence.stats.per_step_drafted[-1], sequence.stats.per_step_accepted[-1]
    context_len = len(sequence.tokens) - num_new_tokens
    longest = max((one.num_tokens for one in seen.offers), default=0)
    price: float | None = None
    promised: float | None = None
    if prices is not None and longest:
        price = prices.iteration_s(1, context_len, longest) / prices.iteration_s(1, context_len, 0) - 1
    if choosing and longest:
        survivals, costs = choosing[0].last_choice
        if survivals and len(survivals[0]) >= longest:  # otherwise it is the choice of an earlier step
            promised, price = sum(survivals[0][:longest]), costs[longest] - costs[0]
    return ExplainedStep(
        context_len,
        seen.offers,
        promised,
        price,
        num_sent,
        num_accepted,
        num_new_tokens,
        _reason(num_sent, longest, seen, is_chosen=bool(choosing)),
    )


def _reason(num_sent: int, longest: int, seen: _Seen, *, is_chosen: bool) -> str:
    """A sentence that explains the length of a step's draft."""
    if seen.room is None:
        return "nothing is drafted while the prompt is computed"
    if seen.room == 0:
        return "no token but the target's own is left of the output"
    if not seen.offers and not num_sent:
        return "no drafter was asked: drafts have saved no time lately"
    if longest == 0:
        return "nothing was found" if not num_sent else "the form, or the budget for thinking, forces these tokens"
    if num_sent > longest:
        return "sent whole, with tokens that follow it"
    if num_sent == longest:
        return "sent whole"
    if num_sent == seen.room:
        return f"cut to the {num_sent} tokens that there is room for"
    if not is_chosen:
        return f"cut to {num_sent}: the next token is forbidden, or another draft was taken"
    if num_sent == 0:
        return "not sent: it costs more than it promises"
    return f"cut to {num_sent}: more cost than they promise"
