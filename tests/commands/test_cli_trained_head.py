"""The shipped head, which was trained: every command drafts with it, and its drafts are accepted."""

import io
import json
from pathlib import Path

import pytest
from command_line import Specdec, assert_valid, ids_of

from runtime.bundle import read_bundle
from runtime.engine_cache import EngineSettings, engine_of_model
from runtime.heads.head_config import is_head, read_head

ARTICLES = Path(__file__).parents[2] / "runtime/demo/articles.jsonl"
NUM_TOKENS = 24
DEMO = ["--model-dir", "demo", "--compiler", "none"]
HEAD = ["--draft-model-dir", "demo-head", "--draft-len-mode", "fixed"]


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine that `DEMO` and `HEAD` have made."""
    states = read_head("demo-head").hidden_states_of(6)
    with engine_of_model("demo", EngineSettings(hidden_states=states, compiler="none")) as directory:
        return directory


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six held-out articles to describe."""
    articles = [json.loads(line) for line in ARTICLES.read_text(encoding="utf-8").splitlines()]
    chosen = [one for one in articles if one["category"] == "describe"][:6]
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{one['article']} TL;DR:"}) + "\n" for one in chosen))
    return path


def test_run(specdec: Specdec, engine_dir: Path, prompts: Path) -> None:
    asked = ["--input-file", prompts, "--max-output-len", NUM_TOKENS, "--json"]
    plain = specdec("run", *DEMO, *asked).document
    for flags in ([*DEMO, *HEAD], ["--engine-dir", engine_dir, "--draft-engine-dir", "demo-head", "--eagle-config", 4]):
        drafted = specdec("run", *flags, *asked).document
        assert ids_of(drafted) == ids_of(plain)
        assert drafted["total"]["tokens_per_step"] > 1.3, drafted["total"]


def test_chain_of_lookup_and_head(specdec: Specdec, engine_dir: Path, prompts: Path) -> None:
    asked = ["--input-file", prompts, "--max-output-len", NUM_TOKENS, "--json"]
    engine = ["--engine-dir", engine_dir, "--ngram-config", "10,2"]
    lookup = specdec("run", *engine, *asked).document["total"]
    head = ["--draft-engine-dir", "demo-head", "--eagle-config", 4, "--drafters", "ngram,eagle"]
    chain = specdec("run", *engine, *head, *asked).document["total"]
    assert chain["tokens_per_step"] > lookup["tokens_per_step"]


def test_batch(specdec: Specdec, prompts: Path, tmp_path: Path) -> None:
    files = ["-i", prompts, "-o", tmp_path / "results.jsonl"]
    document = specdec(
        "batch", *DEMO, *HEAD, *files, "--max-output-len", NUM_TOKENS, "--temperature", 0, "--json"
    ).document
    assert document["num_accepted_tokens"] > 10


def test_chat(specdec: Specdec, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = json.loads(prompts.read_text().splitlines()[0])["prompt"].replace("\n", " ")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{said}\n/stats\n"))
    result = specdec("chat", *DEMO, *HEAD, "--max-output-len", NUM_TOKENS)
    assert result.exit_code == 0, result.stderr
    assert "accepted" in result.stdout


def test_summarize(specdec: Specdec, engine_dir: Path) -> None:
    flags = ["--engine-dir", engine_dir, "--test-engine", "--max-ite", 2, "--output-len", NUM_TOKENS]
    head = ["--draft-engine-dir", "demo-head", "--eagle-config", 4]
    document = specdec("summarize", *flags, *head, "--json").document
    assert_valid("summarize", document)
    assert document["total"]["num_accepted_draft_tokens"] > 0


@pytest.mark.slow
def test_tune_has_it_among_its_candidates(specdec: Specdec, engine_dir: Path, prompts: Path, tmp_path: Path) -> None:
    flags = ["--engine-dir", engine_dir, "--max-output-len", 8, "--num-live-prompts", 1, "--max-draft-len", 2]
    asked = ["--input-file", prompts, *flags, "--draft-engine-dir", "demo-head"]
    document = specdec("tune", *asked, "--json").document
    assert_valid("tune", document)
    tried = [record["drafter"] for record in document["tried"]]
    assert {one["name"] for one in tried} == {"eagle", "chain"}, tried
    named = specdec("tune", *asked, "--eagle-config", 2, "--output", tmp_path / "profile.json", "--json")
    assert named.exit_code == 0, named.stderr


def test_it_is_small_and_its_memory_is_its_weights(engine_dir: Path) -> None:
    assert is_head("demo-head") and not is_head("demo")
    directory = read_head("demo-head").directory
    assert sum(path.stat().st_size for path in directory.iterdir()) <= 3_000_000
    assert read_bundle(engine_dir).config.build_config.hidden_states == (1, 3, 5)
