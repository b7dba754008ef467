"""The shipped head, which was trained: every command drafts with it, and its drafts are accepted."""

import io
import json
import re
import shutil
from pathlib import Path

import pytest
from command_line import Specdec, ids_of
from sentences import Said
from test_cli_errors import assert_one_clear_error

from runtime.builder.engine_cache import engine_of_model, settings_of
from runtime.drafters.heads.head_config import read_head

ARTICLES = Path(__file__).parents[2] / "runtime/demo/articles.jsonl"
NUM_TOKENS = 16
DEMO = ["--model-dir", "demo", "--compiler", "none"]
SIZES = ["--max-input-len", 64, "--max-seq-len", 128]
HEAD = ["--draft-model-dir", "demo-head", "--draft-len-mode", "fixed"]


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine that `DEMO` and `HEAD` have made."""
    states = read_head("demo-head").hidden_states_of(6)
    with engine_of_model("demo", settings_of({"compiler": "none"}, hidden_states=states)) as directory:
        return directory


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two shortest held-out articles to describe, and `articles.jsonl` beside them."""
    articles = [json.loads(line) for line in ARTICLES.read_text(encoding="utf-8").splitlines()]
    described = [one for one in articles if one["category"] == "describe"]
    chosen = sorted(described, key=lambda one: len(one["article"]))[:2]
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{one['article']} TL;DR:"}) + "\n" for one in chosen))
    path.with_name("articles.jsonl").write_text("".join(json.dumps(one) + "\n" for one in chosen))
    return path


def test_run(specdec: Specdec, engine_dir: Path, prompts: Path) -> None:
    asked = ["--input-file", prompts, "--max-output-len", NUM_TOKENS, "--json"]
    plain = specdec("run", *DEMO, *asked).document
    for flags in ([*DEMO, *HEAD], ["--engine-dir", engine_dir, "--draft-engine-dir", "demo-head", "--eagle-config", 4]):
        drafted = specdec("run", *flags, *asked).document
        assert ids_of(drafted) == ids_of(plain)
        assert drafted["total"]["tokens_per_step"] > 1.3, drafted["total"]


def test_other_commands_draft_with_it(
    specdec: Specdec, engine_dir: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["--max-output-len", NUM_TOKENS]
    files = ["-i", prompts, "-o", tmp_path / "results.jsonl", "--temperature", 0]
    assert specdec("batch", *DEMO, *HEAD, *files, *asked, "--json").document["num_accepted_tokens"] > 3
    said = json.loads(prompts.read_text().splitlines()[0])["prompt"].replace("\n", " ")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{said}\n/stats\n"))
    result = specdec("chat", *DEMO, *HEAD, *asked)
    accepted = re.search(r"(\d+) of (\d+) draft tokens accepted", result.stdout)
    assert result.exit_code == 0 and accepted and int(accepted[1]) > 0
    dataset = ["--dataset", prompts.with_name("articles.jsonl"), "--max-ite", 1, "--output-len", NUM_TOKENS]
    flags = ["--engine-dir", engine_dir, "--test-engine", *dataset]
    document = specdec("summarize", *flags, "--draft-engine-dir", "demo-head", "--eagle-config", 4, "--json").document
    assert document["total"]["num_accepted_draft_tokens"] > 0


BUILD = ["--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 4, "--compiler", "none"]


def test_ids_that_cannot_be_drafted(
    specdec: Specdec, llama_checkpoint_dir: Path, head_dirs: tuple[Path, Path], tmp_path: Path, said: Said
) -> None:
    build = ["build", "--checkpoint-dir", llama_checkpoint_dir, "--output-dir", tmp_path / "engine", *BUILD, *SIZES]
    copy, file = [*build, "--self-draft", "int8"], tmp_path / "ids.json"
    for ids, value in (("[1, 300]", 300), ("[4, 4]", 4), ("[]", file), ("[1.5]", 1.5)):
        file.write_text(ids)
        result = specdec(*copy, "--draft-vocab", file)
        assert result.exit_code == 1
        said(result, value)
    for flags, value in (
        ([*build, "--draft-vocab", "auto"], "auto"),
        ([*build, "--draft-output-layer", "int4"], "int4"),
        ([*copy, "--draft-layers", "int4"], "int4"),
        ([*copy, "--draft-vocab-size", 3], 3),
        ([*copy, "--draft-vocab", "auto", "--draft-vocab-size", 300], 300),
        ([*build, "--draft-model-dir", head_dirs[1], "--draft-vocab", "auto"], 200),
    ):
        result = specdec(*flags)
        assert result.exit_code == 2
        said(result, value)
    assert not (tmp_path / "engine").exists()


def test_what_an_engine_lacks_for_drafts_is_said(
    specdec: Specdec,
    llama_dir: Path,
    llama_engine_dir: Path,
    head_dirs: tuple[Path, Path],
    tmp_path: Path,
    said: Said,
) -> None:
    """Hidden states for a head, and a tokenizer to choose ids by."""
    head = ["--draft-engine-dir", head_dirs[1], "--eagle-config", 4]
    said(specdec("run", "--engine-dir", llama_engine_dir, *head, "--input-text", "dog"), head_dirs[1])
    model = shutil.copytree(llama_dir, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    checkpoint, engine = tmp_path / "checkpoint", ["--output-dir", tmp_path / "engine"]
    assert specdec("convert", "--model-dir", model, "--output-dir", checkpoint).exit_code == 0
    build = ["build", "--checkpoint-dir", checkpoint, *engine, *BUILD, *SIZES, "--self-draft", "int8"]
    said(specdec(*build, "--draft-vocab", "auto"), checkpoint)
    assert not (tmp_path / "engine").exists()


def test_a_head_that_is_named_is_not_passed_over(
    specdec: Specdec, llama_dir: Path, mtp_dirs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has one of its own, which drafted in the place of what is not there. Beside a draft model it drafts."""
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    run = [
        "run",
        "--model-dir",
        mtp_dirs[1],
        "--compiler",
        "none",
        "--input-text",
        "dog",
        "--max-output-len",
        6,
        "--json",
    ]
    for flags in (["--drafters", "mtp"], ["--spec-decode-algo", "MTP"], ["--drafters", "ngram,mtp"]):
        result = specdec(*run, *flags, "--draft-model-dir", tmp_path / "none")
        assert_one_clear_error(result, 1, (str(tmp_path / "none"),))
    document = specdec(*run, "--drafters", "draft-target,mtp", "--draft-model-dir", llama_dir).document
    assert document["settings"]["mtp_config"]["head_dir"] == str(mtp_dirs[1])
