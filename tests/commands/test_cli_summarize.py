"""`summarize`: each option changes what is measured, and the engine's answers are Hugging Face's."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import NGRAM, Result, Specdec, edit_json
from tiny import hf_greedy
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from commands.dataset import Sample, summarization_prompt
from commands.rouge import rouge_scores
from commands.summarize import _batches, _by_category

Summarize = Callable[..., Result]


@pytest.fixture
def summarize(specdec: Specdec, llama_uncompiled_dir: Path, llama_dir: Path, articles: Path) -> Summarize:
    """`summarize(…)`: `specdec summarize` of the articles, 8 tokens each, with the uncompiled engine."""

    def call(*arguments: object) -> Result:
        where = ["--engine-dir", llama_uncompiled_dir, "--hf-model-dir", llama_dir]
        dataset = [] if "--dataset" in arguments else ["--dataset", articles]
        return specdec("summarize", *where, *dataset, "--output-len", 8, *arguments)

    return call


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}


@pytest.mark.parametrize("ngram", [[], ["--ngram-config", NGRAM]])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_answers_are_hfs(
    summarize: Summarize, llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, articles: Path,
    ngram: list[str], batch_size: int,
) -> None:  # fmt: skip
    arguments = ["--test-engine", "--test-hf", *ngram, "--batch-size", batch_size, "--output-len", 20]
    document = summarize(*arguments, "--json").document
    rows = rows_of(articles)
    assert {request["id"] for request in document["requests"]} == rows.keys()
    for request in document["requests"]:
        row = rows[request["id"]]
        prompt_ids = tokenizer(summarization_prompt(row["article"]))["input_ids"]
        expected = hf_greedy(llama, prompt_ids, 20, eos_token_id=2)
        assert request["prompt"] == row["article"] and request["reference"] == row["highlights"]
        assert request["prompt_ids"] == prompt_ids
        assert list(request["outputs"].values()) == [expected] * len(document["systems"])
        assert request["output_text"] == tokenizer.decode(expected, skip_special_tokens=True)
    same = {"num_identical": 5, "num_samples": 5}
    assert document["checks"]["identical_to_hf"] == same
    assert ("identical_to_no_drafter" in document["checks"]) == bool(ngram)


def test_rouge_is_that_of_the_texts_and_references(summarize: Summarize) -> None:
    document = summarize("--test-engine", "--test-hf", "--json").document
    texts = [request["output_text"] for request in document["requests"]]
    references = [request["reference"] for request in document["requests"]]
    assert document["rouge"]["engine"] == document["rouge"]["hf"] == rouge_scores(texts, references)
    assert document["systems"]["engine"]["rouge"] == document["rouge"]["engine"]


def test_hf_answers_greedily_whatever_its_generation_config_says(
    summarize: Summarize, llama_dir: Path, tmp_path: Path
) -> None:
    """The engine is greedy without penalties, so what is beside it must be too."""
    model_dir = tmp_path / "model"
    shutil.copytree(llama_dir, model_dir)
    edit_json(model_dir / "generation_config.json", repetition_penalty=5.0, no_repeat_ngram_size=1, min_new_tokens=6)
    arguments = ["--test-engine", "--test-hf", "--hf-model-dir", model_dir, "--output-len", 30]
    document = summarize(*arguments, "--json").document
    assert document["checks"]["identical_to_hf"] == {"num_identical": 5, "num_samples": 5}


def test_max_ite_and_batch_size_say_how_many_samples_are_run(summarize: Summarize) -> None:
    for batch_size, max_ite, num_samples in ((1, 2, 2), (2, 2, 4), (2, 20, 5), (4, 1, 4)):
        arguments = ["--test-engine", "--batch-size", batch_size, "--max-ite", max_ite, "--json"]
        document = summarize(*arguments).document
        assert document["settings"]["num_samples"] == len(document["requests"]) == num_samples


def test_output_len_and_max_input_length_bound_the_samples(summarize: Summarize) -> None:
    arguments = ["--test-engine", "--output-len", 3, "--max-input-length", 6, "--end-id", 0]
    result = summarize(*arguments, "--json")
    for request in result.document["requests"]:
        assert (len(request["prompt_ids"]), len(request["output_ids"])) == (6, 3)
    assert result.stderr == "warning: prompts cut to their last 6 tokens: 5 of 5\n"


def test_random_seed_orders_the_samples(summarize: Summarize) -> None:
    def order(seed: int) -> list[str]:
        arguments = ["--test-engine", "--output-len", 1, "--random-seed", seed, "--json"]
        return [request["id"] for request in summarize(*arguments).document["requests"]]

    orders = {tuple(order(seed)) for seed in range(4)}
    assert len(orders) > 1
    assert order(1) == order(1)


def test_categories_have_rows_of_their_own(summarize: Summarize) -> None:
    arguments = ["--test-engine", "--ngram-config", NGRAM, "--output-len", 16]
    document = summarize(*arguments, "--json").document
    assert {name: record["num_samples"] for name, record in document["categories"].items()} == {"dogs": 3, "girls": 2}
    for name, record in document["categories"].items():
        requests = [request for request in document["requests"] if request["category"] == name]
        assert record["rouge"]["engine"] == rouge_scores(
            [request["output_text"] for request in requests], [request["reference"] for request in requests]
        )
        drafted, accepted = (
            sum(request["stats"][key] for request in requests)
            for key in ("num_draft_tokens", "num_accepted_draft_tokens")
        )
        assert record["draft_acceptance_rate"] == (accepted / drafted if drafted else None)
        assert record["speedup"] == pytest.approx(record["wall_s"]["engine_no_drafter"] / record["wall_s"]["engine"])
    shown = summarize(*arguments).stdout
    rows = [line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│")]
    assert "By category" in shown
    assert {"dogs", "girls"} <= set(rows)


def test_no_batch_mixes_categories() -> None:
    samples = [Sample(str(i), category, "text", "reference") for i, category in enumerate("ababaab")]
    ordered = _by_category(samples)
    assert [sample.id for sample in ordered] == ["0", "2", "4", "5", "1", "3", "6"]
    prompts = [[int(sample.id)] for sample in ordered]
    assert _batches(ordered, prompts, 3) == [[[0], [2], [4]], [[5]], [[1], [3], [6]]]
    assert _batches(samples, [[i] for i in range(7)], 1) == [[[i]] for i in range(7)]


def test_datasets_without_categories_have_no_rows(summarize: Summarize, tmp_path: Path) -> None:
    path = tmp_path / "plain.csv"
    path.write_text("text,summary\nThe dog ran.,A dog\nA ball.,A red ball\n")
    result = summarize("--test-engine", "--dataset", path)
    assert "By category" not in result.stdout
    assert summarize("--test-engine", "--dataset", path, "--json").document["categories"] == {}


def test_brackets_of_a_dataset_are_printed_as_they_are(summarize: Summarize, tmp_path: Path) -> None:
    path = tmp_path / "[d].jsonl"
    row = {"id": "[/a]", "category": "[bold]c[/bold]", "article": "[red]x", "highlights": "[/] y"}
    path.write_text(json.dumps(row) + "\n")
    shown = summarize("--test-engine", "--dataset", path).stdout
    assert "Sample [/a]" in shown
    assert "[bold]c[/bold]" in shown
    assert "[d].jsonl" in shown.replace("\n", "")
    assert 'Input: "[red]x"' in shown and 'Reference: "[/] y"' in shown


def test_code_completion_prompts_are_the_rows_own(
    summarize: Summarize, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = tmp_path / "code.jsonl"
    row = {"task_id": "T/0", "prompt": "def f():\n", "canonical_solution": "    return 1\n"}
    path.write_text(json.dumps(row) + "\n")
    arguments = ["--test-engine", "--dataset", path, "--eval-task", "code_completion", "--json"]
    document = summarize(*arguments).document
    (request,) = document["requests"]
    assert request["prompt_ids"] == tokenizer("def f():\n")["input_ids"]
    assert (request["id"], request["reference"]) == ("T/0", "    return 1\n")
    assert document["settings"]["eval_task"] == "code_completion"


def test_dataset_dir_holds_a_hub_dataset(summarize: Summarize, tmp_path: Path) -> None:
    directory = tmp_path / "data" / "ccdv" / "cnn_dailymail"
    directory.mkdir(parents=True)
    (directory / "test.csv").write_text("id,article,highlights\n7,The dog ran.,A dog ran\n")
    arguments = ["--test-engine", "--dataset", "ccdv/cnn_dailymail", "--dataset-dir", tmp_path / "data", "--json"]
    (request,) = summarize(*arguments).document["requests"]
    assert (request["id"], request["reference"]) == ("7", "A dog ran")


def test_stop_words_and_end_id_end_every_systems_answers(summarize: Summarize) -> None:
    arguments = ["--test-engine", "--test-hf", "--ngram-config", NGRAM, "--max-ite", 1, "--output-len", 20, "--json"]
    (request,) = summarize(*arguments).document["requests"]
    ids, text = request["output_ids"], request["output_text"]
    (ended,) = summarize(*arguments, "--end-id", ids[5]).document["requests"]
    assert set(map(tuple, ended["outputs"].values())) == {tuple(ids[: ids.index(ids[5]) + 1])}
    word = text[4:6]
    (stopped,) = summarize(*arguments, "--stop-words", word).document["requests"]
    assert stopped["output_text"] == text[: text.index(word)]
    assert len(set(map(tuple, stopped["outputs"].values()))) == 1


def test_table_has_a_column_for_each_system(summarize: Summarize) -> None:
    shown = summarize("--test-engine", "--test-hf", "--ngram-config", NGRAM).stdout
    header = next(line for line in shown.splitlines() if "Hugging Face" in line)
    titles = [cell.strip() for cell in header.split("┃")[2:-1]]
    assert titles == ["engine", "engine, no drafter", "Hugging Face"]
    labels = {line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│")}
    assert labels >= {
        "ROUGE-1", "ROUGE-2", "ROUGE-L", "ROUGE-Lsum", "latency, mean", "tokens", "tokens/s", "TTFT, median",
        "TPOT, median", "steps", "tokens per step", "acceptance rate", "accepted / drafted",
    }  # fmt: skip
    assert "speedup over no drafter: " in shown
    assert "token for token the same as Hugging Face: 5 of 5" in shown
    only_hf = summarize("--test-hf").stdout
    assert "engine" not in only_hf.partition("┃")[2]


@pytest.mark.parametrize(("flags", "passed"), [(["--rouge1-threshold", 100], False), (["--rouge1-threshold", 0], True)])
def test_check_accuracy_decides_the_exit_code(summarize: Summarize, flags: list[Any], passed: bool) -> None:
    result = summarize("--test-engine", "--check-accuracy", *flags)
    assert result.exit_code == (0 if passed else 1)
    assert f"accuracy check {'passed' if passed else 'FAILED'}" in result.stdout
    assert ("error: ROUGE-1 is below the threshold 100" in result.stderr) != passed
    as_json = summarize("--test-engine", "--check-accuracy", *flags, "--json")
    assert as_json.exit_code == result.exit_code
    check = json.loads(as_json.stdout)["checks"]["accuracy"]
    assert (check["passed"], check["threshold"]) == (passed, flags[1])
    assert summarize("--test-engine", *flags).exit_code == 0


def test_threshold_is_15_by_default(summarize: Summarize) -> None:
    result = summarize("--test-engine", "--check-accuracy", "--json")
    check = json.loads(result.stdout)["checks"]["accuracy"]
    assert check["threshold"] == 15
    assert result.exit_code == (0 if check["rouge1"] >= 15 else 1)


def test_output_dir_holds_outputs_and_the_summary(summarize: Summarize, tmp_path: Path) -> None:
    output_dir = tmp_path / "a" / "out"
    arguments = ["--test-engine", "--test-hf", "--ngram-config", NGRAM, "--output-dir", output_dir, "--json"]
    document = summarize(*arguments).document
    assert sorted(path.name for path in output_dir.iterdir()) == ["engine.out", "hf.out", "summary.json"]
    assert json.loads((output_dir / "summary.json").read_text()) == document
    for name in ("engine.out", "hf.out"):
        text = (output_dir / name).read_text()
        for i, request in enumerate(document["requests"]):
            assert f"\n[{i}] {request['output_text']}" in text


def test_quiet_measures_in_silence(summarize: Summarize) -> None:
    result = summarize("--test-engine", "--quiet", "--check-accuracy", "--rouge1-threshold", 0)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def test_demo_is_the_dataset_by_default(specdec: Specdec, llama_uncompiled_dir: Path) -> None:
    arguments = ["--engine-dir", llama_uncompiled_dir, "--test-engine", "--output-len", 1, "--max-ite", 2]
    document = specdec("summarize", *arguments, "--max-input-length", 40, "--json").document
    assert document["settings"]["dataset"] == "demo"
    assert {request["category"] for request in document["requests"]} == {"digest", "describe"}
