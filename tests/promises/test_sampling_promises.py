"""Promises of sampling, verification and grammars, whatever the logits, the penalties and the drafts.

- sampling: scores are Hugging Face's; numbers differ by all that they depend on; some token is always left by cuts
- verification: what is kept follows the target's distribution; a draft is judged after its own tokens; counts are kept
- grammars: masks are those of a matcher that reads the text anew; an end comes where the text is whole, and only there
"""

import itertools
import json
import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from runtime.core import sampling
from runtime.core.grammar import Grammars, Matcher
from runtime.core.occurrences import Occurrences
from runtime.core.params import Grammar, SamplingConfig
from runtime.core.request import Draft, Request, Sequence
from runtime.core.sampling import Sampler, kernel_arguments
from runtime.core.verify import verify

VOCAB_SIZE = 8
tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12)
configs = st.builds(
    SamplingConfig,
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3]),
    top_p=st.sampled_from([1e-9, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    penalize_prompt=st.booleans(),
    random_seed=st.integers(0, 3),
)


def logits_of(seed: int, num: int = 1) -> Tensor:
    return torch.randn(num, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2


def expected_scores(params: SamplingConfig, prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
    """Scores by transformers' processors, and OpenAI's formula for penalties."""
    ids, scores = torch.tensor([[*prompt, *output]]), logits[None].clone()
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    counted = Counter([*prompt, *output] if params.penalize_prompt else output)
    for token, number in counted.items():
        scores[0, token] -= params.presence_penalty + params.frequency_penalty * number
    if params.top_k == 1:
        return scores[0]
    scores = TemperatureLogitsWarper(float(params.temperature))(ids, scores)
    warpers = [TopKLogitsWarper(params.top_k)] if params.top_k else []
    warpers += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    warpers += [MinPLogitsWarper(params.min_p)] if params.min_p else []
    for warper in warpers:
        scores = warper(ids, scores)
    return scores[0]


@given(params=configs, prompt=tokens, output=tokens, seed=st.integers(0, 1000))
def test_scores_are_hugging_faces_and_leave_a_token(
    params: SamplingConfig, prompt: list[int], output: list[int], seed: int
) -> None:
    (logits,), sampler = logits_of(seed), Sampler(params, prompt)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "have_kernels", lambda logits: False)
        scores = sampler.scores([*prompt, *output], logits)
    expected = expected_scores(params, prompt, output, logits)
    assert torch.equal(scores.isfinite(), expected.isfinite()) and scores.isfinite().any()
    torch.testing.assert_close(scores, expected)


@given(params=configs, prompt=tokens, output=tokens, drafts=st.lists(tokens, min_size=1, max_size=4))
def test_counts_of_tokens_are_those_of_each_prefix(
    params: SamplingConfig, prompt: list[int], output: list[int], drafts: list[list[int]]
) -> None:
    """However drafts came and went before. `entries` has what was before the draft, `later` what the draft adds."""
    occurrences = Occurrences(params, len(prompt))
    counts_any = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    for draft in drafts:
        prefix = [*prompt, *output]
        for num_drafted, at in enumerate(occurrences.at(prefix, draft)):
            text = [*prefix, *draft[:num_drafted]]
            found = {int(e[0]): (int(e[2]), int(e[3])) for e in at.entries if e[2]}
            found |= {int(e[0]): (int(e[2]), int(e[3])) for e in at.later}
            counted = text if params.penalize_prompt else text[len(prompt) :]
            expected = {token: (text.count(token), counted.count(token)) for token in text} if counts_any else {}
            assert {token: found.get(token) for token in expected} == expected
        output = [*output, *draft[:1]]


def test_noise_and_numbers_differ_by_all_that_they_depend_on() -> None:
    numbers, keys = [], []
    for seed, index, prompt in itertools.product((0, 1), (0, 1, 2), ((5,), (5, 6), (6, 5))):
        sampler = Sampler(SamplingConfig(random_seed=seed, top_k=0), prompt, index)
        for position in (3, 4, 5):
            numbers.append(sampler.uniform(position, "target"))
            for of_draft in (sampler.draft_uniform, sampler.accept_uniform):
                numbers += [of_draft(position, start) for start in range(1, position + 1)]
            keys.append(sampler.noise_key(position))
    assert len(set(numbers)) == len(numbers) and len(set(keys)) == len(keys)


@given(params=configs, prompt=tokens, draft=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=5))
def test_each_position_of_a_draft_has_its_own_noise(
    params: SamplingConfig, prompt: list[int], draft: list[int]
) -> None:
    sampler = Sampler(params, prompt)
    asked = sampling.Positions(sampler, prompt, draft, logits_of(0, len(draft) + 1))
    _, _, keys, *_ = kernel_arguments([asked])
    expected = [sampler.noise_key(len(prompt) + i) for i in range(len(draft) + 1)]
    assert [int(key) % 2**64 for key in keys] == expected
    assert sampler.is_greedy or len(set(expected)) == len(expected)


# --- verification ---


@pytest.mark.parametrize(
    ("draft_len", "sharpness"),
    [(1, 3.0), (2, 0.5), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, 0.5), (2, 3.0)))],
)
def test_kept_tokens_follow_the_targets_distribution_and_counts_are_theirs(draft_len: int, sharpness: float) -> None:
    """The joint distribution of the next two of three tokens, whatever the drafts were drawn from."""
    num, generator = 1500, torch.Generator().manual_seed(1)
    target = torch.randn(draft_len + 1, 3, generator=generator) * 1.5
    drafts = torch.softmax(torch.randn(draft_len, 3, generator=generator).double() * sharpness, -1)
    counts = Counter[tuple[int, int]]()
    for seed in range(num):
        sequence = Sequence.start(Request(0, (0,), 9, sampling=SamplingConfig(top_k=0, random_seed=seed)))
        rng = random.Random(seed)
        proposed = [rng.choices(range(3), row.tolist())[0] for row in drafts]
        verdict = verify(sequence, Draft(proposed, drafts), target)
        kept = [*proposed[: verdict.num_accepted], verdict.next_token]
        assert 0 <= verdict.num_accepted <= draft_len
        # A row's logits do not depend on the tokens before, so the text may be gone on with by hand.
        while len(kept) < 2:
            kept.append(sequence.sampler.choose([0, *kept], target[len(kept)]))
        counts[kept[0], kept[1]] += 1
    probs = torch.softmax(target.double(), -1)
    for (a, b), number in counts.items():
        share = float(probs[0, a] * probs[1, b])
        assert abs(number / num - share) < 5 * (share * (1 - share) / num) ** 0.5, (a, b)


@given(prompt=tokens, draft=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_positions_of_a_draft_are_judged_after_its_own_tokens(prompt: list[int], draft: list[int], seed: int) -> None:
    """A draft that is certain of its tokens is accepted as far as the target's own choice would be allowed to go on."""
    params = SamplingConfig(top_k=0, presence_penalty=50.0, random_seed=seed)  # what occurred is as good as banned
    sequence = Sequence.start(Request(0, tuple(prompt), 9, sampling=params))
    probs = torch.nn.functional.one_hot(torch.tensor(draft), VOCAB_SIZE).double()
    logits = logits_of(seed, len(draft) + 1)
    logits[range(len(draft)), draft] += 20.0  # accepted wherever they may be
    verdict = verify(sequence, Draft(draft, probs), logits)
    text = list(prompt)
    if len({*prompt, *draft}) == VOCAB_SIZE:
        return  # where all occurred none is banned
    for token in draft[: verdict.num_accepted]:
        assert token not in text
        text.append(token)
    assert verdict.next_token not in text


def test_draft_before_a_position_without_tokens_is_kept_and_told_once() -> None:
    """All tokens are banned once the draft's last has come: as many are kept as can be, each once."""
    for num in range(1, 4):
        words = tuple((num, token) for token in range(VOCAB_SIZE))
        sequence = Sequence.start(Request(0, (7,), 9, sampling=SamplingConfig(bad_words=words)))
        logits = torch.full((num + 1, VOCAB_SIZE), -5.0)
        draft = list(range(1, num + 1))
        for i, token in enumerate(draft):
            logits[i, token] = 5.0
        verdict = verify(sequence, Draft(draft), logits)
        assert [*draft[: verdict.num_accepted], verdict.next_token] == draft


# --- grammars ---


def byte_grammars() -> tuple[Any, Grammars, int]:
    from byte_tokenizers import byte_level

    tokenizer = byte_level()
    end = tokenizer.eos_token_id
    return tokenizer, Grammars(tokenizer, len(tokenizer), frozenset([end])), end


FORMS = [
    Grammar("regex", "(ab|ba)+"),
    Grammar("choice", json.dumps(["ab", "abab", "bb"])),
    Grammar("json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)
def test_masks_are_those_of_a_matcher_that_reads_anew(form: Grammar) -> None:
    """Through random texts, with drafts that are rejected, masks that are computed ahead, and lists that grow."""
    tokenizer, grammars, end = byte_grammars()
    compiled, draw = grammars.compiled(form), random.Random(0)
    for _ in range(12):
        matcher, text = Matcher(compiled, 0, frozenset([end])), list[int]()
        for _ in range(12):
            anew = Matcher(compiled, 0, frozenset([end]))
            (mask,) = anew.allowed(text, [])
            if mask is None:
                break
            grows = draw.random() < 0.2
            choices = [int(token) for token in mask.allowed.nonzero()[0] if token != end or not grows]
            draft = [draw.choice(choices)] if choices and not grows and draw.random() < 0.7 else []
            if draw.random() < 0.5 or grows:
                matcher.compute_ahead(text, draft)
            if grows and choices:  # the text goes on, and what was computed is of another one
                assert matcher._ahead is not None
                matcher._ahead.masks.exception()
                text.append(draw.choice(choices))
                (mask,) = Matcher(compiled, 0, frozenset([end])).allowed(text, [])
            for i, found in enumerate(matcher.allowed(text, draft)):
                (expected,) = Matcher(compiled, 0, frozenset([end])).allowed([*text, *draft[:i]], [])
                if not i or draft[i - 1] != end:
                    assert (found is None) == (expected is None)
                    assert found is None or (found.allowed == expected.allowed).all()  # type: ignore[union-attr]
            if mask is None:
                break
            choices = [int(token) for token in mask.allowed.nonzero()[0] if token != end]
            if not choices:
                break
            text.append(draw.choice(choices))
            is_whole = is_of(form, tokenizer.decode(text))
            (mask,) = matcher.allowed(text, [])
            assert mask is None or is_whole is None or bool(mask.allowed[end]) == is_whole
            if is_whole is not None:
                assert matcher.num_legal(text, [end]) == is_whole


def is_of(form: Grammar, text: str) -> bool | None:
    """Answer of `re` and `json`; None where it is not known."""
    import re

    if form.kind == "regex":
        return re.fullmatch(form.text, text) is not None
    if form.kind == "choice":
        return text in json.loads(form.text)
    return None


def test_grammar_that_was_asked_for_last_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.core import grammar

    monkeypatch.setattr(grammar, "_MOST_COMPILED", 3)
    _, grammars, _ = byte_grammars()
    forms = [Grammar("regex", letter) for letter in "abcd"]
    first = grammars.compiled(forms[0])
    for form in forms[1:]:
        newest = grammars.compiled(form)
        assert grammars.compiled(forms[0]) is first and grammars.compiled(form) is newest
