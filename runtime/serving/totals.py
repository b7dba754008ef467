"""Totals of a server since its start: counted by the loop's thread, read by any thread."""

from dataclasses import dataclass, field

from runtime.request import Sequence


@dataclass
class Totals:
    """Counts that only grow. Each is written by one thread, after every step."""

    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_position: list[int] = field(default_factory=list)
    num_finished: dict[str, int] = field(default_factory=dict)
    """Numbers of finished answers, by reason: stop, length, abort or error."""

    def count_step(self, sequence: Sequence, num_new_tokens: int) -> None:
        """The last step of a sequence; with the first one its prompt."""
        stats = sequence.stats
        if stats.num_steps == 1:
            self.num_prompt_tokens += len(sequence.request.prompt_tokens)
        self.num_generated_tokens += num_new_tokens
        num_drafted, num_accepted = stats.per_step_drafted[-1], stats.per_step_accepted[-1]
        if num_drafted:
            self.num_drafts += 1
            self.num_draft_tokens += num_drafted
            self.num_accepted_tokens += num_accepted
            missing = num_drafted - len(self.num_accepted_per_position)
            self.num_accepted_per_position += [0] * missing
            for i in range(num_accepted):
                self.num_accepted_per_position[i] += 1

    def count_end(self, reason: str) -> None:
        self.num_finished[reason] = self.num_finished.get(reason, 0) + 1
