"""Sampling flags of `run`: each does what Hugging Face's does, and a drafter changes no draw."""

from collections.abc import Callable

from command_line import PROMPTS, Result, each, ids_of

Run = Callable[..., Result]


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
