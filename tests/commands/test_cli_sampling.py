"""Sampling flags of `run`: each does what Hugging Face's does, and a drafter changes no draw."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_line import NGRAM, PROMPT, PROMPTS, Result, draft_model, each, ids_of
from sentences import Said
from tiny import eager_logits, hf_greedy
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

Run = Callable[..., Result]
Drafters = dict[str, list[object]]
SAMPLING = [
    ["--temperature", 1.3, "--top-k", 20],
    ["--min-p", 0.05, "--temperature", 1.5],
    ["--temperature", 0.9, "--top-k", 40, "--top-p", 0.95, "--repetition-penalty", 1.2, "--no-repeat-ngram-size", 3],
    ["--top-k", 30, "--presence-penalty", 0.6, "--frequency-penalty", 0.4, "--bad-words", "dog", "--bad-words", "a"],
]


@pytest.fixture(scope="session")
def drafters(draft_engine_dir: Path) -> Drafters:
    """The flags of every drafter that leaves the draws to the target."""
    return {
        "none": [],
        "n-gram": ["--ngram-config", NGRAM],
        "draft model": draft_model(draft_engine_dir),
        "custom": ["--drafter", "custom_drafters:LastOccurrence"],
    }


DRAFTERS = pytest.mark.parametrize("drafter", ["none", "draft model"])


@pytest.mark.parametrize("sampling", SAMPLING, ids=lambda flags: " ".join(map(str, flags)))
def test_same_seed_gives_the_same_text_as_without_a_drafter(
    run: Run, drafters: Drafters, sampling: list[object]
) -> None:
    arguments = [*each("--input-text", PROMPTS[:3]), *sampling, "--random-seed", 7, "--max-output-len", 24, "--json"]
    plain = run(*arguments).document
    speculated = run(*arguments, *drafters["draft model"]).document
    assert ids_of(speculated) == ids_of(plain)
    assert speculated["total"]["num_draft_tokens"] > 0


@pytest.mark.parametrize(
    ("flags", "warper"),
    [
        (["--top-k", 3], TopKLogitsWarper(3)),
        (["--top-p", 0.3], TopPLogitsWarper(0.3)),
        (["--min-p", 0.4], MinPLogitsWarper(0.4)),
    ],
)
def test_a_cut_leaves_hugging_faces_tokens_alone(
    run: Run, llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, flags: list[object], warper: LogitsProcessor
) -> None:
    """Nothing but the cut keeps the draws at a high temperature among these tokens."""
    prompt = tokenizer(PROMPT)["input_ids"]

    def num_outside(*more: object) -> int:
        document = run("--temperature", 3.0, "--random-seed", 5, "--max-output-len", 20, *more, "--json").document
        (output,) = ids_of(document)
        scores = eager_logits(llama, [*prompt, *output])[len(prompt) - 1 : -1] / 3.0
        kept = warper(torch.tensor([prompt]), scores).isfinite()
        return sum(not kept[i, token] for i, token in enumerate(output))

    assert num_outside(*flags) == 0 < num_outside()


def test_seeds_decide_the_text(run: Run) -> None:
    def text(seed: int) -> str:
        return run("--temperature", 0.8, "--random-seed", seed, "--max-output-len", 12, "--quiet").stdout

    assert len({text(seed) for seed in (0, 1, 2, -1)}) == 4
    assert text(1) == text(1)
    assert text(0) == run("--temperature", 0.8, "--max-output-len", 12, "--quiet").stdout


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        (["--top-k", 1], None),
        (["--temperature", 0], None),
        (["--temperature", 0, "--top-k", 50, "--top-p", 0.9], "`--temperature 0`; `--top-k`"),
        (["--top-k", 1, "--min-p", 0.1], "`--top-k 1`; `--temperature`"),
    ],
)
def test_top_k_1_and_temperature_0_are_greedy(
    run: Run, llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, flags: list[object], warning: str | None,
    said: Said,
) -> None:  # fmt: skip
    result = run(*flags, "--random-seed", 3, "--max-output-len", 16, "--json")
    assert ids_of(result.document) == [hf_greedy(llama, tokenizer(PROMPT)["input_ids"], 16, eos_token_id=2)]
    if warning is None:
        assert result.stderr == ""
    else:
        assert result.stderr.startswith("warning: ") and result.stderr.count("\n") == 1
        said(result, *warning.split("; "))


def test_document_records_the_sampling_parameters(run: Run) -> None:
    flags = ["--temperature", 0.7, "--top-k", 30, "--top-p", 0.9, "--min-p", 0.02, "--repetition-penalty", 1.1]
    flags += ["--presence-penalty", 0.3, "--frequency-penalty", 0.2, "--no-repeat-ngram-size", 4]
    flags += ["--bad-words", "dog", "--bad-words", "red ball", "--random-seed", 11]
    assert run(*flags, "--max-output-len", 2, "--json").document["settings"]["sampling"] == {
        "temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1,
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "no_repeat_ngram_size": 4,
        "bad_words": ["dog", "red ball"],
        "random_seed": 11,
        "penalize_prompt": True,
        "logit_bias": [],
        "min_tokens": 0,
        "allowed_token_ids": None,
        "thinking_token_budget": None,
    }  # fmt: skip


def contains(tokens: list[int], word: list[int]) -> bool:
    return any(tokens[i : i + len(word)] == word for i in range(len(tokens) - len(word) + 1))


@DRAFTERS
def test_bad_words_are_hugging_faces(
    run: Run, llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, drafters: Drafters, drafter: str
) -> None:
    """Words of one token and of several, that the free output has."""
    arguments = ["--end-id", 0, "--max-output-len", 40, "--json", *drafters[drafter]]
    (free,) = run(*arguments).document["requests"]
    ids = free["output_ids"]
    words = [tokenizer.decode(ids[i : i + n]) for n in (1, 2) for i in range(len(ids) - 1)]
    words = [word for word in words if word.isascii() and contains(ids, tokenizer(word)["input_ids"])][::5]
    assert {len(tokenizer(word)["input_ids"]) for word in words} == {1, 2}
    (request,) = run(*arguments, *each("--bad-words", words)).document["requests"]
    banned = [tokenizer(text)["input_ids"] for word in words for text in (word, f" {word}")]
    assert request["output_ids"] == hf_greedy(llama, request["prompt_ids"], 40, bad_words_ids=banned)
    assert not any(contains(request["output_ids"], word) for word in banned)


def test_each_prompt_may_have_several_outputs(run: Run) -> None:
    arguments = [*each("--input-text", PROMPTS[:2]), "--temperature", 0.8, "--max-output-len", 8]
    result = run(*arguments, "--num-return-sequences", 3, "--json")
    requests = result.document["requests"]
    assert [request["prompt"] for request in requests] == [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3
    assert [request["return_index"] for request in requests] == [0, 1, 2] * 2
    assert len({tuple(ids) for ids in ids_of(result.document)}) == 6
    assert result.document["total"]["num_requests"] == 6
    assert result.stderr == ""
    first = run(*arguments, "--json").document
    assert ids_of(first) == [requests[0]["output_ids"], requests[3]["output_ids"]]


def test_greedy_outputs_of_one_prompt_are_the_same_and_that_is_said(run: Run, said: Said) -> None:
    result = run("--num-return-sequences", 2, "--max-output-len", 6, "--json")
    first, second = ids_of(result.document)
    assert first == second
    said(result, "`--num-return-sequences 2`")


@pytest.mark.parametrize("drafter", [[], ["--ngram-config", NGRAM]], ids=["none", "n-gram"])
def test_least_tokens_and_allowed_tokens_are_those_of_hugging_face(
    run: Run, llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, drafter: list[object]
) -> None:
    """The id that comes second ends an output, and not before the output is long enough."""
    prompt = tokenizer(PROMPT)["input_ids"]
    end = hf_greedy(llama, prompt, 16)[1]
    found = run("--end-id", end, "--min-tokens", 7, "--max-output-len", 16, "--json", *drafter).document
    assert ids_of(found) == [hf_greedy(llama, prompt, 16, eos_token_id=end, min_new_tokens=7)]
    assert found["settings"]["sampling"]["min_tokens"] == 7
    allowed = sorted({*prompt})
    flags = [*each("--allowed-token-ids", allowed), "--max-output-len", 16, "--json", *drafter]
    found = run(*flags).document
    others = [[token] for token in range(len(tokenizer)) if token not in allowed]
    assert ids_of(found) == [hf_greedy(llama, prompt, 16, bad_words_ids=others)]
    assert found["settings"]["sampling"]["allowed_token_ids"] == allowed
