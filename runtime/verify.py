"""Compare drafts with the target's logits, so that what is kept follows the target's own distribution.

By tokens: the target chooses its own token at every position, and a draft token is accepted while it is that token. By
probabilities, for a sampling request whose draft tells the distribution it was drawn from: modified rejection sampling
(Chen et al., arXiv 2302.01318, Algorithm 2).
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from torch import Tensor

from runtime.errors import SpecDecError
from runtime.request import Draft, Sequence, Verdict
from runtime.sampling import NoChoice, Sampler, draw


def verify(sequence: Sequence, draft: Draft, logits: Tensor) -> Verdict:
    """The verdict on a draft of `sequence`. Row i of `logits`, (draft_len + 1, vocab), is after i draft tokens."""
    sampler = sequence.sampler
    try:
        if draft.probs is not None and draft.tokens and not sampler.is_greedy:
            return _verify_probs(sampler, sequence.tokens, draft, logits)
        return verify_tokens(draft.tokens, sampler.choices(sequence.tokens, logits))
    except NoChoice as error:
        num_kept = error.position - len(sequence.tokens)
        if num_kept == 0:
            raise
        # The output may end before that position; if it does not, the next step raises.
        return Verdict(num_kept - 1, draft.tokens[num_kept - 1])


def verify_tokens(draft_tokens: Seq[int], target_tokens: Iterable[int]) -> Verdict:
    """The i-th of `target_tokens` is the target's choice after i draft tokens; asked for no further than needed.

    verify_tokens([5, 6, 7], [5, 6, 9, 4]) accepts 5 and 6 and recovers 9;
    verify_tokens([5, 6, 7], [5, 6, 7, 4]) accepts all and adds the bonus token 4.
    """
    for num_accepted, token in enumerate(target_tokens):
        if num_accepted == len(draft_tokens) or token != draft_tokens[num_accepted]:
            return Verdict(num_accepted, token)
    raise AssertionError("the target chose fewer tokens than were drafted")


def _verify_probs(sampler: Sampler, prefix: list[int], draft: Draft, logits: Tensor) -> Verdict:
    """Accept a draft token with probability min(1, target / draft), else draw from the residual."""
    assert draft.probs is not None
    prefix = list(prefix)
    for i, token in enumerate(draft.tokens):
        target_probs, draft_probs = sampler.probs(prefix, logits[i]), draft.probs[i].to(logits.device)
        draft_prob = float(draft_probs[token])
        if not draft_prob > 0:
            raise SpecDecError(
                f"the drafter says that token {token} has the probability {draft_prob}, and proposed it",
                hint="`Draft.probs` must be the distribution the tokens were drawn from",
            )
        if sampler.uniform(len(prefix), "accept") * draft_prob >= float(target_probs[token]):
            residual = (target_probs - draft_probs).clamp(min=0)
            # Equal up to rounding: nothing is left of the residual, and either distribution is right.
            weights = residual if float(residual.sum()) > 0 else target_probs
            return Verdict(i, draw(weights, sampler.uniform(len(prefix), "target")))
        prefix.append(token)
    bonus_probs = sampler.probs(prefix, logits[len(draft.tokens)])
    return Verdict(len(draft.tokens), draw(bonus_probs, sampler.uniform(len(prefix), "target")))
