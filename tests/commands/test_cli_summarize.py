"""`summarize`: each option changes what is measured, and the engine's answers are Hugging Face's."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from html import unescape
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from command_line import NGRAM, Result, Specdec, assert_valid, edit_json, with_last_values
from safetensors.torch import load_file, save_file
from sentences import Said
from tiny import hf_greedy
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from commands.inputs.dataset import summarization_prompt
from commands.summarize.rouge import rouge_scores
from runtime.measure.evaluation import systems

Summarize = Callable[..., Result]


@pytest.fixture
def summarize(specdec: Specdec, llama_engine_dir: Path, llama_dir: Path, articles: Path) -> Summarize:
    """`summarize(…)`: `specdec summarize` of the articles, 8 tokens each, with the uncompiled engine."""

    def call(*arguments: object) -> Result:
        where = ["--engine-dir", llama_engine_dir, "--hf-model-dir", llama_dir]
        dataset = [] if "--dataset" in arguments else ["--dataset", articles]
        return specdec(*with_last_values(["summarize", *where, *dataset, "--output-len", 8, *arguments]))

    return call


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}


def test_answers_are_hfs(
    summarize: Summarize, llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, articles: Path
) -> None:
    arguments = ["--test-engine", "--test-hf", "--ngram-config", NGRAM, "--batch-size", 3, "--output-len", 20]
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
    assert document["checks"]["identical_to_no_drafter"] == same


@pytest.fixture
def uneven(tmp_path: Path) -> list[str]:
    """`--dataset` with six texts of one to six sentences, more than the engine runs at a time, in one batch."""
    sentences = "The little dog had a red ball. One day the dog lost the ball. A girl found it. The dog ran. " * 2
    rows = [{"article": ".".join(sentences.split(".")[: i + 1]), "highlights": "A dog and a ball."} for i in range(6)]
    path = tmp_path / "uneven.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--dataset", str(path), "--batch-size", "6", "--max-input-length", "70"]


def test_leader_mode_answers_a_batch_of_different_lengths_as_hf_does(
    summarize: Summarize, llama: PreTrainedModel, uneven: list[str], tmp_path: Path
) -> None:
    """Prompts have different lengths, and so have outputs, because a common token ends them."""
    flags = ["--spec-decode-algo", "NGRAM", "--spec-decode-max-draft-len", 3, "--check-lossless"]
    flags += ["--draft-len-mode", "fixed"]  # automatic lengths follow from times
    output = ["--output-len", 24, "--report", tmp_path / "page.html", "--json"]
    arguments = [*uneven, "--test-engine", "--test-hf", *flags, *output]
    every_token = [token for output_ids in outputs_of(summarize(*arguments).document) for token in output_ids]
    ((common, _),) = Counter(every_token).most_common(1)
    checks = ["--end-id", common, "--check-accuracy", "--rouge1-threshold", 0]
    document = summarize(*arguments, *checks).document
    assert_valid("summarize", document)
    outputs = outputs_of(document)
    assert outputs == [hf_greedy(llama, request["prompt_ids"], 24, common) for request in document["requests"]]
    assert len({len(request["prompt_ids"]) for request in document["requests"]}) == 6
    assert len(set(map(len, outputs))) > 1
    assert document["settings"]["mode"] == "leader" and document["settings"]["batch_size"] == 6
    assert document["checks"]["identical_to_hf"] == {"num_identical": 6, "num_samples": 6}
    assert document["checks"]["accuracy"]["passed"]
    assert document["total"]["num_draft_tokens"] > 0 and document["checks"]["lossless"]["passed"]
    assert "leader" in (tmp_path / "page.html").read_text()


def outputs_of(document: dict[str, Any]) -> list[list[int]]:
    return [request["output_ids"] for request in document["requests"]]


def perturbed(directory: Path) -> None:
    """The same config and tokenizer, and other weights, as after more training."""
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"][0] += 0.125
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def swapped(directory: Path) -> None:
    """A tokenizer of as many tokens, two of which have changed places."""
    data = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = data["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (directory / "tokenizer.json").write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "difference"), [(swapped, "the tokenizer"), (perturbed, "the weights")], ids=["tokenizer", "weights"]
)
def test_another_model_of_the_same_vocabulary_is_named_and_not_compared(
    specdec: Specdec, llama_engine_dir: Path, llama_dir: Path, articles: Path, tmp_path: Path,
    change: Callable[[Path], None], difference: str, said: Said,
) -> None:  # fmt: skip
    other = tmp_path / "other"
    shutil.copytree(llama_dir, other)
    change(other)
    arguments = ["summarize", "--engine-dir", llama_engine_dir, "--dataset", articles, "--test-engine", "--test-hf"]
    arguments += ["--hf-model-dir", other, "--output-len", 4, "--max-ite", 2]
    page = tmp_path / "page.html"
    result = specdec(*arguments, "--json", "--report", page)
    assert result.stderr.startswith("warning: ")
    said(result, f"`--hf-model-dir {other}`", difference)
    document = result.document
    assert_valid("summarize", document)
    assert document["hf_differences"] == [difference]
    assert document["speedup_over_hf"] is None and "identical_to_hf" not in document["checks"]
    assert "ran another model than the engine's" in unescape(page.read_text())
    assert "speedup over Hugging Face" not in page.read_text()
    shown = specdec(*arguments).stdout
    assert "not compared with Hugging Face: it ran another model than the engine's" in shown
    assert "speedup over Hugging Face" not in shown and "same as Hugging Face" not in shown


def test_hf_answers_greedily_whatever_its_generation_config_says(
    summarize: Summarize, llama_dir: Path, tmp_path: Path
) -> None:
    """The engine is greedy without penalties, so what is beside it must be too."""
    model_dir = tmp_path / "model"
    shutil.copytree(llama_dir, model_dir)
    edit_json(model_dir / "generation_config.json", repetition_penalty=5.0, no_repeat_ngram_size=1, min_new_tokens=6)
    arguments = ["--test-engine", "--test-hf", "--hf-model-dir", model_dir, "--output-len", 12]
    document = summarize(*arguments, "--json").document
    assert document["checks"]["identical_to_hf"] == {"num_identical": 5, "num_samples": 5}


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
        assert record["median_tpot_s"]["engine"] == median(request["stats"]["tpot_s"] for request in requests)
        assert record["num_references"] == len(requests)
        assert record["wall_s"]["engine"] == pytest.approx(sum(request["wall_s"]["engine"] for request in requests))
    shown = summarize(*arguments).stdout
    rows = [line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│")]
    assert "By category" in shown
    assert {"dogs", "girls"} <= set(rows)


@pytest.mark.parametrize(("flags", "passed"), [(["--rouge1-threshold", 100], False), (["--rouge1-threshold", 0], True)])
def test_check_accuracy_decides_the_exit_code(summarize: Summarize, flags: list[Any], passed: bool, said: Said) -> None:
    result = summarize("--test-engine", "--check-accuracy", *flags)
    assert result.exit_code == (0 if passed else 1)
    assert f"accuracy check {'passed' if passed else 'FAILED'}" in result.stdout
    assert bool(result.stderr) != passed
    if not passed:
        said(result, "ROUGE-1", 100)
    as_json = summarize("--test-engine", "--check-accuracy", *flags, "--json")
    assert as_json.exit_code == result.exit_code
    check = json.loads(as_json.stdout)["checks"]["accuracy"]
    assert (check["passed"], check["threshold"]) == (passed, flags[1])
    assert summarize("--test-engine", *flags).exit_code == 0


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


SAMPLING = ["--temperature", 0.8, "--top-p", 0.95, "--random-seed", 3]


def test_every_system_samples(summarize: Summarize) -> None:
    """Hugging Face as well, reproducibly; and otherwise than greedily."""
    arguments = ["--test-engine", "--test-hf", "--output-len", 10, "--max-ite", 2, "--json"]

    def outputs(*flags: object) -> dict[str, list[list[int]]]:
        requests = sorted(summarize(*arguments, *flags).document["requests"], key=lambda request: request["id"])
        return {name: [request["outputs"][name] for request in requests] for name in ("engine", "hf")}

    greedy, sampled = outputs(), outputs(*SAMPLING)
    for name in ("engine", "hf"):
        assert all(a != b for a, b in zip(sampled[name], greedy[name], strict=True))
    assert outputs(*SAMPLING) == sampled
    assert outputs(*SAMPLING[:-1], 4)["hf"] != sampled["hf"]


PENALTIES = ["--repetition-penalty", 1.3, "--no-repeat-ngram-size", 3, "--presence-penalty", 1.5]
PENALTIES += ["--frequency-penalty", 0.5, "--bad-words", "as", "--bad-words", " b"]


def test_hf_has_the_same_penalties(summarize: Summarize) -> None:
    arguments = ["--test-engine", "--output-len", 24, "--json"]
    document = summarize(*arguments, "--test-hf", *PENALTIES).document
    assert document["checks"]["identical_to_hf"] == {"num_identical": 5, "num_samples": 5}
    free = summarize(*arguments).document["requests"]
    assert [request["output_ids"] for request in document["requests"]] != [request["output_ids"] for request in free]


def test_questions_are_asked_as_they_are_and_scored_where_there_is_a_reference(
    summarize: Summarize, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Rows as in Spec-Bench's question.jsonl: turns, of which the first is asked, and references of some."""
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["The dog?", "And the ball?"]},
        {"question_id": 241, "category": "qa", "turns": ["One day?"], "reference": ["A dog.", "none"]},
        {"question_id": 242, "category": "qa", "turns": ["A girl?"], "reference": []},
    ]
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--test-engine", "--ngram-config", NGRAM, "--dataset", path, "--eval-task", "question"]
    document = summarize(*arguments, "--json").document
    assert_valid("summarize", document)
    requests = {request["id"]: request for request in document["requests"]}
    assert {i: request["reference"] for i, request in requests.items()} == {"81": None, "241": "A dog.", "242": None}
    assert requests["81"]["prompt_ids"] == tokenizer("The dog?")["input_ids"]
    assert document["num_references"] == 1
    assert document["rouge"]["engine"] == rouge_scores([requests["241"]["output_text"]], ["A dog."])
    writing, qa = document["categories"]["writing"], document["categories"]["qa"]
    assert (writing["rouge"]["engine"], writing["num_references"]) == (None, 0)
    assert (qa["num_samples"], qa["num_references"]) == (2, 1)
    stdout = summarize(*arguments).stdout
    assert re.search(r"│ writing +│ +1 │ +- │ +- │", stdout)


def test_references_of_which_rouge_sees_no_letter_are_told(summarize: Summarize, tmp_path: Path, said: Said) -> None:
    path = tmp_path / "dataset.jsonl"
    rows = [{"article": "The dog.", "highlights": text} for text in ("Кошка 1", "猫", "A cat")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = summarize("--test-engine", "--dataset", path, "--json")
    assert result.exit_code == 0
    said(result, "ROUGE", "2", "3")


def test_accuracy_of_questions_without_references_cannot_be_checked(
    summarize: Summarize, tmp_path: Path, said: Said
) -> None:
    path = tmp_path / "question.jsonl"
    path.write_text(json.dumps({"question": "The dog?"}))
    result = summarize("--test-engine", "--dataset", path, "--eval-task", "question", "--check-accuracy")
    assert result.exit_code == 1
    said(result)


@pytest.mark.parametrize("num_batches", [0, 1])
def test_ctrl_c_leaves_the_batches_that_were_answered(
    summarize: Summarize, num_batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """Both ways to run the engine have answered them; a batch that only one has answered does not count."""
    run_batch, num_calls = systems._run_engine_batch, 0

    def interrupted(*arguments: Any) -> systems.SystemRun:
        nonlocal num_calls
        num_calls += 1
        run = run_batch(*arguments)
        if num_calls == 2 + 2 * num_batches + 1:  # after the warm-up of both
            raise KeyboardInterrupt
        return run

    monkeypatch.setattr(systems, "_run_engine_batch", interrupted)
    result = summarize("--test-engine", "--ngram-config", "4,2", "--max-ite", 4, "--check-accuracy", "--json")
    assert result.exit_code == 130
    if not num_batches:
        assert result.stdout == ""
        return
    document = json.loads(result.stdout)
    said(result, num_batches, "4")
    assert len(document["requests"]) == num_batches
    for system in document["systems"].values():
        assert system["total"]["num_requests"] == num_batches
    assert document["speedup"] > 0 and "accuracy" not in document["checks"]
