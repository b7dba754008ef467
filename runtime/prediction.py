"""How long a loop would take, from what it would do (`runtime.replay`) and what steps cost (`runtime.costs`).

Times are added up, step by step, and divided only at the end: a mean of speedups counts cheap steps like dear ones.
"""

from runtime.costs import CostModel
from runtime.replay import ReplayedBatches, ReplayedStep


def predicted_s(replayed: ReplayedBatches, costs: CostModel, max_num_tokens: int) -> float:
    """Seconds of all steps and of the drafting before them; prompts are computed `max_num_tokens` at a time."""
    return sum(step_s(step, costs, max_num_tokens) for step in replayed.steps) + replayed.draft_time_s


def step_s(step: ReplayedStep, costs: CostModel, max_num_tokens: int) -> float:
    """Seconds of one step without its drafting.

    The first one computes each prompt by itself, with its draft in the last piece. In the others the rows are padded to
    the longest draft, and each row attends to its own context: with 100 and 300 tokens they cost what two of 200 do.
    """
    if step.is_first:
        rows = zip(step.num_tokens, step.draft_lens, strict=True)
        return sum(costs.context_s(prompt + drafted, max_num_tokens) for prompt, drafted in rows) + costs.host_s
    # The last token of each row is computed in this step, so its context is what is before it.
    context_len = round(sum(step.num_tokens) / len(step.num_tokens)) - 1
    return costs.iteration_s(len(step.num_tokens), context_len, max(step.draft_lens))
