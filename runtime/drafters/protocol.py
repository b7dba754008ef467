"""What a loop asks of whatever proposes draft tokens."""

from typing import Protocol

from runtime.request import Draft, Sequence


class Drafter(Protocol):
    """Proposes draft tokens for sequences; may keep state per request between steps."""

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        """One draft per sequence, each of at most `max_draft_len` tokens; an empty one where there is no proposal."""
        ...

    def forget(self, request_id: int) -> None:
        """Drop the state of a finished request."""
        ...
