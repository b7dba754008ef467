"""Sampling flags of `run`: each does what Hugging Face's does, and a drafter changes no draw."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import NGRAM, PROMPT, PROMPTS, Result, draft_model, each, ids_of, texts_of
from draft_models import MakeDraftEngineDir, with_noise
from sentences import Said
from tiny import eager_logits, hf_greedy, make_model
from transformers import PreTrainedModel, PreTrainedTokenizerFast

Run = Callable[..., Result]
Drafters = dict[str, list[object]]
SAMPLING = [
    ["--temperature", 0.8],
    ["--temperature", 1.3, "--top-k", 20],
    ["--top-p", 0.9],
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


DRAFTERS = pytest.mark.parametrize("drafter", ["none", "n-gram", "draft model", "custom"])


@pytest.mark.parametrize("drafter", ["n-gram", "draft model", "custom"])
@pytest.mark.parametrize("sampling", SAMPLING, ids=lambda flags: " ".join(map(str, flags)))
def test_same_seed_gives_the_same_text_as_without_a_drafter(
    run: Run, drafters: Drafters, drafter: str, sampling: list[object]
) -> None:
    arguments = [*each("--input-text", PROMPTS[:3]), *sampling, "--random-seed", 7, "--max-output-len", 24, "--json"]
    plain = run(*arguments).document
    speculated = run(*arguments, *drafters[drafter]).document
    assert ids_of(speculated) == ids_of(plain)
    assert speculated["total"]["num_draft_tokens"] > 0


def test_seeds_decide_the_text(run: Run) -> None:
    def text(seed: int) -> str:
        return run("--temperature", 0.8, "--random-seed", seed, "--max-output-len", 12, "--quiet").stdout

    assert len({text(seed) for seed in (0, 1, 2, -1)}) == 4
    assert text(1) == text(1)
    assert text(0) == run("--temperature", 0.8, "--max-output-len", 12, "--quiet").stdout


@DRAFTERS
def test_prompt_gives_the_same_text_alone_and_among_others(run: Run, drafters: Drafters, drafter: str) -> None:
    a, b, *others = PROMPTS

    def text_of_a(*prompts: str) -> str:
        arguments = [*each("--input-text", prompts), "--temperature", 0.8, "--max-output-len", 16, "--json"]
        return texts_of(run(*arguments, *drafters[drafter]).document)[prompts.index(a)]

    assert len({text_of_a(a), text_of_a(b, a), text_of_a(*others, b, a)}) == 1


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        ([], None),
        (["--top-k", 1], None),
        (["--temperature", 0], None),
        (["--temperature", 0, "--top-k", 50, "--top-p", 0.9], "`--temperature 0`; `--top-k`"),
        (["--top-k", 1, "--temperature", 0.5], "`--top-k 1`; `--temperature`"),
        (["--top-k", 1, "--top-p", 0.9], "`--top-k 1`; `--temperature`"),
        (["--top-k", 1, "--min-p", 0.1], "`--top-k 1`; `--temperature`"),
    ],
)
def test_top_k_1_and_temperature_0_are_greedy(
    run: Run,
    llama: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    flags: list[object],
    warning: str | None,
    said: Said,
) -> None:
    result = run(*flags, "--random-seed", 3, "--max-output-len", 16, "--json")
    assert ids_of(result.document) == [hf_greedy(llama, tokenizer(PROMPT)["input_ids"], 16, eos_token_id=2)]
    if warning is None:
        assert result.stderr == ""
    else:
        assert result.stderr.startswith("warning: ") and result.stderr.count("\n") == 1
        said(result, *warning.split("; "))


@pytest.mark.parametrize(
    ("flags", "top_k"),
    [(["--temperature", 1.5], 0), (["--top-p", 0.99], 0), (["--min-p", 0.01], 0), (["--top-k", 50], 50)],
)
def test_each_sampling_flag_alone_samples(run: Run, flags: list[object], top_k: int) -> None:
    arguments = ["--max-output-len", 24, "--end-id", 0, "--json"]
    document = run(*arguments, *flags).document
    assert ids_of(document) != ids_of(run(*arguments).document)
    assert document["settings"]["sampling"]["top_k"] == top_k


def test_penalties_may_be_negative(run: Run, llama: PreTrainedModel) -> None:
    document = run("--presence-penalty", -1, "--frequency-penalty", -0.5, "--max-output-len", 8, "--json").document
    sampling = document["settings"]["sampling"]
    assert (sampling["presence_penalty"], sampling["frequency_penalty"]) == (-1, -0.5)


def test_document_records_the_sampling_parameters(run: Run) -> None:
    assert run("--max-output-len", 2, "--json").document["settings"]["sampling"] == {
        "temperature": 1.0,
        "top_k": 1,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "no_repeat_ngram_size": 0,
        "bad_words": [],
        "random_seed": 0,
        "penalize_prompt": True,
        "logit_bias": [],
        "min_tokens": 0,
        "allowed_token_ids": None,
    }
    flags = ["--temperature", 0.7, "--top-k", 30, "--top-p", 0.9, "--min-p", 0.02, "--repetition-penalty", 1.1]
    flags += ["--presence-penalty", 0.3, "--frequency-penalty", 0.2, "--no-repeat-ngram-size", 4]
    flags += ["--bad-words", "dog", "--bad-words", "red ball", "--random-seed", 11]
    assert run(*flags, "--max-output-len", 2, "--json").document["settings"]["sampling"] == {
        "temperature": 0.7,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "no_repeat_ngram_size": 4,
        "bad_words": ["dog", "red ball"],
        "random_seed": 11,
        "penalize_prompt": True,
        "logit_bias": [],
        "min_tokens": 0,
        "allowed_token_ids": None,
    }


def laws_of(model: PreTrainedModel, request: dict[str, Any], temperature: float) -> np.ndarray:
    """(output, vocab) float64: Hugging Face's distribution of every token of the output."""
    tokens, num_prompt = request["prompt_ids"] + request["output_ids"], len(request["prompt_ids"])
    logits = eager_logits(model, tokens)[num_prompt - 1 : -1].double() / temperature
    distribution: np.ndarray = torch.softmax(logits, dim=-1).numpy()
    return distribution


def sample_with(run: Run, model: PreTrainedModel, *flags: object) -> tuple[np.ndarray, np.ndarray]:
    """(n, vocab) distributions at temperature 1.5 of about a hundred tokens drawn with a cut, and their (n,) odds."""
    arguments = ["--temperature", 1.5, "--num-return-sequences", 5, "--max-output-len", 40, "--json", *flags]
    requests = run(*arguments).document["requests"]
    distributions = np.concatenate([laws_of(model, request, 1.5) for request in requests])
    tokens = [token for request in requests for token in request["output_ids"]]
    assert len(tokens) > 60
    return distributions, distributions[np.arange(len(tokens)), tokens]


@DRAFTERS
def test_top_k_leaves_the_k_best(run: Run, llama: PreTrainedModel, drafters: Drafters, drafter: str) -> None:
    distributions, chosen = sample_with(run, llama, "--top-k", 3, *drafters[drafter])
    assert set((distributions > chosen[:, None]).sum(axis=1)) == {0, 1, 2}


@DRAFTERS
def test_top_p_leaves_the_best_of_that_probability(
    run: Run, llama: PreTrainedModel, drafters: Drafters, drafter: str
) -> None:
    """A token is left while those that are better have not reached it."""
    distributions, chosen = sample_with(run, llama, "--top-p", 0.6, *drafters[drafter])
    assert 0.4 < (distributions * (distributions > chosen[:, None])).sum(axis=1).max() < 0.6 + 1e-4


@DRAFTERS
def test_min_p_leaves_a_share_of_the_best(run: Run, llama: PreTrainedModel, drafters: Drafters, drafter: str) -> None:
    distributions, chosen = sample_with(run, llama, "--min-p", 0.3, *drafters[drafter])
    assert 0.3 - 1e-4 < (chosen / distributions.max(axis=1)).min() < 0.5


def test_draws_follow_the_distribution(run: Run, llama: PreTrainedModel) -> None:
    """1,000 first tokens of one prompt, each with random numbers of its own: within 4 standard deviations."""
    arguments = ["--temperature", 1.2, "--num-return-sequences", 1000, "--max-output-len", 1, "--end-id", 0, "--json"]
    requests = run(*arguments).document["requests"]
    counts = np.bincount([request["output_ids"][0] for request in requests], minlength=300)
    (distribution,) = laws_of(llama, requests[0], 1.2)
    likely = distribution > 0.01
    assert likely.sum() > 5
    z = (counts - 1000 * distribution) / np.sqrt(1000 * distribution * (1 - distribution))
    assert np.abs(z[likely]).max() < 4
    assert counts[~likely].sum() == pytest.approx(1000 * distribution[~likely].sum(), abs=4 * np.sqrt(1000) / 2)


def test_draft_model_guesses_the_draw_by_the_same_number(
    run: Run, make_draft_engine_dir: MakeDraftEngineDir, tokenizer: PreTrainedTokenizerFast, llama: PreTrainedModel
) -> None:
    """Two draws from one distribution with numbers of their own would agree as often as its tokens meet themselves."""
    draft_engine_dir = make_draft_engine_dir(with_noise(make_model("llama", vocab_size=len(tokenizer)), 0.001))
    arguments = ["--temperature", 1.0, "--num-return-sequences", 20, "--max-output-len", 40, "--json"]
    document = run(*arguments, *draft_model(draft_engine_dir)).document
    distributions = np.concatenate([laws_of(llama, request, 1.0) for request in document["requests"]])
    assert document["total"]["draft_acceptance_rate"] > 4 * (distributions**2).sum(axis=1).mean()


@pytest.mark.one_in(3)
@DRAFTERS
@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.8},
        {"no_repeat_ngram_size": 1},
        {"no_repeat_ngram_size": 2},
        {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3},
    ],
    ids=str,
)
def test_greedy_penalties_are_hugging_faces(
    run: Run, llama: PreTrainedModel, drafters: Drafters, drafter: str, settings: dict[str, Any]
) -> None:
    flags = [argument for name, value in settings.items() for argument in (f"--{name}", value)]
    arguments = [*each("--input-text", PROMPTS[:2]), "--end-id", 0, "--max-output-len", 30, "--json"]
    document = run(*arguments, *flags, *drafters[drafter]).document
    for request in document["requests"]:
        assert request["output_ids"] == hf_greedy(llama, request["prompt_ids"], 30, **settings)
    assert ids_of(document) != ids_of(run(*arguments).document)


def greedy_with_occurrence_penalty(
    model: PreTrainedModel, prompt: list[int], length: int, presence: float, frequency: float
) -> list[int]:
    """Written out: the prompt counts too, as in TensorRT-LLM."""
    tokens = list(prompt)
    for _ in range(length):
        scores = eager_logits(model, tokens)[-1].numpy().copy()
        for token in set(tokens):
            scores[token] -= presence + frequency * tokens.count(token)
        tokens.append(int(scores.argmax()))
    return tokens[len(prompt) :]


@DRAFTERS
@pytest.mark.parametrize(("presence", "frequency"), [(2.0, 0.0), (0.0, 1.0), (0.5, 0.25)])
def test_occurrence_penalties_are_what_they_are_said_to_be(
    run: Run, llama: PreTrainedModel, drafters: Drafters, drafter: str, presence: float, frequency: float
) -> None:
    flags = ["--presence-penalty", presence, "--frequency-penalty", frequency, *drafters[drafter]]
    (request,) = run(*flags, "--end-id", 0, "--max-output-len", 24, "--json").document["requests"]
    expected = greedy_with_occurrence_penalty(llama, request["prompt_ids"], 24, presence, frequency)
    assert request["output_ids"] == expected


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


@DRAFTERS
def test_no_sample_has_a_bad_word_or_a_repeated_ngram(
    run: Run, tokenizer: PreTrainedTokenizerFast, drafters: Drafters, drafter: str
) -> None:
    flags = ["--temperature", 0.5, "--bad-words", "as", "--bad-words", "dog", "--no-repeat-ngram-size", 2]
    flags += [*drafters[drafter], "--max-output-len", 40, "--end-id", 0, "--json"]
    for request in run(*each("--input-text", PROMPTS[:3]), *flags).document["requests"]:
        for text in ("as", " as", "dog", " dog"):
            assert not contains(request["output_ids"], tokenizer(text)["input_ids"])
        pairs = list(pairwise(request["prompt_ids"] + request["output_ids"]))
        new = pairs[len(request["prompt_ids"]) - 1 :]
        assert len(set(new)) == len(new) and not set(new) & set(pairs[: len(request["prompt_ids"]) - 1])


@DRAFTERS
def test_stop_words_cut_the_same_samples(run: Run, drafters: Drafters, drafter: str) -> None:
    arguments = ["--temperature", 0.8, "--random-seed", 5, "--max-output-len", 30, "--json"]
    (text,) = texts_of(run(*arguments).document)
    word = text[15:18]
    document = run(*arguments, "--stop-words", word, *drafters[drafter]).document
    assert texts_of(document) == [text[: text.index(word)]]
    assert document["requests"][0]["finish_reason"] == "stop"


@DRAFTERS
def test_streamed_samples_are_the_samples(run: Run, drafters: Drafters, drafter: str) -> None:
    arguments = ["--temperature", 0.8, "--max-output-len", 40, "--quiet", *drafters[drafter]]
    assert run(*arguments, "--streaming", "--streaming-interval", 2).stdout == run(*arguments).stdout


@DRAFTERS
def test_each_prompt_may_have_several_outputs(run: Run, drafters: Drafters, drafter: str) -> None:
    arguments = [*each("--input-text", PROMPTS[:2]), "--temperature", 0.8, "--max-output-len", 8, *drafters[drafter]]
    result = run(*arguments, "--num-return-sequences", 3, "--json")
    requests = result.document["requests"]
    assert [request["prompt"] for request in requests] == [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3
    assert [request["return_index"] for request in requests] == [0, 1, 2] * 2
    assert len({tuple(ids) for ids in ids_of(result.document)}) == 6
    assert result.document["total"]["num_requests"] == 6
    assert result.stderr == ""
    first = run(*arguments, "--json").document
    assert ids_of(first) == [requests[0]["output_ids"], requests[3]["output_ids"]]


def test_outputs_of_one_prompt_are_labelled(run: Run) -> None:
    arguments = [*each("--input-text", PROMPTS[:2]), "--temperature", 0.8, "--max-output-len", 4]
    arguments += ["--num-return-sequences", 2]
    shown = run(*arguments)
    texts = texts_of(run(*arguments, "--json").document)
    lines = [
        f'{kind}: "{text}"'
        for kind, text in (
            ("Input [Text 0]", PROMPTS[0]),
            ("Output [Text 0 Seq 0]", texts[0]),
            ("Output [Text 0 Seq 1]", texts[1]),
            ("Input [Text 1]", PROMPTS[1]),
            ("Output [Text 1 Seq 0]", texts[2]),
            ("Output [Text 1 Seq 1]", texts[3]),
        )
    ]
    assert shown.stdout.startswith("\n".join(lines) + "\n")
    for label in ("Text 0 Seq 0", "Text 0 Seq 1", "Text 1 Seq 0", "Text 1 Seq 1"):
        assert f"│ {label} │" in shown.stdout
    assert run(*arguments, "--quiet").stdout == "".join(f"{text}\n" for text in texts)
    streamed = run(*arguments, "--streaming", "--streaming-interval", 100, "--quiet").stdout
    assert all(f"[Text {i // 2} Seq {i % 2}] {text}\n" in streamed for i, text in enumerate(texts) if text)


def test_greedy_outputs_of_one_prompt_are_the_same_and_that_is_said(run: Run, said: Said) -> None:
    result = run("--num-return-sequences", 2, "--max-output-len", 6, "--json")
    first, second = ids_of(result.document)
    assert first == second
    said(result, "`--num-return-sequences 2`")


def test_prompts_cut_are_counted_once_however_many_outputs_they_have(run: Run, said: Said) -> None:
    arguments = ["--max-input-length", 2, "--top-k", 9, "--num-return-sequences", 3, "--max-output-len", 2]
    said(run(*arguments), 2, 1)


def test_files_have_a_row_for_every_output(run: Run, tmp_path: Path) -> None:
    arguments = ["--temperature", 0.8, "--num-return-sequences", 3, "--max-output-len", 5, "--end-id", 0]
    arguments += ["--output-npy", tmp_path / "ids.npy", "--output-logits-npy", tmp_path / "l.npy", "--json"]
    document = run(*arguments).document
    rows = [request["prompt_ids"] + request["output_ids"] for request in document["requests"]]
    assert np.load(tmp_path / "ids.npy").tolist() == rows
    assert np.load(tmp_path / "l_generation.npy").shape == (3, 5, 300)


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


def test_prompts_are_cut_by_vllms_name_too(run: Run) -> None:
    flags = ["--max-output-len", 4, "--json"]
    cut = run("--truncate-prompt-tokens", 4, *flags).document
    assert ids_of(cut) == ids_of(run("--max-input-length", 4, *flags).document)
    assert len(cut["requests"][0]["prompt_ids"]) == 4
