"""Compare drafts with the target. Greedy: a draft token is accepted while it is the target's argmax."""

from collections.abc import Sequence as Seq

from runtime.request import Verdict


def verify_greedy(draft_tokens: Seq[int], target_tokens: Seq[int]) -> Verdict:
    """`target_tokens[i]` is the target's choice after i draft tokens; one more than there are draft tokens.

    verify_greedy([5, 6, 7], [5, 6, 9, 4]) accepts 5 and 6 and recovers 9;
    verify_greedy([5, 6, 7], [5, 6, 7, 4]) accepts all and adds the bonus token 4.
    """
    num_accepted = 0
    while num_accepted < len(draft_tokens) and draft_tokens[num_accepted] == target_tokens[num_accepted]:
        num_accepted += 1
    return Verdict(num_accepted, target_tokens[num_accepted])
