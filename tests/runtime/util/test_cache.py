"""Entries of the cache were put there by its user, and stand for the files as they are now."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sentences import Said
from waiting import HANG_S

from runtime.util import digests as digests_module
from runtime.util.cache import (
    OF_ALL_TO_READ,
    cache_dir,
    check_private_entry,
    make_cache_dir,
    make_private,
    read_sealed,
    sealed,
)
from runtime.util.digests import digest, file_digest
from runtime.util.errors import SpecDecError
from runtime.util.files import Stamp, stamp_of, write_file

LARGE = 1 << 20
ROOT = Path(__file__).parents[3]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "above" / "cache"))
    monkeypatch.setattr(digests_module, "_seen", {})
    monkeypatch.setattr(digests_module, "_TIME_STEP_NS", 0)  # `write_settled` sees to it
    return tmp_path / "above" / "cache"


def be_another_process() -> None:
    """Forget the files that this process has seen."""
    digests_module._seen.clear()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_settled(path: Path, content: bytes) -> None:
    """Written so that its digest is kept: whatever is written next is dated later."""
    path.write_bytes(content)
    probe = path.with_name("probe")
    while not probe.exists() or probe.stat().st_ctime_ns == path.stat().st_ctime_ns:  # a step of the files' clock
        probe.write_bytes(b"")
    probe.unlink()


@pytest.mark.parametrize("mode", [0o702, 0o720, 0o1777])
def test_cache_that_others_may_write_into_is_refused(mode: int, cache: Path, tmp_path: Path, said: Said) -> None:
    make_cache_dir().chmod(mode)
    (tmp_path / "file").write_bytes(bytes(LARGE))
    for use in (cache_dir, make_cache_dir, lambda: file_digest(tmp_path / "file")):
        with pytest.raises(SpecDecError) as error:
            use()
        said(error, cache)
    assert list(cache.iterdir()) == []


def test_part_that_others_may_write_into_is_refused(cache: Path, tmp_path: Path, said: Said) -> None:
    make_cache_dir().chmod(0o755)
    part = cache / "engines"
    part.mkdir()
    part.chmod(0o777)
    for use in (cache_dir, make_cache_dir):
        with pytest.raises(SpecDecError) as error:
            use()
        said(error, part)
    cache.chmod(0o700)  # so that nobody else gets there, whatever the umask was
    assert cache_dir() == cache
    part.rename(tmp_path / "elsewhere")
    part.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SpecDecError) as error:
        cache_dir()
    said(error, part)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("is_link", [False, True], ids=["directory", "link"])
def test_part_of_another_user_is_refused(is_link: bool, cache: Path, tmp_path: Path, said: Said) -> None:
    place = tmp_path / "elsewhere" if is_link else make_cache_dir() / "digests"
    place.mkdir()
    os.chown(place, 12345, -1)
    if is_link:
        (make_cache_dir() / "digests").symlink_to(place)
    with pytest.raises(SpecDecError) as error:
        cache_dir()
    said(error, "12345")


def test_digest_is_kept_and_found_under_another_name(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    path = tmp_path / "model" / "file"
    write_settled(path, os.urandom(LARGE))
    expected = sha256(path)
    assert file_digest(path) == expected
    (kept,) = (cache / "digests").iterdir()
    kept.write_text(f"{'a' * 64} {digest([kept.name, 'a' * 64])}")
    (tmp_path / "model").rename(tmp_path / "renamed")
    be_another_process()
    assert file_digest(tmp_path / "renamed" / "file") == "a" * 64  # it was found, and not read again


def test_file_that_this_process_has_seen_is_not_opened_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read first, or found in the cache; under another name too. Other pieces of it are."""
    (tmp_path / "model").mkdir()
    path = tmp_path / "model" / "file"
    write_settled(path, os.urandom(LARGE))
    expected = sha256(path)
    assert file_digest(path) == expected
    be_another_process()
    assert file_digest(path) == expected
    path = (tmp_path / "model").rename(tmp_path / "renamed") / "file"

    def refuse(path: Path, mode: str = "r") -> None:
        raise AssertionError(f"opened: {path}")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        assert file_digest(path) == expected
        with pytest.raises(AssertionError, match="opened"):
            file_digest(path, [(1, 3)])
    write_settled(path, bytes(LARGE))
    assert file_digest(path) == sha256(path) != expected


def test_what_a_killed_process_has_left_among_kept_digests_is_removed_with_the_next_one(
    cache: Path, tmp_path: Path
) -> None:
    """Killed when the digest was there already, so that nobody writes it again."""
    (make_cache_dir() / "digests" / f".{'0' * 64}.0123abcd.tmp").mkdir(parents=True)
    write_settled(tmp_path / "file", os.urandom(LARGE))
    file_digest(tmp_path / "file")
    (kept,) = (cache / "digests").iterdir()
    assert kept.is_file()


@pytest.mark.parametrize("num_bytes", [1000, LARGE])
def test_file_rewritten_in_place_with_its_time_kept_has_another_digest(
    num_bytes: int, cache: Path, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    write_settled(path, bytes(num_bytes))
    before, stat = file_digest(path), path.stat()
    with path.open("r+b") as file:
        file.seek(num_bytes // 3 + 7)
        file.write(b"x")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_mtime_ns == stat.st_mtime_ns and path.stat().st_size == num_bytes
    assert file_digest(path) == sha256(path) != before


def test_digest_of_a_file_just_written_is_not_kept(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be written once more in the same step of the clock, here an hour; the digest is right nonetheless."""
    step_ns = 3600 * 10**9

    def in_steps(state: os.stat_result) -> Stamp:
        stamp = stamp_of(state)
        return stamp._replace(**{name: getattr(stamp, name) // step_ns * step_ns for name in ("mtime_ns", "ctime_ns")})

    monkeypatch.setattr(digests_module, "_TIME_STEP_NS", 2 * step_ns)
    monkeypatch.setattr(digests_module, "stamp_of", in_steps)
    path = tmp_path / "file"
    for i in range(3):
        path.write_bytes(bytes([i]) * LARGE)
        assert file_digest(path) == sha256(path)


def test_no_end_of_a_process_waits_for_a_digest_that_was_begun(tmp_path: Path) -> None:
    """A mistake may be found meanwhile, and this file would take hours."""
    with (tmp_path / "large").open("wb") as file:
        file.truncate(4 << 40)
    code = "import sys\nfrom pathlib import Path\nfrom runtime.util.digests import begin_digests, is_digest_awaited\n"
    code += "begin_digests([Path(sys.argv[1])])\nassert is_digest_awaited()"
    subprocess.run([sys.executable, "-c", code, tmp_path / "large"], cwd=ROOT, check=True, timeout=HANG_S)


def kept_file(cache: Path, kind: str) -> tuple[Path, Callable[[], object]]:
    """A file of the cache, and what reads it."""
    make_cache_dir()

    def reread() -> str:
        be_another_process()
        return file_digest(cache.parent / "file")

    if kind == "digest":
        write_settled(cache.parent / "file", bytes(LARGE))
        file_digest(cache.parent / "file")
        (path,) = (cache / "digests").iterdir()
        be_another_process()
        return path, reread
    if kind == "engine":
        path = cache / "engines" / "model-0123" / "step" / "wrapper.so"
        path.parent.mkdir(parents=True, mode=0o700)
        path.write_bytes(b"code")
        return path, lambda: check_private_entry(path.parents[1])
    path = cache / {"kernels": "kernels-0123.so", "costs": "engines/model-0123.costs"}[kind]
    path.parent.mkdir(exist_ok=True, mode=0o700)
    write_file(path, sealed(b"code"), OF_ALL_TO_READ)
    return path, lambda: read_sealed(path)


KINDS = ["digest", "engine", "kernels", "costs"]


@pytest.mark.parametrize("kind", KINDS)
def test_file_that_all_may_write_is_refused(kind: str, cache: Path, said: Said) -> None:
    path, read = kept_file(cache, kind)
    read()
    path.chmod(0o602)
    with pytest.raises(SpecDecError) as error:
        read()
    said(error, path)


@pytest.mark.parametrize("kind", KINDS)
def test_file_that_a_group_may_write_is_refused_where_it_can_get_there(kind: str, cache: Path) -> None:
    path, read = kept_file(cache, kind)
    path.chmod(0o664)
    read()  # nobody else gets through a cache of mode 0700
    cache.chmod(0o755)
    with pytest.raises(SpecDecError, match="other users may write"):
        read()
    cache.chmod(0o700)
    os.link(path, cache.parent / "another name")
    with pytest.raises(SpecDecError, match="other users may write"):
        read()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("kind", KINDS)
def test_file_of_another_user_is_refused(kind: str, cache: Path, said: Said) -> None:
    path, read = kept_file(cache, kind)
    os.chown(path, 12345, -1)
    with pytest.raises(SpecDecError) as error:
        read()
    said(error, "12345", path)


def test_files_are_written_for_their_user_alone_whatever_the_umask(cache: Path) -> None:
    before = os.umask(0)
    try:
        for kind in ("digest", "kernels", "costs"):
            path, read = kept_file(cache, kind)
            read()
            assert path.stat().st_mode & 0o777 == OF_ALL_TO_READ
            shutil.rmtree(cache)
        path, read = kept_file(cache, "engine")
        with pytest.raises(SpecDecError):
            read()
        make_private(path.parents[1])
        read()
    finally:
        os.umask(before)
