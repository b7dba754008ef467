"""One spelling for every flag, and flags that mean nothing here."""

import pytest
from command_line import Specdec

from commands.options.spellings import normalize_name


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("max_draft_len", "max-draft-len"),
        ("max-draft_len", "max-draft-len"),
        ("test_trt_llm", "test-engine"),
        ("test-trt-llm", "test-engine"),
        ("prompt_lookup_config", "ngram-config"),
        ("tensorrt_llm_rouge1_threshold", "rouge1-threshold"),
        ("spec_decode_nextn", "spec-decode-max-draft-len"),
        ("draft_len", "draft-len-mode"),
        ("max-model-len", "max-seq-len"),
        ("ctx-size", "max-seq-len"),
        ("n-predict", "max-output-len"),
        ("enable-prefix-caching", "kv-cache-enable-block-reuse"),
    ],
)
def test_names_have_one_spelling(given: str, ours: str) -> None:
    assert normalize_name(given) == ours


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("run demo a --max-seq-len 100 --max-model-len 200", ("--max-seq-len", "--max-model-len", "100", "200")),
        ("run demo a --max-seq-len 100 -c 200", ("--max-seq-len", "100", "200")),
        ("serve demo --api-key a --api-key b", ("--api-key",)),
        ("serve demo --port 1 --port=2", ("--port", "1", "2")),
        ("run demo a --draft_len_mode auto --draft-len-mode fixed", ("--draft_len_mode", "auto", "fixed")),
        ("batch demo -i a.jsonl -i b.jsonl -o c", ("-i", "a.jsonl", "b.jsonl")),
        ("batch demo -i a.jsonl --input-file b.jsonl", ("-i", "--input-file", "a.jsonl", "b.jsonl")),
        ("run demo a --streaming --no-streaming", ("--streaming", "--no-streaming")),
        ("launch claude demo --port 1 --port 2 --unknown a --unknown b", ("--port", "1", "2")),
        ("cache prune --max-size 1G --max-size 2G", ("--max-size", "1G", "2G")),
    ],
)
def test_the_last_of_two_values_holds_with_a_warning(line: str, values: tuple[str, ...], specdec: Specdec) -> None:
    """Scripts append to a command line. The lines end in an error that comes later."""
    result = specdec(*line.split(), "--no-such-flag")
    told = next(
        text for text in result.stderr.splitlines() if text.startswith("warning: ") and "is overruled by" in text
    )
    assert result.exit_code != 0 and all(value in told for value in values)
    assert "--api-key a" not in told


@pytest.mark.parametrize(
    "line",
    [
        "run demo --input-text a --input-text b --stop-words c --stop-words d --max-output-len x",
        "run demo a --max-seq-len 100 --max-model-len 100 --streaming --streaming --max-output-len x",
        "run demo a --max-output-len x -- --max-output-len 3",
    ],
)
def test_what_is_repeatable_or_says_the_same_twice_is_no_fault(line: str, specdec: Specdec) -> None:
    result = specdec(*line.split())
    assert "--max-output-len` must be a whole number" in result.stderr
