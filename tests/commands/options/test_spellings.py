"""One spelling for every flag, and flags that mean nothing here."""

import pytest

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
