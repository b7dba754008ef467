"""Files that compilers make and loaders unpack lie where nobody else can write, and go when their process does."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from sentences import Said

from runtime.util.errors import SpecDecError
from runtime.util.temporary import own_temporary_files, temporary_dir


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


def in_process(code: str, parent: Path) -> subprocess.CompletedProcess[str]:
    script = f"import os, signal, sys\nfrom runtime.util.temporary import *\n{code}"
    return subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(parent)}, capture_output=True, text=True
    )


def test_directory_is_its_owners_alone(parent: Path) -> None:
    directory = temporary_dir()
    assert directory.parent == parent and directory.stat().st_mode & 0o777 == 0o700
    assert temporary_dir() == directory


def test_directory_goes_with_its_process(parent: Path) -> None:
    """A fork leaves it: it does not own it."""
    code = "print(temporary_dir(), flush=True)\npid = os.fork()\nif not pid: sys.exit()\n"
    code += "os.waitpid(pid, 0)\nprint(temporary_dir().is_dir())"
    done = in_process(code, parent)
    made, is_there = done.stdout.split()
    assert Path(made).parent == parent and is_there == "True", done.stderr
    assert list(parent.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_nothing_else(parent: Path) -> None:
    mine = temporary_dir()
    done = in_process("(temporary_dir() / 'a').mkdir()\nos.kill(os.getpid(), signal.SIGKILL)", parent)
    assert done.returncode == -signal.SIGKILL
    left = set(parent.iterdir()) - {mine}
    assert len(left) == 1
    (parent / "specdec.other").mkdir()
    in_process("temporary_dir()", parent)
    assert set(parent.iterdir()) == {mine, parent / "specdec.other"}


def test_link_in_its_place_is_not_followed(parent: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "photo").touch()
    (parent / "specdec.work.0123").symlink_to(tmp_path / "precious")
    temporary_dir()
    assert (tmp_path / "precious" / "photo").is_file()


def test_parent_in_which_others_may_replace_files_is_refused(parent: Path, said: Said) -> None:
    parent.chmod(0o777)
    with pytest.raises(SpecDecError) as error:
        temporary_dir()
    said(error, parent)
    parent.chmod(0o1777)
    assert temporary_dir().is_dir()


def test_inductor_keeps_everything_in_it(parent: Path) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

    names = ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    before = [os.environ.get(name) for name in names]
    with own_temporary_files():
        places = [cache_dir(), triton_cache_dir(0), tempfile.mkdtemp()]
    assert [os.environ.get(name) for name in names] == before and tempfile.gettempdir() == str(parent)
    assert all(Path(place).is_relative_to(temporary_dir()) for place in places), places
