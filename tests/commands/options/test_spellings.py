"""One spelling for every flag, and flags that mean nothing here."""

import pytest

from commands.options.spellings import normalize_name, one_value_each, split_flags_without_effect


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
    ],
)
def test_names_have_one_spelling(given: str, ours: str) -> None:
    assert normalize_name(given) == ours


@pytest.mark.parametrize(
    ("arguments", "kept", "dropped"),
    [
        (["--gemm_plugin", "float16", "--x"], ["--x"], ["--gemm_plugin"]),
        (["--gemm-plugin=float16", "--x"], ["--x"], ["--gemm-plugin"]),
        (["--cuda_graph_mode", "--x"], ["--x"], ["--cuda_graph_mode"]),
        (["--log_level", "verbose", "--workers=2"], [], ["--log_level", "--workers"]),
        (["--gemm_plugin"], [], ["--gemm_plugin"]),
        (["--", "--gemm_plugin", "a"], ["--", "--gemm_plugin", "a"], []),
        (["--text", "--gemm_plugin", "--gemm_plugin", "a"], ["--text", "--gemm_plugin"], ["--gemm_plugin"]),
        (["--text=x", "--gemm_plugin", "a"], ["--text=x"], ["--gemm_plugin"]),
        (["--text"], ["--text"], []),
        (["gemm_plugin", "-gemm_plugin"], ["gemm_plugin", "-gemm_plugin"], []),
    ],
)
def test_flags_without_effect_are_taken_out_with_their_values(
    arguments: list[str], kept: list[str], dropped: list[str]
) -> None:
    assert split_flags_without_effect(arguments, frozenset({"text"})) == (kept, dropped)


def test_several_values_of_one_flag_are_the_flag_several_times() -> None:
    given = ["--goodput", "ttft:200", "tpot:50", "--json", "--dataset", "demo", "--goodput", "e2el:9"]
    each = ["--goodput", "ttft:200", "--goodput", "tpot:50", "--json", "--dataset", "demo", "--goodput", "e2el:9"]
    assert one_value_each(given, "bench") == each
    assert one_value_each(["one", "two"], "run") == ["one", "two"]
