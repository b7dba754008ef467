"""A chain of drafters: who has nothing for a sequence leaves it to the next."""

from collections.abc import Iterable

from runtime.drafters.protocol import Drafter, check_num_drafts, check_request, look_ahead
from runtime.errors import UsageError
from runtime.request import Draft, Request, Sequence


class FirstOf:
    """Asks each drafter for those sequences for which all before it proposed nothing: the cheap one first.

    A drafter is not asked at every step then, and finds several tokens new when it is: all of ours can cope.
    """

    def __init__(self, drafters: Iterable[Drafter]) -> None:
        self.drafters = list(drafters)
        if not self.drafters:
            raise UsageError("a chain has no drafters: []", hint="name at least one")

    def check_request(self, request: Request) -> None:
        """Run the members' checks of a request before it starts."""
        for drafter in self.drafters:
            check_request(drafter, request)

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        drafts = [Draft([])] * len(sequences)
        for drafter in self.drafters:
            empty = [i for i, draft in enumerate(drafts) if not draft.tokens]
            if not empty:
                break
            proposed = drafter.propose([sequences[i] for i in empty], max_draft_len)
            check_num_drafts(proposed, len(empty))
            for i, draft in zip(empty, proposed, strict=True):
                drafts[i] = draft
        return drafts

    def look_ahead(self, sequence: Sequence, drafted: list[int], max_draft_len: int) -> Draft:
        drafts = (look_ahead(drafter, sequence, drafted, max_draft_len) for drafter in self.drafters)
        return next((draft for draft in drafts if draft.tokens), Draft([]))

    def forget(self, request_id: int) -> None:
        for drafter in self.drafters:
            drafter.forget(request_id)
