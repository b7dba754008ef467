"""The first word of a command line: which words are models, which engines, and which are prompts of `run`."""

from pathlib import Path

import pytest
from sentences import Said

from commands.options.engine_choice import EngineOptions
from commands.options.leader_flags import LeaderOptions
from runtime.util.errors import UsageError

Found = tuple[str | None, str | None, list[str]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model, a GGUF file under another name, an engine, and an empty directory."""
    for name, text in {
        "model": '{"model_type": "llama"}',
        "engine": '{"format_version": 1, "build_config": {}}',
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "blob").write_bytes(b"GGUF" + b"\0" * 20)
    (tmp_path / "notes.txt").write_text("a")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(words: list[str], *, model_dir: str | None = None, engine_dir: str | None = None) -> Found:
    """Model, engine and prompts of `run WORDS`."""
    engine = None if engine_dir is None else Path(engine_dir)
    options = EngineOptions(words[0], engine, leader=LeaderOptions(model_dir=model_dir))
    named, prompts = options.named_before(words[1:])
    return named.leader.model_dir, None if named.engine_dir is None else str(named.engine_dir), prompts


@pytest.mark.parametrize(
    ("word", "model", "engine"),
    [
        *((name, name, None) for name in ("demo", "demo-draft", "model", "./model", "blob", "nothing", "missing.gguf")),
        *((name, name, None) for name in ("owner/name", "owner/Name-1.5:Q4_K_M", "owner/name@main", "demo@x")),
        *((name, name, None) for name in ("llama3.2", "./gone", "/a/b")),
        ("engine", None, "engine"),
    ],
)
def test_a_model_is_the_first_word_and_the_others_are_prompts(
    word: str, model: str | None, engine: str | None, here: Path
) -> None:
    assert found([word, "a b", "c"]) == (model, engine, ["a b", "c"])
    assert found([word]) == (model, engine, [])


@pytest.mark.parametrize(
    "word", ["a b", "-", "What is 1/2?", "def area(w, h):", "x" * 5000, "a\nb", "~nobody here", "\0", "notes.txt b"]
)
def test_other_words_are_prompts(word: str, here: Path) -> None:
    assert found([word, "model"]) == (None, None, [word, "model"])


def test_a_single_word_is_a_prompt_where_an_engine_or_a_flag_is_there_to_answer_it(here: Path) -> None:
    assert found(["hello", "you"])[2] == ["you"]
    for word in ("hello", "owner/name", "nothing"):
        assert found([word, "you"], model_dir="model") == ("model", None, [word, "you"])
    (here / "engine_outputs").mkdir()
    assert found(["hello", "you"]) == (None, None, ["hello", "you"])
    assert found(["owner/name"])[0] == "owner/name"


@pytest.mark.parametrize("words", [["demo", "demo-draft"], ["model", "blob"], ["engine", "model"]])
def test_two_words_are_no_two_models(words: list[str], here: Path) -> None:
    with pytest.raises(UsageError) as raised:
        found(words)
    assert all(f"`{word}`" in raised.value.message for word in words)
    assert found([*words, "a b"])[2] == [words[1], "a b"]


@pytest.mark.parametrize("word", ["demo", "model", "engine", "blob"])
@pytest.mark.parametrize("flag", ["model_dir", "engine_dir"])
def test_two_models_are_wrong_usage(word: str, flag: str, here: Path) -> None:
    with pytest.raises(UsageError) as raised:
        found([word, "a b"], **{flag: "model"})
    assert f"`{word}`" in raised.value.message and f"`--{flag.replace('_', '-')}`" in raised.value.message


@pytest.mark.parametrize(
    ("word", "near"), [("dmeo", "demo"), ("Demo", "demo"), ("demo-drfat", "demo-draft"), ("modell", "model")]
)
def test_a_slip_of_a_models_name_is_no_prompt_before_another(
    word: str, near: str, here: Path, said: Said, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone it is a prompt with a note; where a flag names the model there is nothing to mistype."""
    (here / "engine_outputs").mkdir()
    with pytest.raises(UsageError) as raised:
        found([word, "a b"])
    if word == "dmeo":
        said(raised, word, near)
    assert found([word]) == (None, None, [word])
    assert f"`{near}`" in capsys.readouterr().err
    assert found([word, "a b"], model_dir="model")[2] == [word, "a b"]
    for others in ("done", "noting", "hello"):  # `nothing` is a directory without a model
        assert found([others, "a b"])[2] == [others, "a b"]
    assert not capsys.readouterr().err


def test_names_of_engines_in_the_cache_are_known(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "cache" / "engines" / "Qwen3-0.6B-0123456789abcdef").mkdir(parents=True)
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(here / "cache"))
    (here / "engine_outputs").mkdir()
    with pytest.raises(UsageError, match="Qwen3-06B"):
        found(["Qwen3-06B", "a b"])
