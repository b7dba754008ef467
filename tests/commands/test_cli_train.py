"""`specdec train`: a head that `run` drafts with, the same again after an interruption, and one sentence for errors."""

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import PROMPTS, Result, Specdec, assert_valid, ids_of, tree, with_last_values
from safetensors.torch import load_file, save_file
from test_cli_errors import assert_one_clear_error
from tiny import make_model
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from commands.train import work
from runtime.checkpoint.bundle import read_bundle
from runtime.drafters.heads.head_config import read_head
from runtime.drafters.heads.mtp_head import check_mtp_is_of
from runtime.loop.compatibility import check_head_tokenizer
from runtime.training.training_run import TrainingRun

TEXTS = [f"{prompt}{end}" for end in ("", " and", " or") for prompt in PROMPTS]
ASKED = ["--input-text", TEXTS[0], "--max-output-len", 24, "--json"]
TRAIN = ["--max-output-len", 12, "--num-epochs", 2, "--draft-vocab-size", 64, "--batch-tokens", 128]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with `prompts.jsonl`."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def train(specdec: Specdec, llama_dir: Path, directory: Path) -> Callable[..., Result]:
    """`train(…)`: `specdec train` of `llama_dir`'s uncompiled engine, on `prompts.jsonl` unless there are traces."""

    def call(*arguments: object) -> Result:
        texts = [] if "--traces" in arguments else ["--input-file", "prompts.jsonl"]
        target = ["--model-dir", llama_dir, "--compiler", "none", "--output-dir", "head"]
        return specdec(*with_last_values(["train", *target, *texts, *TRAIN, *arguments]))

    return call


def test_head_is_trained_and_drafts(
    train: Callable[..., Result], specdec: Specdec, llama_dir: Path, directory: Path
) -> None:
    document = train("--json").document
    assert_valid("train", document)
    assert (document["num_texts"], document["num_held_out_texts"]) == (11, 4)
    assert tree(directory) == ["head", "head/config.json", "head/model.safetensors", "prompts.jsonl"]
    assert read_head(Path("head")).draft_vocab_size == 64
    target = ["--model-dir", llama_dir, "--compiler", "none", *ASKED]
    plain = specdec("run", *target).document
    drafted = specdec("run", *target, "--draft-model-dir", "head", "--draft-len-mode", "fixed").document
    assert ids_of(drafted) == ids_of(plain)
    assert drafted["total"]["num_draft_tokens"] > 0

    further = train("--draft-model-dir", "head", "--output-dir", "further", "--draft-vocab-size", 40, "--json").document
    assert further["settings"]["draft_vocab_size"] == 40 == read_head(Path("further")).draft_vocab_size
    assert further["settings"]["learning_rate"] == 1e-4


def test_a_head_of_another_model_is_refused_before_anything_is_answered(
    specdec: Specdec, mtp_dirs: tuple[Path, Path], llama_dir: Path, directory: Path
) -> None:
    """One of the same model, trained further or rounded, is not."""
    other = directory / "other"
    shutil.copytree(mtp_dirs[1], other)
    before, tensors = tree(directory), load_file(other / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        save_file(tensors | {name: tensors[name].roll(1, 0)}, other / "model.safetensors", {"format": "pt"})
        texts = ["--input-file", "prompts.jsonl", "--output-dir", "head", "--compiler", "none"]
        result = specdec("train", llama_dir, "--draft-model-dir", other, *texts)
        assert_one_clear_error(result, 1, ("another model", name, str(llama_dir)))
        assert tree(directory) == before
        near = tensors[name] + 0.1 * tensors[name].std() * torch.randn(tensors[name].shape)
        save_file(tensors | {name: near}, other / "model.safetensors", {"format": "pt"})
        check_mtp_is_of(read_head(other), llama_dir)


def test_a_head_beside_another_tokenizer_is_refused(
    specdec: Specdec, mtp_dirs: tuple[Path, Path], llama_dir: Path, directory: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """It neither drafts nor is trained, though its weights fit: its ids are other words. A revision that renames a
    special token is taken."""
    other = directory / "other"
    shutil.copytree(mtp_dirs[1], other)
    data = json.loads((other / "tokenizer.json").read_text())
    run = ["--input-text", "The dog", "--drafters", "mtp", "--max-output-len", 4, "--compiler", "none"]
    run = ["run", "--model-dir", llama_dir, "--draft-model-dir", other, *run]
    texts = ["--input-file", "prompts.jsonl", "--output-dir", "head", "--compiler", "none"]
    train = ["train", "--model-dir", llama_dir, "--draft-model-dir", other, *texts]
    vocab = data["model"]["vocab"]
    first, *between, last = sorted(vocab, key=vocab.__getitem__)[-20:]
    data["model"]["vocab"] = vocab | {first: vocab[last], last: vocab[first]}
    (other / "tokenizer.json").write_text(json.dumps(data))
    assert specdec(*run).exit_code == 0
    swapped = {token: vocab[as_token] for token, as_token in zip([first, *between], [*between, last], strict=True)}
    data["model"]["vocab"] = vocab | swapped | {last: vocab[first]}
    (other / "tokenizer.json").write_text(json.dumps(data))
    assert specdec("convert", "--model-dir", llama_dir, "--output-dir", "checkpoint").exit_code == 0
    before = tree(directory)
    build = ["build", "--checkpoint-dir", "checkpoint", "--output-dir", "engine", "--compiler", "none"]
    build += ["--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 4, "--draft-model-dir", other]
    for command in (run, train, build):
        assert_one_clear_error(specdec(*command), 1, ("another tokenizer", f"20 of its {len(vocab)}", repr(last)))
        assert tree(directory) == before
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).unlink()
    config = json.loads((other / "config.json").read_text())
    bundle = read_bundle(mtp_dirs[0])
    for model_type in ("llama", "qwen3"):  # transformers makes a tokenizer of one token of the latter's config alone
        (other / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
        check_head_tokenizer(other, bundle.directory, lambda: tokenizer)


def test_interrupted_it_goes_on_to_the_same_head(
    train: Callable[..., Result], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train("--output-dir", "whole")
    assert whole.exit_code == 0, whole.stderr
    wanted = (directory / "whole/model.safetensors").read_bytes()
    go_on = TrainingRun.train

    def interrupted(run: TrainingRun, progress: Any) -> None:
        run.trainer.train_step()
        run.save()
        raise KeyboardInterrupt

    monkeypatch.setattr(TrainingRun, "train", interrupted)
    stopped = train()
    assert stopped.exit_code == 130
    told = [line for line in stopped.stderr.splitlines() if "interrupted" in line]
    assert told == ["warning: interrupted: head.training keeps the work so far, and the same command goes on from it"]
    monkeypatch.setattr(TrainingRun, "train", go_on)
    assert {"checkpoint.pt", "answers.jsonl", "states.bin"} <= set(tree(directory / "head.training"))
    assert not (directory / "head").exists()
    assert_one_clear_error(train("--num-epochs", 3), 1, ("num_epochs 2", "3"))
    checkpoint = directory / "head.training/checkpoint.pt"
    saved = checkpoint.read_bytes()
    for damaged in (b"", saved[: len(saved) // 2], b"\x80\x02no pickle"):
        checkpoint.write_bytes(damaged)
        assert_one_clear_error(train(), 1, ("checkpoint.pt` is damaged",))
    checkpoint.write_bytes(saved)
    done = train("--quiet")
    assert (done.exit_code, done.stdout) == (0, "head\n"), done.stderr
    assert (directory / "head/model.safetensors").read_bytes() == wanted
    assert not (directory / "head.training").exists()


def test_interrupted_before_its_first_answer_it_leaves_nothing(
    train: Callable[..., Result], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(work, "_answers", interrupted)
    before = tree(directory)
    stopped = train()
    assert stopped.exit_code == 130 and "goes on" not in stopped.stderr
    assert tree(directory) == before


TRACE = {"prompt_ids": [5, 6, 7], "output_ids": [8, 9, 10, 11]}
ERRORS: dict[str, tuple[list[object], int, list[str]]] = {
    "other answers": (["--traces", "others.jsonl"], 1, ["the target's 8 likeliest tokens"]),
    "outside the vocabulary": (["--traces", "outside.jsonl"], 1, ["outside the vocabulary of 300: 300"]),
    "no directory of its own": (["--work-dir", "head"], 2, ["`--work-dir`", "head"]),
    "something there": (["--output-dir", "full"], 1, ["not empty: full"]),
    "no head": (["--draft-model-dir", "full"], 1, ["full"]),
    "self-draft": (["--self-draft", "int4"], 2, ["`--self-draft`"]),
    "too few prompts": (["--input-file", "few.jsonl"], 1, ["at least 8", "4"]),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_leave_nothing(case: str, train: Callable[..., Result], directory: Path) -> None:
    arguments, exit_code, said = ERRORS[case]
    traces = {"outside": [TRACE | {"output_ids": [300, 1, 2]}] * 9}
    traces["others"] = [TRACE | {"output_ids": [(7 * i + n) % 300 for i in range(30)]} for n in range(12)]
    for name, lines in traces.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "few.jsonl").write_text("".join((directory / "prompts.jsonl").read_text().splitlines(True)[:4]))
    (directory / "full").mkdir()
    (directory / "full/config.json").write_text("{}")
    before = tree(directory)
    assert_one_clear_error(train(*arguments), exit_code, tuple(said))
    assert tree(directory) == before


def test_full_disk_is_one_sentence_and_what_is_done_is_kept(train: Callable[..., Result], directory: Path) -> None:
    """No file may be longer: of the hidden states, then of the checkpoint."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, limits[1]))
    try:
        result = train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_one_clear_error(result, 1, ("File too large",))
    assert not (directory / "head").exists()
    done = train()
    assert done.exit_code == 0, done.stderr
    assert (directory / "head/model.safetensors").is_file()


def test_a_small_model_is_adapted_to_draft_in_parallel(
    train: Callable[..., Result], specdec: Specdec, llama_dir: Path, directory: Path
) -> None:
    """`--parallel` is llama.cpp's name of another flag for other commands."""
    small = make_model("llama", vocab_size=len(AutoTokenizer.from_pretrained(llama_dir)), num_hidden_layers=1)
    small.save_pretrained("small")
    shutil.copy(llama_dir / "tokenizer.json", "small")
    given = ["--model-dir", llama_dir, "--parallel", "small", "--compiler", "none", "--output-dir", "made"]
    assert_one_clear_error(train(*given), 2, ("drafts all ids", "--draft-vocab-size", "64"))
    answers = ["--input-file", "prompts.jsonl", "--max-output-len", 12, "--output-traces", "own.jsonl"]
    assert specdec("run", "--model-dir", llama_dir, "--compiler", "none", *answers).exit_code == 0
    texts = ["--traces", "own.jsonl", "--held-out-traces", "own.jsonl", "--num-epochs", 30, "--batch-tokens", 512]
    document = specdec("train", *given, *texts, "--learning-rate", 0.01, "--json").document
    assert_valid("train", document)
    assert document["settings"]["parallel"] == "small" and document["settings"]["num_unrolled_steps"] == 8
    lengths = document["held_out_tokens_per_step"]
    assert len(lengths) == 8 and lengths[7]["tokens_per_step_after"] > lengths[7]["tokens_per_step_before"] + 0.1
    config = json.loads((directory / "made" / "config.json").read_text())
    assert config["pard_token"] < config["vocab_size"] and config["spd_type"] == "pard"
    target = ["--model-dir", llama_dir, "--compiler", "none", *ASKED]
    drafted = specdec("run", *target, "--draft-model-dir", "made", "--draft-len-mode", "fixed").document
    assert drafted["settings"]["drafters"] == ["pard"] and drafted["total"]["num_draft_tokens"] > 0
    assert ids_of(drafted) == ids_of(specdec("run", *target).document)
