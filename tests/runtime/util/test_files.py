"""Output directories are whole or absent, and only our own are replaced."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sentences import Said

from commands.options.hints import hint_of
from runtime.util.errors import SpecDecError
from runtime.util.files import (
    check_output_directory,
    check_output_is_not_input,
    new_directory,
    new_file,
    read_json,
    recover_directory,
    remove_if_abandoned,
    write_file,
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


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_interruption_leaves_what_was_there(error: type[BaseException], tmp_path: Path) -> None:
    write_ours(tmp_path / "old")
    for name in ("new", "old"):
        with pytest.raises(error), new_directory(tmp_path / name, replace=True) as directory:
            (directory / "file").write_text("x")
            raise error
    assert list(tmp_path.iterdir()) == [tmp_path / "old"]
    assert (tmp_path / "old" / "old").read_text() == "x"


def test_directory_that_is_not_empty_is_refused(tmp_path: Path, said: Said) -> None:
    write_ours(tmp_path / "output")
    with pytest.raises(SpecDecError) as error:
        check_output_directory(tmp_path / "output", replace=False)
    said(error)
    said(hint_of(error.value), "`--force`")


@pytest.mark.parametrize("config", [None, "[]", "{", '{"model_type": "llama"}'])
def test_directory_of_others_is_never_replaced(config: str | None, tmp_path: Path, said: Said) -> None:
    (tmp_path / "photo.jpg").write_text("precious")
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(SpecDecError) as error:
        check_output_directory(tmp_path, replace=True)
    said(error)
    with pytest.raises(SpecDecError), new_directory(tmp_path, replace=True):
        raise AssertionError("not reached")
    assert (tmp_path / "photo.jpg").read_text() == "precious"


@pytest.mark.parametrize("kind", ["file", "link to a directory", "dangling link"])
def test_output_that_is_no_directory_is_refused(kind: str, tmp_path: Path, said: Said) -> None:
    output = tmp_path / "output"
    if kind == "file":
        output.write_text("x")
    else:
        write_ours(tmp_path / "elsewhere")
        os.symlink(tmp_path / ("elsewhere" if kind == "link to a directory" else "nowhere"), output)
    with pytest.raises(SpecDecError) as error:
        check_output_directory(output, replace=True)
    said(error)


@pytest.mark.parametrize("output", ["input", "input/../input", "."])
def test_output_that_would_replace_the_input_is_refused(output: str, tmp_path: Path, said: Said) -> None:
    (tmp_path / "input").mkdir()
    with pytest.raises(SpecDecError) as error:
        check_output_is_not_input(tmp_path / output, tmp_path / "input")
    said(error)
    check_output_is_not_input(tmp_path / "input" / "new", tmp_path / "input")
    check_output_is_not_input(tmp_path / "other", tmp_path / "input")


BAD_JSON: dict[str, bytes] = {
    "cut": b'{"a": 1',
    "bytes": b"\xff\xfe{}",
    "list": b"[1]",
    "lists": b"[" * 100_000,
    "objects": b'{"a": ' * 50_000,
    "digits": b'{"a": ' + b"9" * 5_000 + b"}",
}


@pytest.mark.parametrize("kind", ["missing", *BAD_JSON])
def test_json_that_cannot_be_read_is_one_error_that_names_its_file(kind: str, tmp_path: Path, said: Said) -> None:
    path = tmp_path / "config.json"
    write_json(path, {"a": [1, None, "ü"]})
    assert read_json(path) == {"a": [1, None, "ü"]}
    path.unlink()
    if kind in BAD_JSON:
        path.write_bytes(BAD_JSON[kind])
    with pytest.raises(SpecDecError) as error:
        read_json(path)
    said(error, path, *["list"] * (kind == "list"))


def replace_until(event: str, output: Path) -> None:
    """Replace a directory in a process of its own, which is killed at `event`."""
    script = f"""
import os, signal, sys
from pathlib import Path
import runtime.util.files
from runtime.util.files import new_directory, write_json

output, num_renames = Path({str(output)!r}), [0]
rename = Path.rename
def counted(self, target):
    result = rename(self, target)
    num_renames[0] += 1
    if {event!r} == f"rename {{num_renames[0]}}":
        os.kill(os.getpid(), signal.SIGKILL)
    return result
Path.rename = counted
with new_directory(output, replace=True) as directory:
    write_json(directory / "config.json", {{"format_version": 1}})
    (directory / "new").write_text("y")
    if {event!r} == "writing":
        os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(("event", "found"), [("writing", "old"), ("rename 1", "old"), ("rename 2", "new")])
def test_killed_replacement_is_mended_by_the_next_call(event: str, found: str, tmp_path: Path) -> None:
    """The next call reads what was there or replaces it. Nothing is left of the killed one."""
    output = tmp_path / "output"
    write_ours(output)
    replace_until(event, output)
    recover_directory(output)
    assert sorted(path.name for path in output.iterdir()) == ["config.json", found]
    with new_directory(output, replace=True) as directory:
        write_ours(directory, "newest")
    assert sorted(path.name for path in output.iterdir()) == ["config.json", "newest"]
    assert list(tmp_path.iterdir()) == [output]


def test_replacement_that_is_under_way_is_left_alone(tmp_path: Path) -> None:
    """Between its two renames, too: what others find abandoned is of processes that are no more."""
    output = tmp_path / "output"
    write_ours(output)
    with new_directory(output, replace=True) as first:
        output.rename(tmp_path / ".output.0123abcd.old")
        recover_directory(output)
        assert not output.exists()
        with new_directory(output, replace=True) as second:
            write_ours(second, "second")
        assert first.is_dir()
        write_ours(first, "first")
    assert sorted(path.name for path in output.iterdir()) == ["config.json", "first"]
    assert list(tmp_path.iterdir()) == [output]


def test_a_directory_made_anew_under_the_name_of_one_that_is_gone_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three processes: one removes what another has made and not yet locked, which makes it again; the third had opened
    the one that is gone."""
    directory, lock = tmp_path / "written", fcntl.flock

    def made_anew(descriptor: int, operation: int) -> None:
        directory.rename(tmp_path / "gone")
        directory.mkdir()
        lock(descriptor, operation)

    directory.mkdir()
    monkeypatch.setattr(fcntl, "flock", made_anew)
    remove_if_abandoned(directory)
    assert directory.is_dir()
    monkeypatch.setattr(fcntl, "flock", lock)
    remove_if_abandoned(directory)
    assert not directory.exists()


def test_killed_write_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
from runtime.util.files import new_file
with new_file(Path({str(tmp_path / "a")!r}), replace=False) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGKILL
    assert not (tmp_path / "a").exists() and list(tmp_path.iterdir())
    write_file(tmp_path / "a", b"whole")
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]
    assert (tmp_path / "a").read_bytes() == b"whole"


@pytest.fixture
def durable(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls that gave something to the disk, and that gave a file its name, in order."""
    events: list[str] = []
    fsync, rename, replace = os.fsync, Path.rename, Path.replace

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        events.append(f"written {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")

    def renamed(self: Path, target: Path) -> Path:
        events.append(f"named {target.name}")
        return rename(self, target)

    def replaced(self: Path, target: Path) -> Path:
        events.append(f"named {target.name}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(Path, "replace", replaced)
    return events


def test_directory_is_on_the_disk_before_it_has_its_name(tmp_path: Path, durable: list[str]) -> None:
    with new_directory(tmp_path / "output", replace=False) as directory:
        (directory / "a").write_text("x")
        (directory / "b").mkdir()
        (directory / "b" / "c").write_text("y")
    named = durable.index("named output")
    assert {"written a", "written b", "written c"} <= set(durable[:named])
    assert f"written {tmp_path.name}" in durable[named:]


def test_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, durable: list[str]) -> None:
    write_file(tmp_path / "a", b"x")
    with new_file(tmp_path / "b", replace=False) as temporary:
        temporary.write_text("y")
    for name in ("a", "b"):
        named = durable.index(f"named {name}")
        assert durable[named - 1] == f"written {name}"
        assert durable[named + 1] == f"written {tmp_path.name}"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is full")
def test_full_disk_names_the_file_that_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    with pytest.raises(OSError) as error:
        write_file(Path("/dev/full"), b"x")
    said(error, "'/dev/full'")
    monkeypatch.setattr(os, "fsync", lambda descriptor: none_left())
    with pytest.raises(OSError) as error:
        write_file(tmp_path / "a", b"x")
    said(error, f"'{tmp_path / 'a'}'")
    assert list(tmp_path.iterdir()) == []


def none_left() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
