"""The words that a mistyped word may mean."""

import pytest

from runtime.util.words import meant, nearest

FORMATS = ("int8", "int4", "fp8", "none")
DTYPES = ("auto", "float32", "float16", "bfloat16")


@pytest.mark.parametrize(
    ("text", "words", "found"),
    [
        ("INT4_AWQ", FORMATS, ["int4"]),
        ("int4_wo", FORMATS, ["int4"]),
        ("int8_sq", FORMATS, ["int8"]),
        ("w4a8_awq", FORMATS, ["int4"]),
        ("Q4_K_M", FORMATS, ["int4"]),
        ("q8_0", FORMATS, ["int8"]),
        ("fp8_e5m2", FORMATS, ["fp8"]),
        ("4-bit", FORMATS, ["int4"]),
        ("half", DTYPES, ["float16", "bfloat16"]),
        ("bf16", DTYPES, ["bfloat16"]),
        ("torch.float16", DTYPES, ["float16"]),
        ("fp32", DTYPES, ["float32"]),
        ("bfloat", DTYPES, ["bfloat16"]),
        ("gpu", ("auto", "cpu", "cuda"), ["cuda"]),
        ("leadr", ("orchestrator", "leader"), ["leader"]),
        ("warm", FORMATS + DTYPES, []),
    ],
)
def test_other_programs_words_mean_ours(text: str, words: tuple[str, ...], found: list[str]) -> None:
    assert meant(text, words) == found


def test_only_a_slip_or_a_part_of_a_name_is_near() -> None:
    names = (
        "run",
        "max-batch-size",
        "batch-size",
        "ngram-pool",
        "ngram-config",
        "ngram-corpus",
        "continue-final-message",
    )
    slips = {"rnu": "run", "batch": "batch-size", "ngram-pol": "ngram-pool", "ngram-konfig": "ngram-config"}
    assert {slip: nearest(slip, names) for slip in slips} == slips
    assert [nearest(name, names) for name in ("system-message", "foo", "ngram-depth", "verbose")] == [None] * 4
