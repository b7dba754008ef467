"""Request to a running server, and the progress of its answer.

The loop's thread writes sequences, others read them: no further than the last `Progress` says, which is replaced as a
whole after each step.
"""

from dataclasses import dataclass, field

from runtime.drafters.protocol import Drafter
from runtime.errors import SpecDecError
from runtime.request import Request, Sequence
from runtime.stats import FinishReason


@dataclass(frozen=True)
class ServeRequest:
    """A request, and how to draft for it. `drafts_by_default`: by the server's drafter; else by `drafter`, if any."""

    request: Request
    drafts_by_default: bool = True
    drafter: Drafter | None = None
    counts_output: bool = True
    """False: only the prompt is scored, and the token generated with it is discarded."""


@dataclass(frozen=True)
class Progress:
    """Readable part of an answer: numbers of generated tokens and of steps."""

    num_tokens: int = 0
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the K/V cache."""
    finish_reason: FinishReason | None = None
    error: SpecDecError | None = None
    """Why it ended without an answer."""

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.error is not None


@dataclass(eq=False)
class RequestHandle:
    """One sequence on its way. `owner` is whatever its reader wants to be reminded of when it gets on."""

    asked: ServeRequest
    sequence: Sequence
    owner: object = None
    progress: Progress = field(default_factory=Progress)
    is_cancelled: bool = False

    @property
    def request(self) -> Request:
        return self.asked.request

    @property
    def output_tokens(self) -> list[int]:
        """Output tokens that may be read."""
        start = len(self.request.prompt_tokens)
        return self.sequence.tokens[start : start + self.progress.num_tokens]
