"""Predicted time of a loop, from replayed steps (`runtime.tuning.replay`) and step costs (`runtime.costs`).

Times are added up, step by step, and divided only at the end: a mean of speedups gives short steps the weight of long
ones.
"""

from dataclasses import dataclass

from runtime.costs import CostModel
from runtime.tuning.replay import ReplayedBatches, ReplayedStep


@dataclass(frozen=True)
class LoopSeconds:
    """The time of a loop: its first steps, which compute the prompts, and all others, with the drafting."""

    prompts: float
    others: float

    @property
    def total(self) -> float:
        return self.prompts + self.others

    def scaled(self, by: "LoopSeconds") -> "LoopSeconds":
        """Each part as many times as long as `by` says."""
        return LoopSeconds(self.prompts * by.prompts, self.others * by.others)

    def over(self, other: "LoopSeconds") -> "LoopSeconds":
        """Ratio of each part to the other's; 1 if the other has no time to compare with."""
        pairs = ((self.prompts, other.prompts), (self.others, other.others))
        return LoopSeconds(*(own / others if others else 1.0 for own, others in pairs))


def predict(replayed: ReplayedBatches, costs: CostModel, max_num_tokens: int) -> LoopSeconds:
    """All steps and the drafting before them; prompts are computed `max_num_tokens` at a time."""
    seconds = {True: 0.0, False: replayed.draft_time_s}
    for step in replayed.steps:
        seconds[step.is_first] += step_s(step, costs, max_num_tokens)
    return LoopSeconds(seconds[True], seconds[False])


def step_s(step: ReplayedStep, costs: CostModel, max_num_tokens: int) -> float:
    """Seconds of one step without its drafting.

    The first one computes each prompt by itself, with its draft in the last piece. In the others the rows are folded,
    and each attends to its own context: with 100 and 300 tokens they cost what two of 200 do, and so with drafts.
    """
    num_rows = len(step.num_tokens)
    if step.is_first:
        rows = zip(step.num_tokens, step.draft_lens, strict=True)
        return sum(costs.context_s(prompt + drafted, max_num_tokens) for prompt, drafted in rows) + costs.host_s
    # The last token of each row is computed in this step, so its context is what is before it.
    context_len = round(sum(step.num_tokens) / num_rows) - 1
    return costs.iteration_s(num_rows, context_len, sum(step.draft_lens) / num_rows)
