"""Drafts of requests with a grammar: they change no text, what is forced is drafted, and sampling stays exact."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import byte_tokenizers
import pytest
import regex
import torch
from strength import draws
from tiny import make_model
from transformers import PreTrainedTokenizerFast

from runtime.core.grammar import Grammars
from runtime.core.params import Grammar, SamplingConfig
from runtime.core.request import Draft, Request
from runtime.core.request import Sequence as RequestSequence
from runtime.core.verify import verify
from runtime.drafters.under_grammar import UnderGrammar
from runtime.loop.lossless.chi_squared import chi_squared_of, detectable_total_variation, p_value_of
from specdec_cli import (
    LLM,
    ChainDrafter,
    DraftTargetDrafter,
    GrammarDrafter,
    NgramDrafter,
    SamplingParams,
    SelfDrafter,
    SuffixDrafter,
)

PROMPTS = ["The little dog had a red ball. The", "Once upon a time there was", "the ball the ball the ball"]
FORMS: list[dict[str, Any]] = [
    {
        "json_schema": {
            "type": "object",
            "properties": {"dog": {"type": "string", "maxLength": 6}, "balls": {"type": "integer", "maximum": 50}},
            "required": ["dog", "balls"],
            "additionalProperties": False,
        }
    },
    {"json_schema": {"type": "array", "items": {"enum": ["ball", "the dog", 3]}, "minItems": 1, "maxItems": 4}},
    {"regex": r"(the (dog|ball)( and )?){1,3}[0-9]{2,4}"},
    {"regex": "[^a-c]{3,9}"},
    {"choice": ["the ball", "the dog", "a ball"]},
    {"grammar": 'start: "<" (WORD ", ")+ WORD ">"\nWORD: /[a-z]{1,3}/'},
    {},
]


def random_draft(tokens: list[int], max_draft_len: int) -> list[int]:
    """Tokens that nothing suggests, and the same for the same text."""
    return random.Random(len(tokens)).choices(range(300), k=max_draft_len)


@pytest.fixture(scope="module")
def llm(self_draft_engine_dir: Path) -> Iterator[LLM]:
    with LLM(self_draft_engine_dir) as opened:
        yield opened


@pytest.fixture(scope="module")
def v1(self_draft_engine_dir: Path) -> Iterator[LLM]:
    with LLM(self_draft_engine_dir, mode="orchestrator") as opened:
        yield opened


@pytest.fixture(scope="module")
def drafters(make_engine_dir: Any, tokenizer: PreTrainedTokenizerFast) -> list[Any]:
    model = make_model("llama", vocab_size=len(tokenizer), seed=1)
    draft_engine_dir = make_engine_dir(model, max_draft_len=0, speculative_decoding_mode="none", max_seq_len=160)
    return [
        NgramDrafter(4),
        SuffixDrafter(4),
        GrammarDrafter(4),
        DraftTargetDrafter(draft_engine_dir, 3),
        SelfDrafter(4),
        ChainDrafter([NgramDrafter(4), SelfDrafter(4)]),
        random_draft,
    ]


def answers(
    llm: LLM, cases: Sequence[tuple[str, SamplingParams]], drafter: Any = None
) -> list[tuple[list[int], str | None]]:
    outputs = llm.generate([prompt for prompt, _ in cases], [params for _, params in cases], drafter=drafter)
    return [(output.token_ids, output.finish_reason) for output in outputs]


def random_cases(rng: random.Random, num: int) -> list[tuple[str, SamplingParams]]:
    """Requests with and without forms, that are greedy or sample, with penalties and cuts."""
    cases = []
    for _ in range(num):
        more: dict[str, Any] = rng.choice([{}, {"top_k": 20}, {"top_p": 0.8}, {"repetition_penalty": 1.3}])
        temperature = rng.choice([0.0, 0.7, 1.0, 1.5])
        params = SamplingParams(
            temperature=temperature,
            seed=rng.getrandbits(32),
            max_tokens=rng.randint(4, 40),
            **more,
            **rng.choice(FORMS),
        )
        cases.append((rng.choice(PROMPTS), params))
    return cases


def test_a_seed_gives_the_same_text_with_any_drafter_and_none(llm: LLM, v1: LLM, drafters: list[Any]) -> None:
    """Alone and undrafted, and together with any drafter, in either mode."""
    rng = random.Random(7)
    for drafter in drafters:
        cases = random_cases(rng, draws(300, 4))
        alone = [answers(llm, [case])[0] for case in cases]
        for engine in (llm, v1):
            assert answers(engine, cases, drafter) == alone, (drafter, cases)


def test_forced_tokens_are_drafted_and_all_accepted(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=60, **FORMS[0])
    (plain,) = llm.generate(PROMPTS[0], params)
    (forced,) = llm.generate(PROMPTS[0], params, drafter=GrammarDrafter(8))
    assert forced.token_ids == plain.token_ids
    assert forced.stats.num_draft_tokens == forced.stats.num_accepted_draft_tokens > 10
    assert forced.stats.num_steps == plain.stats.num_steps - forced.stats.num_accepted_draft_tokens
    free = SamplingParams(temperature=0, max_tokens=10)
    assert llm.generate(PROMPTS[0], free, drafter=GrammarDrafter(8))[0].stats.num_draft_tokens == 0


def test_no_illegal_token_is_sent(llm: LLM) -> None:
    """Random tokens are nearly all illegal digits."""
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=12, regex="[0-9]{12}", ignore_eos=True)
    free = SamplingParams(temperature=1.0, seed=0, max_tokens=12, ignore_eos=True)
    held, unheld = (
        llm.generate(PROMPTS[0], one, drafter=random_draft, draft_len_mode="fixed")[0].stats.num_draft_tokens
        for one in (params, free)
    )
    assert held < 6 < unheld


EXPRESSION, NUM_DRAWS, SMALLEST_P_VALUE = "(a|b|d)(b|d|e|g)(e|g|h)+", draws(5000, 1200), 1e-3


class Fixed:
    """A drafter with one draft."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft

    def propose(self, sequences: list[RequestSequence], max_draft_len: int) -> list[Draft]:
        return [self.draft] * len(sequences)

    def forget(self, request_id: int) -> None:
        """Forget nothing."""


class Spelling:
    """Tokens by their texts, and which of them the expression allows, by `regex`."""

    def __init__(self) -> None:
        self.tokenizer = byte_tokenizers.byte_level()
        self.vocab_size = len(self.tokenizer)
        named = self.tokenizer.convert_ids_to_tokens(range(3, self.vocab_size))
        self.texts = {i: text for i, text in enumerate(named, start=3) if text.isascii()}
        self.legal = cache(self._legal)

    def _legal(self, text: str) -> list[int]:
        """Tokens that may follow."""
        return [i for i, one in self.texts.items() if regex.fullmatch(EXPRESSION, text + one, partial=True)]

    def softmax(self, logits: torch.Tensor, allowed: list[int]) -> torch.Tensor:
        """(vocab,) over the allowed tokens alone."""
        probs = torch.zeros(self.vocab_size, dtype=torch.float64)
        probs[allowed] = torch.softmax(logits[allowed].double(), dim=0)
        return probs


def test_rejection_sampling_is_exact_under_a_grammar() -> None:
    """Pairs of tokens follow the brute force of softmaxes over legal tokens, though drafts are drawn from all tokens.

    A total variation of 0.14 would be seen in 99 of 100 runs, of 0.07 with `--slow`.
    """
    spelling, generator = Spelling(), torch.Generator().manual_seed(0)
    letters = [i for i, text in spelling.texts.items() if text in [*"abdegh", "ab"]]
    logits, draft_logits = (torch.full((3, spelling.vocab_size), -9.0) for _ in range(2))
    logits[:, letters] = torch.randn((3, len(letters)), generator=generator)
    draft_logits[:, letters] = torch.randn((3, len(letters)), generator=generator)
    grammar = Grammars(spelling.tokenizer, spelling.vocab_size, frozenset({2})).compiled(Grammar("regex", EXPRESSION))
    sampling = SamplingConfig(temperature=1.0, top_k=0)
    counts: Counter[int] = Counter()
    num_accepted = num_cut = 0
    probs = torch.stack([spelling.softmax(row, letters) for row in draft_logits[:2]])
    drawn = torch.multinomial(probs, NUM_DRAWS, replacement=True, generator=generator).T.tolist()
    for index, tokens in enumerate(drawn):
        request = Request(index, (5, 6), 8, frozenset({2}), sampling=sampling, return_index=index, grammar=grammar)
        sequence = RequestSequence.start(request)
        (draft,) = UnderGrammar(Fixed(Draft(tokens, probs))).propose([sequence], 2)
        num_cut += len(draft.tokens) < 2
        verdict = verify(sequence, draft, logits[: len(draft.tokens) + 1])
        num_accepted += verdict.num_accepted
        output = [*draft.tokens[: verdict.num_accepted], verdict.next_token]
        if len(output) == 1:
            sequence.tokens += output
            output.append(verify(sequence, Draft([]), logits[1:2]).next_token)
        counts[output[0] * spelling.vocab_size + output[1]] += 1
    first = spelling.softmax(logits[0], spelling.legal(""))
    expected = torch.zeros((spelling.vocab_size, spelling.vocab_size), dtype=torch.float64)
    for token in spelling.legal(""):
        expected[token] = first[token] * spelling.softmax(logits[1], spelling.legal(spelling.texts[token]))
    statistic, degrees = chi_squared_of(counts, expected.flatten())
    assert p_value_of(statistic, degrees) > SMALLEST_P_VALUE
    seen = detectable_total_variation(NUM_DRAWS, degrees, SMALLEST_P_VALUE, 0.99)
    assert seen is not None and seen < draws(7, 14) / 100
    assert num_accepted > NUM_DRAWS / 4
    assert num_cut > NUM_DRAWS / 10
