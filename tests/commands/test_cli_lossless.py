"""`--check-lossless`: passes for what is exact, catches what is not, and says where, in `run` and in `summarize`."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import (
    PROMPTS,
    Result,
    Specdec,
    assert_valid,
    draft_model,
    each,
    ids_of,
    line_of,
    with_last_values,
)
from draft_models import WITH_DRAFTS, MakeDraftEngineDir, with_noise
from sentences import Said
from tiny import eager_logits, make_model
from transformers import PreTrainedModel, PreTrainedTokenizerFast

Run = Callable[..., Result]
LOGITS = "[4,[0],[0],True]"
SAMPLING = ["--temperature", 0.9]


@pytest.fixture(scope="session")
def wide_engine_dir(make_draft_engine_dir: MakeDraftEngineDir, tokenizer: PreTrainedTokenizerFast) -> Path:
    """The target with room for many sequences at once: thousands of draws take a second."""
    return make_draft_engine_dir(
        make_model("llama", vocab_size=len(tokenizer)), **WITH_DRAFTS, max_batch_size=50, compiler="aot"
    )


@pytest.fixture(scope="session")
def wide_draft_engine_dir(make_draft_engine_dir: MakeDraftEngineDir, tokenizer: PreTrainedTokenizerFast) -> Path:
    return make_draft_engine_dir(
        with_noise(make_model("llama", vocab_size=len(tokenizer)), 0.01), max_batch_size=50, compiler="aot"
    )


@pytest.fixture
def run_wide(specdec: Specdec, wide_engine_dir: Path) -> Run:
    """`run` with three prompts, 12 tokens each."""
    arguments = ["run", "--engine-dir", wide_engine_dir, *each("--input-text", PROMPTS[:3]), "--max-output-len", 12]
    return lambda *more: specdec(*with_last_values([*arguments, *more]))


@pytest.fixture
def summarize(specdec: Specdec, wide_engine_dir: Path, articles: Path) -> Run:
    """`summarize` of five articles, 12 tokens each, with the engine."""
    arguments = ["summarize", "--engine-dir", wide_engine_dir, "--dataset", articles, "--test-engine"]
    return lambda *more: specdec(*with_last_values([*arguments, "--max-output-len", 12, *more]))


def lossless_of(document: dict[str, Any]) -> dict[str, Any]:
    check: dict[str, Any] = document["checks"]["lossless"]
    return check


@pytest.fixture(scope="session")
def drafters(wide_draft_engine_dir: Path) -> dict[str, list[object]]:
    return {
        "tokens": draft_model(wide_draft_engine_dir),
        "logits": draft_model(wide_draft_engine_dir, LOGITS),
        "custom": ["--drafter", "custom_drafters:LastOccurrence"],
        "custom that draws": ["--drafter", "custom_drafters:Draws"],
    }


@pytest.mark.parametrize(
    ("drafter", "sampling"),
    [
        ("tokens", [*SAMPLING, "--top-p", 0.9, "--repetition-penalty", 1.2]),
        ("custom", []),
    ],
)
def test_run_compares_tokens_where_they_must_be_equal(
    run_wide: Run, drafters: dict[str, list[object]], drafter: str, sampling: list[object]
) -> None:
    arguments = [*drafters[drafter], *sampling]
    result = run_wide(*arguments, "--check-lossless", "--json")
    assert_valid("run", result.document)
    assert lossless_of(result.document) == {
        "rule": "tokens", "num_samples": 3, "num_identical": 3, "num_near_ties": 0, "num_different": 0,
        "dtype": "float32",
        "differences": [],
        "passed": True,
        "batch_invariant": True,
    }  # fmt: skip
    assert result.document["speedup"] > 0
    assert result.document["total"]["num_draft_tokens"] > 0
    assert result.stderr == ""
    assert ids_of(result.document) == ids_of(run_wide(*arguments, "--json").document)


@pytest.mark.slow  # the walk of the documentation has such a check too
def test_rejection_sampling_is_compared_by_distribution(run_wide: Run, drafters: dict[str, list[object]]) -> None:
    document = run_wide(*drafters["logits"], *SAMPLING, "--top-k", 3, "--check-lossless", "--json").document
    assert_valid("run", document)
    check = lossless_of(document)
    assert check["rule"] == "distribution"
    assert check["passed"] and 1e-4 <= check["p_value"] < 1
    assert check["threshold"] == 1e-4
    assert check["num_draws"] == 250 * check["num_prefixes"] == 2000
    # Positions after a draft token count, not the first of a step only.
    assert check["num_tokens"] > 2500 and check["num_distributions"] > check["num_prefixes"]
    assert 0 < check["detectable_total_variation"] <= check["required_total_variation"] == 0.15
    assert check["power"] == 0.99
    assert check["chi_squared"] > 0 and check["degrees_of_freedom"] > 20
    assert "identical_to_no_drafter" not in document["checks"]


def test_least_tokens_of_an_output_are_no_fault(
    run_wide: Run, drafters: dict[str, list[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end id cannot be the first token after a text, and can be the second, where it has a probability."""
    monkeypatch.setattr("runtime.loop.lossless.check.NUM_DRAWS_PER_PREFIX", (150,))
    arguments = [*drafters["logits"], *SAMPLING, "--top-k", 3, "--min-tokens", 1, "--json"]
    counts = Counter(itertools.chain(*ids_of(run_wide(*arguments).document)))
    ((end_id, _),) = counts.most_common(1)
    check = lossless_of(json.loads(run_wide(*arguments, "--end-id", end_id, "--check-lossless").stdout))
    assert check["chi_squared"] is not None and check["p_value"] >= 1e-4
    assert check["num_tokens"] > check["num_draws"]


def test_drafter_that_is_wrong_about_its_distribution_is_caught(
    run_wide: Run, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.loop.lossless.check.NUM_DRAWS_PER_PREFIX", (60,))  # enough for one so wrong
    arguments = ["--drafter", "custom_drafters:DrawsFromAnotherDistribution", "--temperature", 1.2, "--check-lossless"]
    result = run_wide(*arguments, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert_valid("run", document)
    check = lossless_of(document)
    assert not check["passed"] and check["p_value"] < 1e-4
    said(result)
    assert "hint: " in result.stderr and "`Draft.probs`" in result.stderr


@pytest.mark.parametrize("sampling", [[], SAMPLING], ids=["greedy", "sampling"])
def test_changed_output_is_caught_and_located(
    run_wide: Run, llama: PreTrainedModel, sampling: list[object], said: Said
) -> None:
    """The drafter breaks the K/V cache before the 5th token: `position` counts from 0."""
    plain = run_wide(*sampling, "--end-id", 0, "--json").document["requests"]
    arguments = [*sampling, "--end-id", 0, "--drafter", "custom_drafters:MixesUpBlocks", "--check-lossless"]
    result = run_wide(*arguments, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert_valid("run", document)
    check = lossless_of(document)
    assert (check["num_identical"], check["num_different"], check["num_near_ties"]) == (0, 3, 0)
    assert not check["passed"]
    for i, difference in enumerate(check["differences"]):
        position = difference["position"]
        token, right = (request["output_ids"][position] for request in (document["requests"][i], plain[i]))
        assert difference["request"] == i and position >= 4  # where the sampled token may still be the same
        assert (difference["token"], difference["token_without_drafter"]) == (token, right)
        assert not difference["is_near_tie"]
        logits = eager_logits(llama, plain[i]["prompt_ids"] + plain[i]["output_ids"][:position])[-1]
        if sampling:  # the noise belongs to the margin
            assert difference["logit_margin"] > difference["rounding"]
        else:
            margin = abs(float(logits[token] - logits[right]))
            assert difference["logit_margin"] == pytest.approx(margin, rel=1e-3, abs=1e-4)
    said(result, "3", "0", "4")
    shown = run_wide(*arguments).stdout
    said(line_of(shown, "lossless check"), "FAILED", "0", "3")
    for difference in check["differences"]:
        assert str(difference["token_without_drafter"]) in line_of(shown, f"request {difference['request']} ")


def test_check_of_nothing_that_was_drafted_says_so(
    run_wide: Run, drafters: dict[str, list[object]], said: Said
) -> None:
    """One token of output leaves no room for a draft."""
    result = run_wide(*drafters["logits"], "--max-output-len", 1, "--check-lossless")
    assert result.exit_code == 0
    assert "passed" in line_of(result.stdout, "lossless check")
    said(result.stderr, "no drafts were verified", 3)
    drafted = run_wide(*drafters["logits"], "--check-lossless")
    assert drafted.exit_code == 0 and "no drafts were verified" not in drafted.stderr


NOTHING, ONE_TOKEN = ["--temperature", 0.9, "--max-output-len", 1], ["--temperature", 1e-4]


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        pytest.param("run", ONE_TOKEN, id="run-one token to choose"),
        pytest.param("summarize", NOTHING, id="summarize-nothing drafted"),
    ],
)
def test_too_little_to_tell_is_neither_passed_nor_failed(
    run_wide: Run, summarize: Run, drafters: dict[str, list[object]], command: str, flags: list[object],
    monkeypatch: pytest.MonkeyPatch, said: Said,
) -> None:  # fmt: skip
    monkeypatch.setattr("runtime.loop.lossless.check.NUM_DRAWS_PER_PREFIX", (50,))  # no number would do
    call = {"run": run_wide, "summarize": summarize}[command]
    arguments = [*drafters["custom that draws"], *flags, "--check-lossless"]
    result = call(*arguments, "--json")
    assert result.exit_code == 3
    said(result)
    document = json.loads(result.stdout)
    assert_valid(command, document)
    check = lossless_of(document)
    assert (check["passed"], check["detectable_total_variation"], check["degrees_of_freedom"]) == (None, None, 0)
    shown = call(*arguments)
    assert shown.exit_code == 3
    said(line_of(shown.stdout, "lossless check"), "0.0", "0")
    said(line_of(shown.stdout, "it would have found"), "99%", "0.15")


def test_small_kv_cache_is_enough_for_the_check(
    run: Run, draft_engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just what the longest request needs: one sequence at a time. So few draws tell too little, which is said by 3."""
    monkeypatch.setattr("runtime.loop.lossless.check.NUM_DRAWS_PER_PREFIX", (20,))
    size = ["--max-tokens-in-paged-kv-cache", 32]
    for sampling, exit_code in (([], 0), (SAMPLING, 3)):
        flags = [*draft_model(draft_engine_dir, LOGITS), *sampling, *size, "--max-output-len", 12]
        assert run(*each("--input-text", PROMPTS[:2]), *flags, "--check-lossless").exit_code == exit_code


@pytest.mark.usefixtures("work_clock")
def test_speculation_that_loses_is_called_slower(
    run: Run, make_draft_engine_dir: MakeDraftEngineDir, tokenizer: PreTrainedTokenizerFast
) -> None:
    """A draft model as large as the target, with which it never agrees, in drafts of ten."""
    stranger = make_draft_engine_dir(make_model("qwen3", vocab_size=len(tokenizer)))
    arguments = [*draft_model(stranger, "[10,[0],[0],False]"), "--end-id", 0, "--max-output-len", 12]
    shown = run(*arguments, "--check-lossless").stdout
    speedup = re.search(r"speedup over no drafter: (0\.\d\d)x — slower than no drafter", shown)
    assert speedup, shown
    assert 0 < float(speedup[1]) < 0.8
