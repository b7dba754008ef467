"""One drafter for a loop in which each request may have a drafter of its own, or none."""

from runtime.drafters.protocol import Drafter, check_num_drafts
from runtime.request import Draft, Sequence


class DrafterRouter:
    """Asks each request's drafter; `default` for those without one of their own."""

    def __init__(self, default: Drafter | None) -> None:
        self.default = default
        self._own: dict[int, Drafter | None] = {}

    def assign(self, request_id: int, drafter: Drafter | None) -> None:
        """Draft for a request by this drafter alone, or not at all, until it is forgotten."""
        self._own[request_id] = drafter

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        drafts = [Draft([])] * len(sequences)
        places: dict[int, list[int]] = {}
        drafters: dict[int, Drafter] = {}
        for i, sequence in enumerate(sequences):
            drafter = self._own.get(sequence.request.id, self.default)
            if drafter is not None:
                drafters[id(drafter)] = drafter
                places.setdefault(id(drafter), []).append(i)
        for key, indices in places.items():
            proposed = drafters[key].propose([sequences[i] for i in indices], max_draft_len)
            check_num_drafts(proposed, len(indices))
            for i, draft in zip(indices, proposed, strict=True):
                drafts[i] = draft
        return drafts

    def forget(self, request_id: int) -> None:
        drafter = self._own.pop(request_id, self.default)
        if drafter is not None:
            drafter.forget(request_id)
