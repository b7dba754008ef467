"""The database of blocks, against a list of all texts that were written."""

import contextlib
import errno
import fcntl
import itertools
import os
import random
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentences import Said

from runtime.core.block_store import FILE, BlockStore, Damaged, Unwritable, as_bytes
from runtime.util.errors import SpecDecError

SIZE, REPEATS = 2, 100
"""Tokens of a block, and how often its bytes say what it is."""


def data_of(salt: str | None, tokens: tuple[int, ...]) -> bytes:
    """Bytes that depend on the owner and all tokens, as keys and values do; most of the file is of them."""
    return repr((salt, tokens)).encode() * REPEATS


def write(store: BlockStore, salt: str | None, tokens: list[int], engine: str = "engine") -> None:
    """Write a text as an engine does: what is missing, behind what is there."""
    owner = store.make_owner(engine, salt, "tiny")
    found = store.find(owner, tokens, SIZE)
    known = [record for record in found.records if record.is_whole and record.end % SIZE == 0]
    if found.num_tokens == len(tokens):
        return
    ends = [*range(SIZE, len(tokens), SIZE), len(tokens)]
    blocks = [
        (as_bytes(tokens[(end - 1) // SIZE * SIZE : end]), {"kv": data_of(salt, tuple(tokens[:end]))})
        for end in ends[len(known) :]
    ]
    store.write(owner, [record.id for record in known], blocks, known[-1].path if known else owner.path)


def longest(store: BlockStore, salt: str | None, tokens: list[int], engine: str = "engine") -> tuple[int, bool]:
    """Number of first tokens that are found, each with what was written for it; and whether all could be read."""
    found, are_whole = store.find(store.owner(engine, salt), tokens, SIZE), True
    for record in found.records:
        parts = store.read(record, ["kv"])
        are_whole &= parts is not None
        data = (parts or {}).get("kv", b"")
        said = data[: len(data) // REPEATS]
        assert said * REPEATS == data
        assert not parts or said.startswith(repr((salt, tuple(tokens[: record.end])))[:-2].rstrip(",").encode())
    return found.num_tokens, are_whole


def num_common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


texts = st.lists(st.tuples(st.sampled_from([None, "a"]), st.lists(st.integers(0, 1), min_size=1, max_size=7)))


def test_what_has_most_first_tokens_in_common_is_found(tmp_path: Path) -> None:
    """Each example has an engine of its own, whose texts no other engine finds."""
    store, other = BlockStore(tmp_path), BlockStore(tmp_path)
    store._db.execute("PRAGMA synchronous=OFF")  # nothing is unplugged here, and it takes no time
    numbers = itertools.count()

    @settings(max_examples=60)
    @given(texts, texts)
    def is_found(written: list[tuple[str | None, list[int]]], asked: list[tuple[str | None, list[int]]]) -> None:
        engine = f"engine {next(numbers)}"
        for salt, tokens in written:
            write(store, salt, tokens, engine)
        for salt, tokens in [*asked, *written]:
            expected = max((num_common(tokens, one) for whose, one in written if whose == salt), default=0)
            assert longest(other, salt, tokens, engine) == (expected, True)

    is_found()
    store.close()
    other.close()


def test_the_oldest_goes_first_and_the_size_is_kept(tmp_path: Path) -> None:
    store = BlockStore(tmp_path, 1 << 20)
    store._db.execute("PRAGMA synchronous=OFF")
    kept = [[100 * i + j for j in range(12)] for i in range(120)]
    for tokens in kept:
        owner = store.make_owner("engine", None, "tiny")
        blocks = [(as_bytes(tokens[i : i + SIZE]), {"kv": bytes(7000)}) for i in range(0, 12, SIZE)]
        assert len(store.write(owner, [], blocks, owner.path)) == 6
        assert store.num_bytes <= store.path.stat().st_size <= 1 << 20
    lengths = [store.find(owner, tokens, SIZE).num_tokens for tokens in kept]
    # All of the last ones, then perhaps one in part, whose first blocks stay; nothing before.
    assert lengths == sorted(lengths) and lengths[0] == 0 and lengths[-1] == 12
    assert sum(0 < length < 12 for length in lengths) <= 1
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    assert store.prune(1 << 19) > 0 and store.num_bytes <= 1 << 19
    assert store.path.stat().st_size <= 1 << 19
    assert store.find(owner, kept[-1], SIZE).num_tokens == 12
    store.close()


def test_a_damaged_file_gives_out_what_was_written_or_nothing(tmp_path: Path) -> None:
    kept = [[i % 2, *(i * j % 7 for j in range(5))] for i in range(30)]
    store = BlockStore(tmp_path / "whole")
    for tokens in kept:
        write(store, None, tokens)
    store.close()
    whole = (tmp_path / "whole" / FILE).read_bytes()
    for seed in range(60):
        rng = random.Random(seed)
        data = bytearray(whole)
        if seed % 3 == 0:
            del data[rng.randrange(len(data)) :]
        else:
            for _ in range(rng.choice([1, 20])):
                at = rng.randrange(len(data))
                data[at : at + (1 if seed % 3 == 1 else 500)] = rng.randbytes(1 if seed % 3 == 1 else 500)
        directory = tmp_path / str(seed)
        directory.mkdir()
        (directory / FILE).write_bytes(data)
        try:
            damaged = BlockStore(directory)
        except SpecDecError:
            continue
        with contextlib.suppress(Damaged, Unwritable):
            assert all(one.num_bytes >= 0 and one.used_s > 0 for one in damaged.engines())
            assert damaged.num_bytes >= 0 and damaged.max_bytes > 0
        for tokens in kept:
            try:
                longest(damaged, None, tokens)
            except (Damaged, Unwritable):
                damaged.renew()
                write(damaged, None, tokens)
                assert longest(damaged, None, tokens) == (len(tokens), True)
        damaged.close()


def no_locks(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)


def another_user(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(directory, 12345, -1)


def another_version(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    BlockStore(directory).close()
    with sqlite3.connect(directory / FILE) as database:
        database.execute("PRAGMA user_version=2")


def another_database(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sqlite3.connect(directory / FILE) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE bookmarks(url)")
    database.close()


def another_file(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / FILE).write_bytes(b"hello")


def writable_by_others(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.chmod(0o777)


def a_pipe(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(directory / FILE)


def a_file(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.rmdir()
    directory.touch()


@pytest.mark.parametrize(
    "make",
    [no_locks, another_user, another_version, another_database, another_file, writable_by_others, a_file, a_pipe],
)
def test_a_directory_that_cannot_be_used_is_one_sentence(
    make: Callable[[Path, pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    if make is another_user and os.getuid():
        pytest.skip("only root gives a directory to another user")
    directory = tmp_path / "kv"
    directory.mkdir()
    make(directory, monkeypatch)
    path = directory / FILE
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(SpecDecError) as raised:
        BlockStore(directory)
    said(raised, directory)
    assert before is None or path.read_bytes() == before


def test_what_only_reads_leaves_a_damaged_file(tmp_path: Path) -> None:
    store = BlockStore(tmp_path)
    write(store, None, [1, 2, 3])
    store.close()
    data = bytearray((tmp_path / FILE).read_bytes())
    data[data.index(b"CREATE") + 2] = 0x9C  # no UTF-8: SQLite's own message cannot be read either
    (tmp_path / FILE).write_bytes(data)
    with pytest.raises(Damaged, match="not of its kind"):
        BlockStore(tmp_path, renews=False)
    assert (tmp_path / FILE).read_bytes() == data
    store = BlockStore(tmp_path)
    assert store.was_damaged and not store.engines()
    store.close()
