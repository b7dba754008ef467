"""What the command line's own parts make of names and configuration strings."""

from pathlib import Path

import pytest

from commands.options import (
    NgramSettings,
    check_orchestrator_flags,
    normalize_name,
    parse_drafter,
    parse_ngram_config,
    split_flags_without_effect,
)
from runtime.errors import SpecDecError, UsageError


@pytest.mark.parametrize("text", ["[10,2,[0]]", " [ 10 , 2 , [ 0 ] ] ", "(10, 2, (0,))"])
def test_ngram_config_is_draft_length_pattern_length_and_device(text: str) -> None:
    assert parse_ngram_config(text) == NgramSettings(max_draft_len=10, max_matching_ngram_size=2, device_id=0)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("abc", "not a list: abc"),
        ("", "not a list: "),
        ("[10,2,[0]", "not a list: [10,2,[0]"),
        ("__import__('os').getcwd()", "not a list"),
        ("[" * 10_000, "not a list"),
        ("10", "3 entries: 10"),
        ("{1: 2}", "3 entries"),
        ("[10,2]", "3 entries: [10,2]"),
        ("[10,2,[0],1]", "3 entries"),
        ("[0,2,[0]]", "max_draft_len in `--ngram-config` must be a whole number of at least 1: 0"),
        ("[-1,2,[0]]", "max_draft_len"),
        ("[1.5,2,[0]]", "max_draft_len in `--ngram-config` must be a whole number of at least 1: 1.5"),
        ("[True,2,[0]]", "max_draft_len"),
        ("['4',2,[0]]", "max_draft_len in `--ngram-config` must be a whole number of at least 1: '4'"),
        ("[10,0,[0]]", "max_matching_ngram_size in `--ngram-config` must be a whole number of at least 1: 0"),
        ("[10,2,[]]", "must name a device: []"),
        ("[10,2,0]", "must name a device: 0"),
        ("[10,2,[-1]]", "must hold device numbers: [-1]"),
        ("[10,2,['0']]", "must hold device numbers: ['0']"),
        ("[10,2,[0,1]]", "more than one device"),
    ],
)
def test_malformed_ngram_config_names_the_part_that_is_wrong(text: str, wrong: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_ngram_config(text)
    assert wrong in raised.value.message
    assert raised.value.hint


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


@pytest.mark.parametrize(
    ("flags", "wrong"),
    [
        (("[10,2,[0]]", "[4,[0],[0],False]", None), "cannot be given together"),
        ((None, "[4,[0],[0],False]", None), "not in this version: --draft-target-model-config [4,[0],[0],False]"),
        ((None, None, Path("draft")), "not in this version: --draft-engine-dir draft"),
    ],
)
def test_two_drafters_or_a_draft_model_are_wrong_usage(
    flags: tuple[str | None, str | None, Path | None], wrong: str
) -> None:
    assert parse_drafter("[10,2,[0]]", None, None) == NgramSettings(10, 2, 0)
    assert parse_drafter(None, None, None) is None
    with pytest.raises(UsageError) as raised:
        parse_drafter(*flags)
    assert wrong in raised.value.message
    assert raised.value.hint


@pytest.mark.parametrize(
    ("block_reuse", "num_beams", "py_session", "wrong"),
    [
        (False, 1, False, "orchestrator mode needs block reuse"),
        (True, 2, False, "beam search is not supported: `--num-beams 2`"),
        (True, 1, True, "`--use-py-session`"),
    ],
)
def test_what_orchestrator_mode_cannot_do_is_wrong_usage(
    block_reuse: bool, num_beams: int, py_session: bool, wrong: str
) -> None:
    check_orchestrator_flags(block_reuse=True, num_beams=1, py_session=False)
    with pytest.raises(UsageError) as raised:
        check_orchestrator_flags(block_reuse=block_reuse, num_beams=num_beams, py_session=py_session)
    assert wrong in raised.value.message
    assert raised.value.hint


def test_wrong_usage_is_a_specdec_error() -> None:
    assert issubclass(UsageError, SpecDecError)
