"""Interface between a loop and a drafter, drafters that ask other drafters, and the checks of proposed drafts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor

from runtime.core.request import Draft, Request, Sequence
from runtime.util.errors import SpecDecError

Suggest = Callable[[Sequence, list[int]], list[int]]
"""Function (sequence, draft so far) -> tokens that may come next."""

DraftFunction = Callable[[list[int], int], list[int]]
"""Function (a sequence's tokens, the longest draft) -> draft tokens; the simplest drafter."""


class Drafter(Protocol):
    """Proposes draft tokens for sequences; may keep state per request between steps.

    A proposal cannot change what is generated, only how fast, unless `Draft.probs` is not the distribution that the
    tokens were drawn from. A drafter must leave the sequences as they are.
    """

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        """A draft for each sequence, of at most `max_draft_len` tokens; an empty draft for no proposal."""
        ...

    def forget(self, request_id: int) -> None:
        """Drop the state of a finished request."""
        ...


def check_request(drafter: Drafter | None, request: Request) -> None:
    """Call the drafter's `check_request`, if it has one: SpecDecError for a request for which it cannot draft."""
    check = getattr(drafter, "check_request", None)
    if check is not None:
        check(request)


def look_ahead(drafter: Drafter, sequence: Sequence, drafted: list[int], max_draft_len: int) -> Draft:
    """Propose a draft as if the tokens `drafted` came next, by the drafter's `look_ahead`; an empty draft if it has no
    such method.

    The drafter knows the sequence, perhaps not its last tokens, and must not learn from `drafted`: these tokens are
    unverified.
    """
    ahead = getattr(drafter, "look_ahead", None)
    return Draft([]) if ahead is None else ahead(sequence, drafted, max_draft_len)


def knows(drafter: Drafter, sequence: Sequence) -> bool:
    """True if the drafter's method `knows` says that it has better grounds than a lookup, such as an old answer. False
    without such a method. It is asked for every sequence of a step, so that the drafter sees all sequences.
    """
    found = getattr(drafter, "knows", None)
    return found is not None and found(sequence)


def ask(drafter: Drafter, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
    """A draft for each sequence; SpecDecError if the drafter, which may be a user's, returns anything else."""
    drafts = drafter.propose(sequences, max_draft_len) if sequences else []
    check_num_drafts(drafts, len(sequences))
    return drafts


class CompositeDrafter(ABC):
    """A drafter that asks other drafters, its `members`. A subclass decides how their drafts are used.

    Every member checks requests, looks ahead and forgets. Of the drafts found ahead, the draft that `rank_of_match`
    ranks highest is taken. A sequence is known if one member knows it.
    """

    def __init__(self, members: Iterable[Drafter]) -> None:
        self.members = list(members)

    @abstractmethod
    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]: ...

    def check_request(self, request: Request) -> None:
        for member in self.members:
            check_request(member, request)

    def look_ahead(self, sequence: Sequence, drafted: list[int], max_draft_len: int) -> Draft:
        return max((look_ahead(one, sequence, drafted, max_draft_len) for one in self.members), key=rank_of_match)

    def knows(self, sequence: Sequence) -> bool:
        return sum([knows(member, sequence) for member in self.members]) > 0

    def forget(self, request_id: int) -> None:
        for member in self.members:
            member.forget(request_id)


def rank_of_match(draft: Draft) -> tuple[bool, bool, int]:
    """Rank of a draft: first drafts drawn from a distribution, then drafts with tokens, then longer matches."""
    return draft.probs is not None, bool(draft.tokens), draft.match_len


def check_drafts(drafts: Any, num_sequences: int, max_draft_len: int, vocab_size: int) -> None:
    """SpecDecError unless the target can take these drafts; users write drafters too."""
    check_num_drafts(drafts, num_sequences)
    for draft in drafts:
        if not isinstance(draft.tokens, list):
            raise SpecDecError(
                f"the drafter proposed tokens that are not a list: {type(draft.tokens).__name__}",
                hint="`Draft([])` is an empty draft",
            )
        if len(draft.tokens) > max_draft_len:
            raise SpecDecError(
                f"the drafter proposed more than {max_draft_len} tokens: {len(draft.tokens)}",
                hint="`propose` receives the maximum draft length",
            )
        for token in draft.tokens:
            if not isinstance(token, int) or not 0 <= token < vocab_size:
                raise SpecDecError(
                    f"the drafter proposed a value that is not a token id of the vocabulary of {vocab_size}: {token!r}",
                    hint="ids are `int`s of the target's own tokenizer",
                )
        if draft.probs is not None:
            _check_probs(draft.probs, (len(draft.tokens), vocab_size))


def check_num_drafts(drafts: Any, num_sequences: int) -> None:
    """SpecDecError unless this is a list with a draft for each sequence."""
    if not isinstance(drafts, list) or not all(isinstance(draft, Draft) for draft in drafts):
        raise SpecDecError("the drafter did not return a list of `Draft`", hint="see `runtime/drafters/protocol.py`")
    if len(drafts) != num_sequences:
        raise SpecDecError(
            f"the drafter returned {len(drafts)} drafts for {num_sequences} sequences",
            hint="`propose` returns one per sequence, empty without a proposal",
        )


def _check_probs(probs: Any, shape: tuple[int, int]) -> None:
    if not isinstance(probs, Tensor) or tuple(probs.shape) != shape:
        found = tuple(probs.shape) if isinstance(probs, Tensor) else type(probs).__name__
        raise SpecDecError(
            f"the drafter's probabilities are not a tensor of shape {shape}: {found}",
            hint="one row per draft token, one column per token of the target's vocabulary",
        )
    if not probs.is_floating_point():
        raise SpecDecError(
            f"the drafter's probabilities are not floating-point numbers: {probs.dtype}", hint="float64 is best"
        )
    sums = probs.sum(dim=-1)
    if not (bool((probs >= 0).all()) and bool(((sums - 1).abs() < 1e-3).all())):
        raise SpecDecError(
            "the drafter's probabilities are not a distribution, some are negative or NaN, or they add up to: "
            f"{sums.tolist()}",
            hint="each row is at least 0 and adds up to 1",
        )
