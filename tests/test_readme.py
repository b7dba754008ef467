"""The README is true: its flags are the commands', its commands and its Python run."""

import re
from pathlib import Path

import pytest
import update_readme

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The directory the README's walk was run in, and what each command printed."""
    directory = tmp_path_factory.mktemp("walk")
    return directory, update_readme.run_walk(update_readme.walk_commands(README), directory)


def test_flag_tables_are_those_of_the_commands() -> None:
    assert update_readme.with_tables(README) == README
    assert README.count("| `--ngram-config` |") == 3  # run, summarize and tune: the tables are not empty


def test_the_walk_runs_and_passes_its_own_checks(walk: tuple[Path, list[str]]) -> None:
    _, outputs = walk
    assert len(outputs) == 10
    convert, build, run, summarize = outputs[:4]
    assert "Converted llama to float32" in convert
    assert "aot" in build
    assert 'Output [Text 0]: "' in run
    assert "accuracy check passed" in summarize
    assert "token for token the same as Hugging Face: 20 of 20" in summarize
    assert "token for token the same as the engine without drafter: 20 of 20" in summarize


def test_the_draft_model_of_the_walk_passes_its_own_checks(walk: tuple[Path, list[str]]) -> None:
    summarize, run = walk[1][6:8]
    assert "token for token the same as Hugging Face: 20 of 20" in summarize
    assert "lossless check passed: 20 of 20 outputs" in summarize
    assert "lossless check passed: chi-squared" in run
    assert (walk[0] / "logits_generation.npy").is_file()


def test_leader_mode_of_the_walk_streams_and_is_lossless(walk: tuple[Path, list[str]]) -> None:
    streamed, checked = walk[1][8:]
    assert "[Text 0] " in streamed and "[Text 1] " in streamed
    assert "lossless check passed: 2 of 2" in checked


def python_examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_python_example_runs(
    walk: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, example = python_examples()
    assert len([line for line in example.splitlines() if line]) <= 10
    monkeypatch.chdir(walk[0])
    exec(compile(example, "README.md", "exec"), {})
    assert "'tokens_per_step'" in capsys.readouterr().out


def test_the_readmes_own_drafter_speculates_without_loss(walk: tuple[Path, list[str]]) -> None:
    example, _ = python_examples()
    assert len(example.splitlines()) <= 12
    (walk[0] / "last_occurrence.py").write_text(example)
    (command,) = re.findall(r"```bash\n(specdec run [^`]*--drafter [^`]*)```", README)
    (output,) = update_readme.run_walk([command], walk[0])
    assert "lossless check passed: 1 of 1" in output
    drafted = re.search(r"(\d+)/(\d+)", output)
    assert drafted and int(drafted[1]) > 0


def test_links_to_files_of_the_repository_hold() -> None:
    named = re.findall(r"`((?:commands|runtime|scripts|specdec_cli|tests)/[\w./-]+)", README)
    assert named
    assert [name for name in named if not (ROOT / name.split()[0]).exists()] == []
