"""A budget for thinking against the rule written again over whole texts, with every drafter and the kernels."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_sampling import DRAFTERS, NUM_NEW_TOKENS, PROMPTS, engine_dirs, finish, make_drafter, target, texts
from tiny import VOCAB_SIZE, eager_logits
from transformers import PreTrainedModel

from runtime.core.params import SamplingConfig
from runtime.core.request import Draft, Request, Sequence
from runtime.core.sampling import NoValidToken, Positions, Sampler, choose_all
from runtime.core.thinking_budget import Thinking
from runtime.core.verify import verify
from runtime.drafters.ngram import NgramLookup
from runtime.drafters.under_grammar import UnderGrammar
from runtime.engine.engine import Engine
from runtime.kernels.ops import load_kernels

__all__ = ["engine_dirs", "target"]  # fixtures
PIECES = ["a", "b", "c", "d", "ca", "bc", "dab", "cda"]
"""Texts of the tokens: thinking begins with `ab` and ends with `cd`, in whatever tokens."""
OPEN, CLOSE, END = "ab", "cd", (2, 3)


def piece(token: int) -> str:
    return PIECES[token % len(PIECES)]


def thinking(*, opened: bool, again: Any = None) -> Thinking:
    return Thinking("made", OPEN, (CLOSE,), END, again, piece, lambda prompt: opened)


def forced_by_brute_force(output: list[int], budget: int, *, opened: bool) -> int | None:
    """The token that must come after `output`: its whole text is cut into parts by the tags, and tokens are counted."""
    text = "".join(map(piece, output))
    turns, place, is_open = [], 0, opened
    while (found := text.find(CLOSE if is_open else OPEN, place)) >= 0:
        place, is_open = found + 2, not is_open
        turns.append(place)  # thinking turns on or off with the token that has the tag's last character
    ends = [len("".join(map(piece, output[: i + 1]))) for i in range(len(output))]
    thought, since, was_open = 0, list[int](), opened
    for token, end in zip(output, ends, strict=True):
        is_open = opened ^ (sum(turn <= end for turn in turns) % 2 == 1)
        has_turned = any(turn <= end and turn > end - len(piece(token)) for turn in turns)
        thought += was_open and is_open
        since = [] if has_turned else [*since, token]
        was_open = is_open
    if not was_open or thought < budget:
        return None
    return END[1] if since[-1:] == [END[0]] else END[0]


def by_brute_force(
    model: PreTrainedModel, request: Request, budget: int, *, opened: bool, plain: SamplingConfig
) -> list[int]:
    """Token by token from Hugging Face's logits: no engine, no draft."""
    tokens, sampler = list(request.prompt_tokens), Sampler(plain, request.prompt_tokens)
    for _ in range(request.max_new_tokens):
        output = tokens[len(request.prompt_tokens) :]
        forced = forced_by_brute_force(output, budget, opened=opened)
        logits = eager_logits(model, tokens)[-1]
        if forced is not None:
            logits = torch.full_like(logits, -torch.inf).index_fill_(0, torch.tensor([forced]), 0.0)
        tokens.append(sampler.choose(tokens, logits))
    return tokens[len(request.prompt_tokens) :]


Case = tuple[Request, list[int]]


@pytest.fixture(scope="module")
def cases(target: PreTrainedModel) -> dict[bool, list[Case]]:
    """Requests and outputs by brute force, where the prompt has opened thinking and where not, for each budget."""
    found: dict[bool, list[Case]] = {True: [], False: []}
    for opened, made in found.items():
        for law in ({}, {"top_k": 0, "temperature": 1.5}, {"top_k": 0, "random_seed": 3, "temperature": 3.0}):
            for budget in (0, 1, 5):
                config = SamplingConfig(thinking_token_budget=budget, **law)
                asked = Request(
                    len(made), PROMPTS[1], NUM_NEW_TOKENS, sampling=config, thinking=thinking(opened=opened)
                )
                expected = by_brute_force(target, asked, budget, opened=opened, plain=SamplingConfig(**law))
                made.append((asked, expected))
    return found


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("drafter", [*DRAFTERS, "under grammar"])
def test_drafts_change_no_output(
    drafter: str, opened: bool, engine_dirs: dict[str, Path], cases: dict[bool, list[Case]]
) -> None:
    """Forced where the rule says so, and free elsewhere."""
    engine, num_forced = Engine.open(engine_dirs["target"]), 0
    lookup = UnderGrammar(NgramLookup(2)) if drafter == "under grammar" else make_drafter(drafter, engine_dirs)
    outputs = texts(finish(engine, [request for request, _ in cases[opened]], lookup, 5))
    assert outputs == [expected for _, expected in cases[opened]]
    for output, (request, _) in zip(outputs, cases[opened], strict=True):
        budget = request.sampling.thinking_token_budget or 0
        forced = [forced_by_brute_force(output[:i], budget, opened=opened) for i in range(len(output))]
        num_forced += sum(one is not None for one in forced)
        assert all(one in (None, token) for one, token in zip(forced, output, strict=True))
    assert num_forced > 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_position_of_a_draft_has_its_own_rule(dtype: torch.dtype, kernels: Path) -> None:
    """Thinking is opened, spent, closed and left within one draft."""
    load_kernels(kernels)
    config = SamplingConfig(thinking_token_budget=2, top_k=0)
    request = Request(0, (9, 9), 20, sampling=config, thinking=thinking(opened=False))
    logits = torch.randn((9, VOCAB_SIZE), generator=torch.Generator().manual_seed(1)).to(dtype)
    draft, prefix = [0, 1, 0, 0, 2, 3, 1, 1], [9, 9]  # `ab`, two thoughts, `cd` forced, and two tokens after it
    sequence = Sequence.start(request)
    (chosen,) = choose_all([Positions(sequence.sampler, prefix, draft, logits)])
    plain = Sampler(SamplingConfig(top_k=0), prefix)
    free = [plain.choose([*prefix, *draft[:i]], row) for i, row in enumerate(logits)]
    wanted = [*free[:4], 2, 3, *free[6:]]
    found = list(chosen)
    assert found == wanted[: len(found)]
    rows = sequence.sampler.legal(prefix, draft, logits)
    assert [int((row > -torch.inf).sum()) for row in rows] == [VOCAB_SIZE] * 4 + [1, 1] + [VOCAB_SIZE] * 3
    assert sequence.sampler.num_legal(prefix, [0, 1, 0, 0, 0]) == 4 and sequence.sampler.forced(prefix, draft[:4]) == [
        2,
        3,
    ]
    probs = torch.full((5, VOCAB_SIZE), 1 / VOCAB_SIZE, dtype=torch.float64)
    verdict = verify(sequence, Draft([0, 1, 0, 0, 5], probs), torch.zeros(6, VOCAB_SIZE))
    assert verdict.num_accepted == 4 and verdict.next_token == 2


def test_thinking_that_is_spent_is_not_opened_again() -> None:
    """A token that would open it is forbidden: as `<think>`, or gpt-oss's `analysis` behind `<|channel|>`."""
    logits = torch.zeros(1, VOCAB_SIZE)
    for again, before, token in ((((), 6), [0, 1, 2, 3], 6), (((0,), 1), [0, 1, 2, 3, 0], 1)):
        made = thinking(opened=False, again=again)
        config = SamplingConfig(thinking_token_budget=0)
        sampler = Sequence.start(Request(0, (9,), 9, sampling=config, thinking=made)).sampler
        left = sampler.legal([9, *before], [], logits)[0]
        assert left[token] == -torch.inf and int((left > -torch.inf).sum()) == VOCAB_SIZE - 1
        assert sampler.legal([9], [], logits)[0, token] == 0  # the first time it may


def test_what_else_forbids_the_end_is_named() -> None:
    config = SamplingConfig(thinking_token_budget=0, allowed_token_ids=(4, 5))
    sequence = Sequence.start(Request(0, (9,), 9, sampling=config, thinking=thinking(opened=True)))
    with pytest.raises(NoValidToken, match=r"allowed_token_ids and thinking_token_budget leave none"):
        verify(sequence, Draft([]), torch.zeros(1, VOCAB_SIZE))
