"""Allocation of a step's draft tokens: those likeliest to be accepted are sent, until the next costs too much.

What a step costs depends on how many tokens it has in all its rows together, not on whose they are (`runtime.batch`
folds rows). And a draft token is accepted no oftener than the one before it. So of any number of tokens the likeliest
are the best, they are beginnings of drafts, and of all allocations only one for each number has to be looked at.
"""

from collections.abc import Sequence as Seq


def allocate(survivals: Seq[Seq[float]], costs: Seq[float]) -> list[int]:
    """The draft length of each row for which the tokens accepted, less what they cost, are most; of equals the fewest.

    survivals[i][k] is the probability that the first k + 1 tokens of row i's draft are accepted, which falls with k;
    costs[n] is what n draft tokens in the step cost, in accepted tokens too.

    With survivals of (0.9, 0.2) and (0.5, 0.4) and 0.3 for a token, 0.9, 0.5 and 0.4 are worth it: lengths 1 and 2.
    """
    offers = sorted(((p, -i) for i, row in enumerate(survivals) for p in row), reverse=True)
    best_num, best_value, promised = 0, -costs[0], 0.0
    for num, (survives, _) in enumerate(offers, 1):
        promised += survives
        value = promised - costs[num]
        if value > best_value:
            best_num, best_value = num, value
    lengths = [0] * len(survivals)
    for _, i in offers[:best_num]:
        lengths[-i] += 1
    return lengths
