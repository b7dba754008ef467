"""`min_tokens` and `allowed_token_ids` against brute force and Hugging Face, with every drafter and the kernels."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_sampling import DRAFTERS, NUM_NEW_TOKENS, PROMPTS, engine_dirs, finish, make_drafter, target, texts
from tiny import VOCAB_SIZE
from transformers import PreTrainedModel

from runtime.core.params import SamplingConfig
from runtime.core.request import Draft, Request, Sequence
from runtime.core.sampling import Positions, Sampler, choose_all
from runtime.core.verify import verify
from runtime.engine.engine import Engine
from runtime.kernels.ops import load_kernels

__all__ = ["engine_dirs", "target"]  # fixtures
RULES = [
    {"min_tokens": 3},
    {"allowed_token_ids": (3, 5, 6, 9, 20, 31)},
    {"min_tokens": 9, "allowed_token_ids": tuple(range(4, 30))},
    {"min_tokens": 4, "repetition_penalty": 1.3, "bad_words": ((6,),)},
]
LAWS = [{}, {"top_k": 0}, {"top_k": 4, "temperature": 0.7}]


def left_by_brute_force(config: SamplingConfig, logits: torch.Tensor, num_generated: int, ends: set[int]) -> list[int]:
    allowed = range(len(logits)) if config.allowed_token_ids is None else config.allowed_token_ids
    return [token for token in allowed if num_generated >= config.min_tokens or token not in ends]


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_choice_is_the_best_of_what_is_left(
    rule: dict[str, Any], law: dict[str, Any], dtype: torch.dtype, kernels: Path
) -> None:
    """Each position of a draft, by the kernels and without: of the tokens left the best, with its noise. So it is
    where the tokens before are in the prompt.
    """
    load_kernels(kernels)
    ends, prompt = {2, 5}, [7, 8, 9, 10]
    config = SamplingConfig(**rule | law)
    logits = torch.randn((8, VOCAB_SIZE), generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[:, list(ends)] += 4  # an end would be chosen everywhere
    sampler, plain = (Sampler(one, prompt, 0, None, ends) for one in (config, SamplingConfig(**law)))
    draft: list[int] = []
    for i, row in enumerate(logits):
        left = left_by_brute_force(config, row, i, ends)
        masked = torch.full_like(row, -torch.inf)
        masked[left] = row[left]
        processors = {"repetition_penalty", "bad_words"} & rule.keys()
        if not processors:
            expected = plain.choose([*prompt, *draft], masked)
            if not law:
                assert expected == max(left, key=lambda token: (float(row[token]), -token))
            assert sampler.choose([*prompt, *draft], row) == expected
        prefix = [*prompt, *draft]
        rest = Sampler(config.after(i), prefix, 0, None, ends)
        assert torch.equal(rest.legal(prefix, [], row[None]), sampler.legal(prefix, [], row[None]))
        draft.append(sampler.choose(prefix, row))
        assert draft[-1] in left
    before = logits.clone()
    (chosen,) = choose_all([Positions(sampler, list(prompt), draft[:-1], logits)])
    assert list(chosen) == draft == list(sampler.choices(list(prompt), draft[:-1], logits))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_change_no_output(drafter: str, engine_dirs: dict[str, Path], target: PreTrainedModel) -> None:
    """Greedy as Hugging Face's `min_new_tokens`; sampled as without a drafter. Without the rule outputs end before."""
    ids = torch.tensor([PROMPTS[1]])
    free = target.generate(ids, max_new_tokens=NUM_NEW_TOKENS, do_sample=False, eos_token_id=-1)[0, ids.shape[1] :]
    end = int(free[1])
    early = target.generate(ids, max_new_tokens=NUM_NEW_TOKENS, do_sample=False, eos_token_id=end, pad_token_id=0)
    held = target.generate(
        ids, max_new_tokens=NUM_NEW_TOKENS, min_new_tokens=8, do_sample=False, eos_token_id=end, pad_token_id=0
    )
    assert early.shape[1] < ids.shape[1] + 8 <= held.shape[1]
    engine, allowed = Engine.open(engine_dirs["target"]), tuple(range(1, VOCAB_SIZE, 2))
    configs = [
        SamplingConfig(min_tokens=8),
        SamplingConfig(top_k=0, min_tokens=8),
        SamplingConfig(allowed_token_ids=allowed),
        SamplingConfig(top_k=0, allowed_token_ids=allowed, min_tokens=5),
    ]
    requests = [Request(i, PROMPTS[1], NUM_NEW_TOKENS, frozenset({end}), sampling=one) for i, one in enumerate(configs)]
    outputs = texts(finish(engine, requests, make_drafter(drafter, engine_dirs), 5))
    assert outputs[0] == held[0, ids.shape[1] :].tolist()
    assert outputs == texts(finish(engine, requests, None, 0))
    for output, config in zip(outputs, configs, strict=True):
        assert len(output) > config.min_tokens or output[-1] == end or len(output) == NUM_NEW_TOKENS
        assert end not in output[: config.min_tokens]
        assert config.allowed_token_ids is None or {*output} <= {*allowed}


def test_a_draft_of_tokens_that_may_not_be_chosen_is_rejected() -> None:
    """A draft is cut at the first such token, whether it was drawn from probabilities or looked up."""
    config = SamplingConfig(top_k=0, min_tokens=2, allowed_token_ids=(3, 4, 5))
    sequence = Sequence.start(Request(0, (7, 8), 9, frozenset({5}), sampling=config))
    logits = torch.zeros(4, VOCAB_SIZE)
    probs = torch.full((3, VOCAB_SIZE), 1 / VOCAB_SIZE, dtype=torch.float64)
    for tokens, most in (([3, 9, 3], 1), ([5, 3, 3], 0), ([3, 4, 6], 2)):
        for draft in (Draft(tokens), Draft(tokens, probs)):
            verdict = verify(sequence, draft, logits)
            assert verdict.num_accepted <= most
            assert verdict.next_token in ((3, 4, 5) if verdict.num_accepted == 2 else (3, 4))
