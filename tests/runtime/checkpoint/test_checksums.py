"""Kept digests are believed only where they are whole, and what is replaced while it is opened is an error."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from sentences import Said

from runtime.checkpoint.bundle import check_step_files, read_bundle
from runtime.engine.engine import Engine
from runtime.text.text import open_tokenizer
from runtime.util import digests
from runtime.util.cache import cache_dir
from runtime.util.digests import file_digest, read_digest
from runtime.util.errors import SpecDecError


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Path]]:
    """The files that digests are kept in, from now on in a cache of its own and for files of this moment too."""
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "_TIME_STEP_NS", -1)
    monkeypatch.setattr(digests, "_seen", {})
    return lambda: sorted((cache_dir() / "digests").glob("*"))


@pytest.mark.parametrize(
    "damage",
    [lambda kept: b"", lambda kept: kept[:40], lambda kept: bytes([kept[0] ^ 1]) + kept[1:], lambda kept: b"\xff"],
    ids=["empty", "cut", "one bit", "no text"],
)
def test_a_damaged_kept_digest_is_made_again(
    damage: Callable[[bytes], bytes], kept: Callable[[], list[Path]], tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"content")
    expected = hashlib.sha256(b"content").hexdigest()
    assert file_digest(tmp_path / "file") == expected
    (path,) = kept()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    digests._seen.clear()  # as in another process
    assert file_digest(tmp_path / "file") == expected
    assert path.read_bytes() == whole


def test_digests_of_pieces_are_of_those_bytes_in_their_order(kept: Callable[[], list[Path]], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    expected = hashlib.sha256(b"678" + b"12").hexdigest()
    assert read_digest(tmp_path / "file", [(6, 9), (1, 3)]) == expected
    assert file_digest(tmp_path / "file", [(6, 9), (1, 3)]) == expected
    assert file_digest(tmp_path / "file") == hashlib.sha256(b"0123456789").hexdigest()
    assert len(kept()) == 2


def test_engine_that_is_replaced_while_it_is_opened_is_an_error(
    llama_engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """Replaced as by `build --force`: the directory is renamed away, and another of the same files takes its place."""
    engine_dir = shutil.copytree(llama_engine_dir, tmp_path / "engine")
    shutil.copytree(engine_dir, tmp_path / "new")

    def check_and_replace(bundle: object) -> None:
        check_step_files(read_bundle(engine_dir))
        engine_dir.rename(tmp_path / "old")
        (tmp_path / "new").rename(engine_dir)

    monkeypatch.setattr("runtime.engine.engine.check_step_files", check_and_replace)
    with pytest.raises(SpecDecError) as error:
        Engine.open(engine_dir)
    said(error)


def test_configuration_that_was_read_before_is_looked_at_again(
    llama_engine_dir: Path, tmp_path: Path, said: Said
) -> None:
    """Its digest is kept by its text, and not by its name, size and times, which stay the same here."""
    engine_dir = shutil.copytree(llama_engine_dir, tmp_path / "engine")
    path = engine_dir / "config.json"
    text, stat = path.read_text(), path.stat()
    for _ in range(2):
        read_bundle(engine_dir)
        path.write_text(text.replace('"attention_bias": true', '"attention_bias": null'))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert path.read_text() != text and path.stat().st_size == stat.st_size
        with pytest.raises(SpecDecError) as error:
            read_bundle(engine_dir)
        said(error, "config.json", "digest")
        path.write_text(text)


@pytest.mark.parametrize("source", ["llama_engine_dir", "llama_checkpoint_dir"])
def test_tokenizer_named_by_itself_is_compared_too(
    source: str, request: pytest.FixtureRequest, tmp_path: Path, said: Said
) -> None:
    directory = shutil.copytree(request.getfixturevalue(source), tmp_path / "copy")
    open_tokenizer(directory)
    path = directory / "tokenizer_config.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(SpecDecError) as error:
        open_tokenizer(directory)
    said(error, "tokenizer_config.json")
