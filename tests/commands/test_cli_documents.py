"""`--json`: one document on stdout that meets its schema, whose rates follow from its counts."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import NGRAM, NGRAM_RECORD, PROMPT, Specdec, assert_valid, draft_model


def assert_rates_follow_from_counts(record: dict[str, Any], max_draft_len: int) -> None:
    """Vocabulary's formulas, written out again; a rate with nothing to divide by is null."""
    drafted, accepted = record["num_draft_tokens"], record["num_accepted_draft_tokens"]
    spec_steps, histogram = record["num_spec_steps"], record["acceptance_histogram"]
    assert record["draft_acceptance_rate"] == (accepted / drafted if drafted else None)
    assert record["mean_acceptance_length"] == (1 + accepted / spec_steps if spec_steps else None)
    assert record["tokens_per_step"] == pytest.approx(record["num_generated_tokens"] / record["num_steps"])
    assert len(histogram) == max_draft_len + 1
    assert sum(histogram) == spec_steps <= record["num_steps"]
    assert sum(i * steps for i, steps in enumerate(histogram)) == accepted <= drafted
    drafts_per_position = record["num_drafts_per_position"]
    assert len(drafts_per_position) == len(record["acceptance_rate_per_position"]) == max_draft_len
    assert sum(drafts_per_position) == drafted
    for i, rate in enumerate(record["acceptance_rate_per_position"]):
        num_drafts = drafts_per_position[i]
        assert rate == (pytest.approx(sum(histogram[i + 1 :]) / num_drafts) if num_drafts else None)


def assert_total_is_the_sum(total: dict[str, Any], records: list[dict[str, Any]]) -> None:
    assert total["num_requests"] == len(records)
    for key in ("num_generated_tokens", "num_steps", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"):
        assert total[key] == sum(record[key] for record in records), key
    assert total["num_reused_tokens"] == sum(record["num_reused_tokens"] for record in records)
    assert total["acceptance_histogram"] == [
        sum(x) for x in zip(*(r["acceptance_histogram"] for r in records), strict=True)
    ]
    assert total["output_tokens_per_second"] == pytest.approx(total["num_generated_tokens"] / total["wall_s"])
    times = total["draft_time_s"] + total["target_time_s"] + total["host_time_s"]
    assert times == pytest.approx(total["wall_s"])
    assert min(total["draft_time_s"], total["target_time_s"], total["host_time_s"]) >= 0
    for part in ("draft", "draft_model", "target", "host"):
        assert total[f"{part}_time_per_step_s"] == pytest.approx(total[f"{part}_time_s"] / total["num_iterations"])


def test_convert_prints_one_valid_document(specdec: Specdec, llama_dir: Path, tmp_path: Path) -> None:
    result = specdec("convert", "--model-dir", llama_dir, "--output-dir", tmp_path / "ckpt", "--json")
    document = result.document
    assert_valid("convert", document)
    assert result.stderr == ""
    assert document["checkpoint"] == json.loads((tmp_path / "ckpt" / "config.json").read_text())
    assert document["size_bytes"] == sum(file.stat().st_size for file in (tmp_path / "ckpt").iterdir())
    assert document["model_dir"] == str(llama_dir) and document["checkpoint_dir"] == str(tmp_path / "ckpt")


def test_build_prints_one_valid_document(specdec: Specdec, llama_checkpoint_dir: Path, tmp_path: Path) -> None:
    arguments = ["--checkpoint-dir", llama_checkpoint_dir, "--output-dir", tmp_path / "engine"]
    result = specdec("build", *arguments, "--compiler", "none", "--max-input-len", 64, "--max-seq-len", 128, "--json")
    document = result.document
    assert_valid("build", document)
    assert result.stderr == ""
    assert document["engine"] == json.loads((tmp_path / "engine" / "config.json").read_text())
    assert document["size_bytes"] == sum(file.stat().st_size for file in (tmp_path / "engine").iterdir())
    assert sum(document["phase_times_s"].values()) <= document["build_time_s"]


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft model"])
@pytest.mark.parametrize("sampling", [[], ["--temperature", 0.8]], ids=["greedy", "sampling"])
def test_run_prints_one_valid_document(
    specdec: Specdec, llama_engine_dir: Path, draft_engine_dir: Path, drafter: str, sampling: list[object]
) -> None:
    flags = {"none": [], "ngram": ["--ngram-config", NGRAM], "draft model": draft_model(draft_engine_dir)}[drafter]
    arguments = ["--engine-dir", llama_engine_dir, "--input-text", PROMPT, "--input-text", "One day", *flags]
    result = specdec("run", *arguments, *sampling, "--max-output-len", 40, "--json")
    document = result.document
    assert_valid("run", document)
    assert result.stderr == ""
    max_draft_len = 0 if drafter == "none" else 4
    for request in document["requests"]:
        assert request["stats"]["num_generated_tokens"] == len(request["output_ids"])
        assert_rates_follow_from_counts(request["stats"], max_draft_len)
    assert_rates_follow_from_counts(document["total"], max_draft_len)
    assert_total_is_the_sum(document["total"], [request["stats"] for request in document["requests"]])
    assert (document["total"]["num_draft_tokens"] > 0) == (drafter != "none")
    assert document["settings"]["ngram_config"] == (NGRAM_RECORD if drafter == "ngram" else None)
    assert (document["draft_engine"] is not None) == (drafter == "draft model")
    assert (document["speedup"], document["checks"]) == (None, {})
    assert document["engine"]["build_config"]["compiler"] == "aot"


def test_times_of_a_request_are_in_order(specdec: Specdec, llama_engine_dir: Path) -> None:
    arguments = ["--engine-dir", llama_engine_dir, "--input-text", PROMPT, "--json"]
    stats = specdec("run", *arguments, "--max-output-len", 9).document["requests"][0]["stats"]
    assert 0 < stats["ttft_s"] < stats["latency_s"]
    generated = stats["num_generated_tokens"]
    assert stats["tpot_s"] == pytest.approx((stats["latency_s"] - stats["ttft_s"]) / (generated - 1))
    one = specdec("run", *arguments, "--max-output-len", 1).document["requests"][0]["stats"]
    assert one["tpot_s"] is None


@pytest.mark.parametrize(
    ("tests", "systems"),
    [
        (["--test-engine", *draft_model(Path("DRAFT"))], {"engine", "engine_no_drafter"}),
        (["--test-engine", *draft_model(Path("DRAFT")), "--temperature", 0.8], {"engine", "engine_no_drafter"}),
        (["--test-hf"], {"hf"}),
        (["--test-engine", "--test-hf", "--ngram-config", NGRAM], {"engine", "engine_no_drafter", "hf"}),
    ],
)
def test_summarize_prints_one_valid_document(
    specdec: Specdec, llama_engine_dir: Path, draft_engine_dir: Path, llama_dir: Path, articles: Path,
    tests: list[object], systems: set[str],
) -> None:  # fmt: skip
    tests = [draft_engine_dir if argument == Path("DRAFT") else argument for argument in tests]
    result = specdec(
        "summarize", "--engine-dir", llama_engine_dir, "--hf-model-dir", llama_dir, "--dataset", articles, *tests,
        "--output-len", 12, "--max-ite", 2, "--batch-size", 2, "--json",
    )  # fmt: skip
    document = result.document
    assert_valid("summarize", document)
    assert result.stderr == ""
    assert set(document["systems"]) == set(document["rouge"]) == systems
    assert (document["hf"] is None) == ("hf" not in systems)
    assert len(document["requests"]) == document["settings"]["num_samples"] == 4
    max_draft_len = 4 if "engine_no_drafter" in systems else 0
    for name in systems - {"hf"}:
        assert_rates_follow_from_counts(document["systems"][name]["total"], max_draft_len)
    if "engine" not in systems:
        assert document["total"] is None and document["speedup"] is None
        return
    assert_total_is_the_sum(document["total"], [request["stats"] for request in document["requests"]])
    for request in document["requests"]:
        assert request["outputs"]["engine"] == request["output_ids"]
    if "engine_no_drafter" in systems:
        walls = {name: document["systems"][name]["total"]["wall_s"] for name in systems}
        assert document["speedup"] == pytest.approx(walls["engine_no_drafter"] / walls["engine"])
        by_category = document["categories"].values()
        assert sum(record["num_samples"] for record in by_category) == 4
        for key in ("num_generated_tokens", "num_steps", "num_draft_tokens", "num_accepted_draft_tokens"):
            assert sum(record[key] for record in by_category) == document["total"][key]
