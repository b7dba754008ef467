"""Comparison of drafts with the target's logits, so that the accepted tokens follow the target's own distribution.

By tokens: the target chooses its own token at every position, and a draft token is accepted if it is that token. By
probabilities, for a sampling request whose draft has the distribution that it was drawn from: block verification (Sun
et al., arXiv 2403.10444), which accepts more than a test of each token alone (Chen et al., arXiv 2302.01318).
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from torch import Tensor

from runtime.core.request import Draft, Sequence, VerifyResult
from runtime.core.sampling import NoValidToken, Positions, Sampler, choose_all, draw
from runtime.util.errors import SpecDecError


def verify_all(
    sequences: Seq[Sequence], drafts: Seq[Draft], all_logits: Seq[Tensor]
) -> list[VerifyResult | NoValidToken]:
    """The verdict on each sequence's draft; row i of its logits [draft_len + 1, vocab] follows i draft tokens. A
    verdict is NoValidToken if the sequence cannot be continued.

    Drafts that are compared by tokens are verified for all sequences at once. The logits of tokens that a request
    forbids (by a grammar, a budget for thinking or a mask) are then overwritten, unless the request keeps logits.
    """
    by_tokens = [i for i, draft in enumerate(drafts) if not _is_by_probs(sequences[i], draft)]
    asked = [_positions(sequences[i], drafts[i], all_logits[i]) for i in by_tokens]
    chosen = dict(zip(by_tokens, choose_all(asked), strict=True))
    return [
        _verdict(*of_one, chosen.get(i)) for i, of_one in enumerate(zip(sequences, drafts, all_logits, strict=True))
    ]


def compute_masks_ahead(sequences: Seq[Sequence], drafts: Seq[Draft]) -> None:
    """Begin to compute the grammar masks for `verify_all`, while the target computes its step."""
    for sequence, draft in zip(sequences, drafts, strict=True):
        matcher = sequence.sampler.matcher
        if matcher is not None and not _is_by_probs(sequence, draft):
            matcher.compute_ahead(sequence.tokens, draft.tokens)


def verify(sequence: Sequence, draft: Draft, logits: Tensor) -> VerifyResult:
    """The verdict of `verify_all` for one sequence; NoValidToken is raised."""
    (verdict,) = verify_all([sequence], [draft], [logits.clone()])
    if isinstance(verdict, NoValidToken):
        raise verdict
    return verdict


def _positions(sequence: Sequence, draft: Draft, logits: Tensor) -> Positions:
    is_spare = not sequence.request.wants_logits
    return Positions(sequence.sampler, sequence.tokens, draft.tokens, logits, is_spare)


def _is_by_probs(sequence: Sequence, draft: Draft) -> bool:
    return draft.probs is not None and bool(draft.tokens) and not sequence.sampler.is_greedy


def _verdict(
    sequence: Sequence, draft: Draft, logits: Tensor, chosen: Iterable[int] | None
) -> VerifyResult | NoValidToken:
    try:
        if chosen is None:
            sequence.is_drawn_by_probs = True
            return _verify_probs(sequence.sampler, sequence.tokens, draft, logits)
        return verify_tokens(draft.tokens, chosen)
    except NoValidToken as error:
        num_kept = error.position - len(sequence.tokens)
        if num_kept == 0:
            return error
        # The output may end before that position; if it does not, the next step has no token to choose.
        return VerifyResult(num_kept - 1, draft.tokens[num_kept - 1])


def verify_tokens(draft_tokens: Seq[int], target_tokens: Iterable[int]) -> VerifyResult:
    """The verdict by tokens. Element i of `target_tokens` is the target's choice after i draft tokens; no more elements
    are computed than needed.

    verify_tokens([5, 6, 7], [5, 6, 9, 4]) accepts 5 and 6 and recovers 9; verify_tokens([5, 6, 7], [5, 6, 7, 4])
    accepts all and adds the bonus token 4.
    """
    for num_accepted, token in enumerate(target_tokens):
        if num_accepted == len(draft_tokens) or token != draft_tokens[num_accepted]:
            return VerifyResult(num_accepted, token)
    raise AssertionError("the target chose fewer tokens than were drafted")


def _verify_probs(sampler: Sampler, prefix: list[int], draft: Draft, logits: Tensor) -> VerifyResult:
    """Verify a draft as a block (Sun et al., arXiv 2403.10444, Algorithm 2): on average it accepts at least as many
    tokens as a test of each token alone.

    `share` is the probability that at least i tokens are accepted, given the first i tokens. It may rise again: if the
    target gives the first token half of the draft's probability, and the second token twice the draft's, both are
    accepted with probability 1/2 x 2 = 1. The number of accepted tokens is the last i at which a uniform number is
    below its threshold.
    """
    assert draft.probs is not None
    start, prefix = len(prefix), list(prefix)
    share, num_accepted, weights = 1.0, 0, logits[0]
    for i, token in enumerate(draft.tokens):
        try:
            target_probs = sampler.probs(prefix, logits[i])
        except NoValidToken:
            if i == 0 or _accepts(sampler, start, i, share):
                raise
            break
        draft_probs = draft.probs[i].to(logits.device)
        draft_prob = float(draft_probs[token])
        if not draft_prob > 0:
            raise SpecDecError(
                f"the drafter proposed token {token}, and gives it the probability {draft_prob}",
                hint="`Draft.probs` must be the distribution the tokens were drawn from",
            )
        residual = (share * target_probs - draft_probs).clamp(min=0)
        left = float(residual.sum())
        if i == 0 or _accepts(sampler, start, i, left / (left + 1 - share) if left else float(share == 1)):
            # Equal up to rounding: nothing is left of the residual, and either distribution is right.
            num_accepted, weights = i, residual if left else target_probs
        share = min(share * float(target_probs[token]) / draft_prob, 1.0)
        if share == 0:
            break
        prefix.append(token)
    else:
        if _accepts(sampler, start, len(draft.tokens), share):
            num_accepted, weights = len(draft.tokens), sampler.probs(prefix, logits[len(draft.tokens)])
    return VerifyResult(num_accepted, draw(weights, sampler.uniform(start + num_accepted, "target")))


def _accepts(sampler: Sampler, start: int, num_tokens: int, probability: float) -> bool:
    """Draw whether the first `num_tokens` tokens of the draft that begins at `start` are accepted."""
    return sampler.accept_uniform(start + num_tokens, start) < probability
