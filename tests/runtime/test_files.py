"""Output directories are whole or absent, and only our own are replaced."""

import os
from pathlib import Path

import pytest

from commands.options.hints import hint_of
from runtime.errors import SpecDecError
from runtime.files import (
    check_output_directory,
    check_output_is_not_input,
    directory_bytes,
    new_directory,
    read_json,
    write_json,
)


def write_ours(directory: Path, name: str = "old") -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", {"format_version": 1})
    (directory / name).write_text("x")


def test_directory_appears_whole_at_the_end(tmp_path: Path) -> None:
    output = tmp_path / "a" / "b"
    with new_directory(output, replace=False) as directory:
        (directory / "file").write_text("x")
        assert not output.exists()
    assert [path.name for path in output.iterdir()] == ["file"]
    assert list(output.parent.iterdir()) == [output]


def test_directory_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").mkdir()
    with new_directory(tmp_path / "ours", replace=False):
        pass
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_interruption_leaves_nothing(error: type[BaseException], tmp_path: Path) -> None:
    with pytest.raises(error), new_directory(tmp_path / "output", replace=False) as directory:
        (directory / "file").write_text("x")
        raise error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_interrupted_replacement_leaves_the_old_directory(error: type[BaseException], tmp_path: Path) -> None:
    output = tmp_path / "output"
    write_ours(output)
    with pytest.raises(error), new_directory(output, replace=True):
        raise error
    assert list(tmp_path.iterdir()) == [output]
    assert (output / "old").read_text() == "x"


def test_replacement_keeps_nothing_of_the_old_directory(tmp_path: Path) -> None:
    output = tmp_path / "output"
    write_ours(output)
    with new_directory(output, replace=True) as directory:
        write_ours(directory, "new")
    assert sorted(path.name for path in output.iterdir()) == ["config.json", "new"]
    assert list(tmp_path.iterdir()) == [output]


def test_empty_directory_may_be_written_without_replace(tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    with new_directory(tmp_path / "output", replace=False) as directory:
        (directory / "file").write_text("x")
    assert (tmp_path / "output" / "file").exists()


def test_directory_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    write_ours(tmp_path / "output")
    with pytest.raises(SpecDecError, match="output directory is not empty") as error:
        check_output_directory(tmp_path / "output", replace=False)
    assert hint_of(error.value) == "`--force` replaces it"


@pytest.mark.parametrize("config", [None, "{}", "[]", "{", '{"model_type": "llama"}'])
def test_directory_of_others_is_never_replaced(config: str | None, tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_text("precious")
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(SpecDecError, match="something other than a checkpoint or engine"):
        check_output_directory(tmp_path, replace=True)
    with pytest.raises(SpecDecError), new_directory(tmp_path, replace=True):
        raise AssertionError("not reached")
    assert (tmp_path / "photo.jpg").read_text() == "precious"


@pytest.mark.parametrize("kind", ["file", "link to a directory", "dangling link"])
def test_output_that_is_no_directory_is_refused(kind: str, tmp_path: Path) -> None:
    output = tmp_path / "output"
    if kind == "file":
        output.write_text("x")
    else:
        write_ours(tmp_path / "elsewhere")
        os.symlink(tmp_path / ("elsewhere" if kind == "link to a directory" else "nowhere"), output)
    with pytest.raises(SpecDecError, match="output directory is not a directory"):
        check_output_directory(output, replace=True)


@pytest.mark.parametrize("output", ["input", "input/../input", "."])
def test_output_that_would_replace_the_input_is_refused(output: str, tmp_path: Path) -> None:
    (tmp_path / "input").mkdir()
    with pytest.raises(SpecDecError, match="the input is in the output directory"):
        check_output_is_not_input(tmp_path / output, tmp_path / "input")
    check_output_is_not_input(tmp_path / "input" / "new", tmp_path / "input")
    check_output_is_not_input(tmp_path / "other", tmp_path / "input")


def test_read_json_names_the_file_and_the_fault(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(SpecDecError, match=f"file is missing: {path}"):
        read_json(path)
    path.write_text('{"a": 1')
    with pytest.raises(SpecDecError, match=f"`{path}` is not valid JSON"):
        read_json(path)
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(SpecDecError, match=f"`{path}` is not valid JSON"):
        read_json(path)
    path.write_text("[1]")
    with pytest.raises(SpecDecError, match=f"`{path}` is not a JSON object: list"):
        read_json(path)
    write_json(path, {"a": [1, None, "ü"]})
    assert read_json(path) == {"a": [1, None, "ü"]}


def test_directory_bytes_counts_files_at_every_depth(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"123")
    (tmp_path / "y").write_bytes(b"12345")
    assert directory_bytes(tmp_path) == 8
