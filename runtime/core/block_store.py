"""Blocks of keys and values in a directory: an index and bytes, which processes share and which outlive them.

The directory holds a database of SQLite. A record is a block of tokens, below the record of the block before it. Like a
block in memory it is found by the tokens themselves, from the beginning of the sequence, and not by a hash. Records
belong to an engine and to an owner (`Request.cache_salt`). A record has parts: the bytes of keys and values, of a head,
of states. Each part has a checksum over all tokens up to its end and over its bytes; a part that does not match is not
returned.

SQLite is in Python, is crash-safe, and reads by calls: a file that is cut off or written over is an error there. LMDB
reads 2 times as fast, and by a mapping: the same file ends the process by SIGBUS.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import sqlite3
import time
import zlib
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime.util.errors import SpecDecError
from runtime.util.files import make_private_directory

FILE = "kv.sqlite"
STATE = "state"
"""Name of the part with states of layers without attention, as they are after the record's tokens."""
_LOCK = "lock"
_HEADER = b"SQLite format 3\0"
_FORMAT, _APPLICATION = 1, 0x7370_6B76
_PAGE_BYTES = 1 << 14
_SPARE_PAGES = 16
_TOKEN_BYTES = 4
_BUSY_S, _WRITER_BUSY_S = 1.0, 20.0
_AT_ONCE = 16
_PRAGMAS = (
    *("cell_size_check=ON", "mmap_size=0", "journal_mode=TRUNCATE", "synchronous=NORMAL"),
    *("cache_spill=OFF", "cache_size=-4000"),
)
_TABLES = """
CREATE TABLE settings(name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE owners(id INTEGER PRIMARY KEY AUTOINCREMENT, engine TEXT NOT NULL, owner TEXT NOT NULL,
    model TEXT NOT NULL, UNIQUE(engine, owner));
CREATE TABLE blocks(id INTEGER PRIMARY KEY AUTOINCREMENT, owner INTEGER NOT NULL, parent INTEGER NOT NULL,
    tokens BLOB NOT NULL, depth INTEGER NOT NULL, used INTEGER NOT NULL, UNIQUE(owner, parent, tokens));
CREATE INDEX oldest ON blocks(used, depth DESC);
CREATE TABLE parts(block INTEGER NOT NULL, name TEXT NOT NULL, checksum INTEGER NOT NULL, data BLOB NOT NULL,
    UNIQUE(block, name));
"""


class Damaged(Exception):
    """The database, or a record in it, has other content than was written."""


class Unwritable(Exception):
    """Nothing can be written any more; the exception's text is the reason."""


Bytes = bytes | memoryview


@dataclass(frozen=True)
class Owner:
    """An engine's records that belong to one owner. `id` is 0 if there are none yet."""

    id: int
    path: int
    """Checksum from which the checksums of the owner's records continue."""


@dataclass(frozen=True)
class Record:
    """A block on disk whose first tokens are a sequence's from `start` to `end` - 1."""

    id: int
    start: int
    end: int
    path: int
    """Checksum over the owner and all tokens up to the end of the record."""
    is_whole: bool
    """True if all tokens of the record are the sequence's."""


@dataclass(frozen=True)
class FoundRecords:
    """Records that hold a sequence's first tokens, and records with states after some of these tokens."""

    records: list[Record]
    states: list[Record]

    @property
    def num_tokens(self) -> int:
        return self.records[-1].end if self.records else 0


@dataclass(frozen=True)
class StoredEngine:
    """The K/V in a directory that belong to one engine."""

    digest: str
    model: str
    num_owners: int
    num_bytes: int
    used_s: float


def as_bytes(tokens: Seq[int]) -> bytes:
    """Tokens as bytes, 4 each, that sort in the same order as the tokens."""
    return np.asarray(tokens, ">i4").tobytes()


def owner_name(salt: str | None) -> str:
    """Name of an owner on disk, from which the salt cannot be read."""
    return "" if salt is None else hashlib.blake2b(salt.encode(), digest_size=24, person=b"specdec-kv").hexdigest()


class BlockStore:
    """A connection to a directory, for one thread at a time.

    `max_bytes` None keeps the limit that the directory was given last, or else `usual_bytes`. With `renews` a damaged
    database is replaced by an empty one; otherwise Damaged is raised. Opening raises SpecDecError for a fault that a
    user must mend, such as a file that is no database of specdec's, which stays as it is. Later methods raise Damaged,
    Unwritable, or, if another process writes for too long, TimeoutError.
    """

    def __init__(
        self, directory: Path, max_bytes: int | None = None, *, usual_bytes: int = 20 * 10**9, renews: bool = True
    ) -> None:
        self.directory, self._given, self._usual = directory, max_bytes, usual_bytes
        self.path = directory / FILE
        self.other_limit: int | None = None
        """Limit that the directory had before, if it is given another one now."""
        self.is_read_only = False
        self.was_damaged = False
        """True if the database could not be read and was replaced."""
        make_private_directory(directory)
        try:
            self._open()
        except Damaged:
            if not renews:
                self._db.close()
                raise
            self.renew()
            self.was_damaged = True

    def close(self) -> None:
        self._db.close()

    def _open(self) -> None:
        self._check_locks()
        try:  # readable by its user alone, before SQLite makes it with the umask
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except OSError as error:
            if not self.path.is_file():
                why = "no regular file" if isinstance(error, FileExistsError) else error.strerror
                raise self._cannot_open(f"{self.path.name}: {why}") from None
        self.is_read_only = not os.access(self.path, os.W_OK)
        mode = "ro" if self.is_read_only else "rw"
        try:
            self._db = sqlite3.connect(
                f"{self.path.absolute().as_uri()}?mode={mode}",
                uri=True,
                isolation_level=None,
                check_same_thread=False,
                timeout=_WRITER_BUSY_S,
            )
        except sqlite3.Error as error:
            raise self._cannot_open(str(error)) from None
        self._inode = os.stat(self.path).st_ino
        try:
            self._set_up()
        except Damaged:
            if not self._begins_as_database():
                self._db.close()
                raise self._not_ours() from None
            raise

    def _set_up(self) -> None:
        try:
            with self._errors():
                self._check_is_ours(or_empty=True)  # before anything is changed
                at_first = () if self.is_read_only else (f"page_size={_PAGE_BYTES}", "auto_vacuum=INCREMENTAL")
                for pragma in (*at_first, *_PRAGMAS):
                    self._db.execute(f"PRAGMA {pragma}")
                if not self.is_read_only:
                    self._make_tables()
                self._check_is_ours()
                self._settle_limit()
                self._page_bytes = int(self._one("PRAGMA page_size"))
                self._db.execute(f"PRAGMA busy_timeout={int(_BUSY_S * 1000)}")
        except (Unwritable, TimeoutError) as error:
            raise self._cannot_open(str(error)) from None

    def _begins_as_database(self) -> bool:
        """True for a file of SQLite, cut off or not. Only if SQLite cannot read it: closing the file drops locks."""
        with self.path.open("rb") as file:
            return _HEADER.startswith(file.read(len(_HEADER)))

    def _check_locks(self) -> None:
        """SpecDecError on a file system on which processes cannot lock shared files."""
        try:
            with self._locked():
                pass
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                raise SpecDecError(
                    f"the file system has no locks, by which processes share keys and values: {self.directory}",
                    hint="name a directory on a local disk",
                ) from None
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise self._cannot_open(error.strerror or str(error)) from None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the directory within the block against other processes that would replace the database."""
        descriptor = os.open(self.directory / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _make_tables(self) -> None:
        if self._one("PRAGMA application_id") == _APPLICATION:
            return
        with self._transaction():
            is_new = self._one("SELECT count(*) FROM sqlite_master") == 0
            if is_new and self._one("PRAGMA application_id") == 0:
                for statement in _TABLES.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA application_id={_APPLICATION}")
                self._db.execute(f"PRAGMA user_version={_FORMAT}")

    def _check_is_ours(self, *, or_empty: bool = False) -> None:
        if self._one("PRAGMA application_id") != _APPLICATION:
            if or_empty and self._one("SELECT count(*) FROM sqlite_master") == 0:
                return
            raise self._not_ours()
        if (version := self._one("PRAGMA user_version")) != _FORMAT:
            raise SpecDecError(
                f"another version of specdec wrote these keys and values (format {version}, this one reads {_FORMAT}): "
                f"{self.directory}",
                hint="name another directory, or remove this one",
            )

    def _settle_limit(self) -> None:
        """Store or read the limit: the limit that was given last holds for all processes."""
        if self.is_read_only:
            return
        known = self._db.execute("SELECT value FROM settings WHERE name='max_bytes'").fetchone()
        if self._given is not None and known is not None and known[0] != self._given:
            self.other_limit = known[0]
        if known is None or self.other_limit is not None:
            limit = self._usual if self._given is None else self._given
            self._db.execute("INSERT OR REPLACE INTO settings VALUES('max_bytes', ?)", (limit,))

    @property
    def max_bytes(self) -> int:
        """The limit that holds now."""
        with self._errors():
            return int(self._one("SELECT value FROM settings WHERE name='max_bytes'"))

    def _not_ours(self) -> SpecDecError:
        return SpecDecError(
            f"this is no database of specdec's keys and values: {self.path}", hint="name another directory"
        )

    def _cannot_open(self, why: str) -> SpecDecError:
        return SpecDecError(
            f"the keys and values on disk cannot be opened ({why}): {self.directory}",
            hint="name another directory",
        )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn SQLite's errors into ours: Damaged, Unwritable, or TimeoutError while another process writes."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code == sqlite3.SQLITE_BUSY:
                raise TimeoutError("another process is writing") from None
            if code == sqlite3.SQLITE_FULL:
                raise Unwritable("the disk is full") from None
            if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
                raise Unwritable("it is read-only") from None
            if code == sqlite3.SQLITE_IOERR:
                raise Unwritable(str(error)) from None
            raise Damaged(str(error)) from None  # not a database, malformed, a table that is missing
        except (ValueError, TypeError, OverflowError):  # text or bytes where a number was written, no UTF-8
            raise Damaged("a value in it is not of its kind") from None

    def is_replaced(self) -> bool:
        """True if the directory no longer has the database that this connection has open."""
        try:
            return os.stat(self.path).st_ino != self._inode
        except OSError:
            return True

    def reopen(self) -> None:
        """Open the database that the directory has now."""
        self._db.close()
        make_private_directory(self.directory)
        self._open()

    def renew(self) -> None:
        """Replace the database by an empty one, unless another process has done so."""
        inode = getattr(self, "_inode", None)
        with contextlib.suppress(AttributeError, sqlite3.Error):
            self._db.close()
        with contextlib.suppress(OSError), self._locked():
            if os.stat(self.path).st_ino == inode:
                for path in (self.path, self.path.with_name(f"{FILE}-journal")):
                    path.unlink(missing_ok=True)
        try:
            self._open()
        except Damaged as error:
            raise self._cannot_open(str(error)) from None

    def _one(self, query: str, *values: object) -> int:
        row = self._db.execute(query, values).fetchone()
        if row is None:
            raise Damaged(f"no row: {query}")
        return row[0]  # type: ignore[no-any-return]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The database, for tables of other modules; errors are raised as this class's."""
        with self._errors():
            yield self._db

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction that waits for other processes that write."""
        with self._errors():
            self._db.execute(f"PRAGMA busy_timeout={int(_WRITER_BUSY_S * 1000)}")
            with self._transaction():
                yield

    @contextmanager
    def writing(self, num_bytes: int) -> Iterator[sqlite3.Connection]:
        """The database in a transaction, with room for `num_bytes`. Unwritable if there is no room."""
        with self._writing():
            if not self._make_room(num_bytes, time.time_ns()):
                raise Unwritable("the limit is too small")
            yield self._db

    def owner(self, engine: str, salt: str | None) -> Owner:
        """The records of an owner for an engine."""
        name = owner_name(salt)
        with self._errors():
            row = self._db.execute("SELECT id FROM owners WHERE engine=? AND owner=?", (engine, name)).fetchone()
        return Owner(0 if row is None else row[0], zlib.crc32(f"{engine} {name}".encode()))

    def make_owner(self, engine: str, salt: str | None, model: str) -> Owner:
        """The owner, as `owner` gives it, made if it did not exist. `model` is the model's name for people."""
        owner = self.owner(engine, salt)
        if owner.id:
            return owner
        with self._errors(), self._transaction():
            self._db.execute(
                "INSERT OR IGNORE INTO owners(engine, owner, model) VALUES(?, ?, ?)", (engine, owner_name(salt), model)
            )
        return self.owner(engine, salt)

    def find(self, owner: Owner, tokens: Seq[int], block_size: int, *, with_states: bool = False) -> FoundRecords:
        """Records of the first of these tokens: whole blocks, then the block that shares most first tokens with the
        rest. `with_states`: also records with states, after any number of these tokens.
        """
        key, width = as_bytes(tokens), block_size * _TOKEN_BYTES
        records, states, parent, path = list[Record](), list[Record](), 0, owner.path
        with self._errors():
            for at in range(0, len(key), width) if owner.id else ():
                wanted, start = key[at : at + width], at // _TOKEN_BYTES
                if with_states:
                    states += self._with_state(owner, parent, path, wanted, start)
                block = self._id_of(owner, parent, wanted) if len(wanted) == width else None
                if block is None:
                    records += self._longest(owner, parent, path, wanted, start)
                    break
                parent, path = block, zlib.crc32(wanted, path)
                records.append(Record(block, start, start + block_size, path, True))
        return FoundRecords(records, states)

    def _id_of(self, owner: Owner, parent: int, tokens: bytes) -> int | None:
        row = self._db.execute(
            "SELECT id FROM blocks WHERE owner=? AND parent=? AND tokens=?", (owner.id, parent, tokens)
        ).fetchone()
        return None if row is None else row[0]

    def _longest(self, owner: Owner, parent: int, path: int, wanted: bytes, start: int) -> list[Record]:
        """A list of the record below `parent` that shares most first tokens with `wanted`; empty if no record shares
        any. Among sorted texts, the text that shares most with another stands right before or behind it.
        """
        best: list[Record] = []
        for side, order in (("<=", "DESC"), (">=", "ASC")):
            row = self._db.execute(
                f"SELECT id, tokens FROM blocks WHERE owner=? AND parent=? AND tokens{side}? ORDER BY tokens {order} "
                "LIMIT 1",
                (owner.id, parent, wanted),
            ).fetchone()
            if row is None:
                continue
            num_matched = _num_common(row[1], wanted)
            if num_matched > (best[0].end - start if best else 0):
                is_whole = num_matched * _TOKEN_BYTES == len(row[1])
                best = [Record(row[0], start, start + num_matched, zlib.crc32(row[1], path), is_whole)]
        return best

    def _with_state(self, owner: Owner, parent: int, path: int, wanted: bytes, start: int) -> list[Record]:
        """Records below `parent` that have states and whose tokens are the first of `wanted`, the shortest first."""
        beginnings = [wanted[:end] for end in range(_TOKEN_BYTES, len(wanted) + 1, _TOKEN_BYTES)]
        rows = self._db.execute(
            "SELECT blocks.id, tokens FROM blocks JOIN parts ON block=blocks.id AND name=? "
            f"WHERE owner=? AND parent=? AND tokens IN ({','.join('?' * len(beginnings))}) ORDER BY tokens",
            (STATE, owner.id, parent, *beginnings),
        ).fetchall()
        return [
            Record(block, start, start + len(tokens) // _TOKEN_BYTES, zlib.crc32(tokens, path), True)
            for block, tokens in rows
        ]

    def read(self, record: Record, names: Seq[str]) -> dict[str, bytes] | None:
        """The bytes of these parts; None if one is missing, Damaged if one does not match its checksum."""
        with self._errors():
            rows = self._db.execute(
                f"SELECT name, checksum, data FROM parts WHERE block=? AND name IN ({','.join('?' * len(names))})",
                (record.id, *names),
            ).fetchall()
        for name, checksum, data in rows:
            if not isinstance(data, bytes) or _checksum(record.path, name, data) != checksum:
                raise Damaged(f"a record of {record.end - record.start} tokens")
        return {name: data for name, _, data in rows} if len(rows) == len(names) else None

    def parts_of(self, record_id: int) -> set[str]:
        """Names of the parts that a record has."""
        with self._errors():
            return {name for (name,) in self._db.execute("SELECT name FROM parts WHERE block=?", (record_id,))}

    def forget_parts(self, record_id: int) -> None:
        """Remove the bytes of a damaged record: they are written again when they are computed again."""
        with self._errors(), self._transaction():
            self._db.execute("DELETE FROM parts WHERE block=?", (record_id,))

    def write(
        self, owner: Owner, before: Seq[int], blocks: Seq[tuple[bytes, Mapping[str, Bytes]]], path: int
    ) -> list[int]:
        """Write blocks, each below the block before it, behind the records `before`; returns the ids of the blocks'
        records. `path` is the checksum over all tokens of `before`. Fewer blocks are written if another process has
        removed `before`, or if there is no room.
        """
        used, ids = time.time_ns(), list[int]()
        with self._writing():
            self._db.executemany("UPDATE blocks SET used=? WHERE id=?", [(used, block) for block in before])
            parent, depth = (before[-1] if before else 0), len(before)
            if parent and self._db.execute("SELECT 1 FROM blocks WHERE id=?", (parent,)).fetchone() is None:
                return []
            for tokens, parts in blocks:
                if not self._make_room(sum(map(len, parts.values())), used):
                    break
                path = zlib.crc32(tokens, path)
                parent = self._put(owner, parent, tokens, depth, used)
                for name, data in parts.items():
                    row = (parent, name, _checksum(path, name, data), data)
                    self._db.execute("INSERT OR REPLACE INTO parts VALUES(?, ?, ?, ?)", row)
                ids.append(parent)
                depth += 1
        return ids

    def _put(self, owner: Owner, parent: int, tokens: bytes, depth: int, used: int) -> int:
        """Id of the record of these tokens, made if it does not exist. Records without states that hold only the first
        of these tokens are removed.
        """
        if (known := self._id_of(owner, parent, tokens)) is not None:
            self._db.execute("UPDATE blocks SET used=? WHERE id=?", (used, known))
            return known
        while True:
            row = self._db.execute(
                "SELECT id, tokens FROM blocks WHERE owner=? AND parent=? AND tokens<? ORDER BY tokens DESC LIMIT 1",
                (owner.id, parent, tokens),
            ).fetchone()
            if row is None or not tokens.startswith(row[1]) or STATE in self.parts_of(row[0]):
                break
            self._remove([row[0]])
        found = self._db.execute(
            "INSERT INTO blocks(owner, parent, tokens, depth, used) VALUES(?, ?, ?, ?, ?)",
            (owner.id, parent, tokens, depth, used),
        )
        assert found.lastrowid is not None
        return found.lastrowid

    def _make_room(self, num_bytes: int, used: int) -> bool:
        """Remove the least recently used records, a text's last blocks first; False if that is not enough."""
        limit = int(self._one("SELECT value FROM settings WHERE name='max_bytes'")) - _SPARE_PAGES * self._page_bytes
        while self._used_bytes() + num_bytes > limit:
            if not self._remove_oldest(used):
                return False
        return True

    def _remove_oldest(self, used: int) -> bool:
        rows = self._db.execute(
            "SELECT id FROM blocks WHERE used<? ORDER BY used, depth DESC LIMIT ?", (used, _AT_ONCE)
        ).fetchall()
        self._remove([block for (block,) in rows])
        return bool(rows) or self._remove_texts("outputs") or self._remove_texts("answers")

    def _remove_texts(self, table: str) -> bool:
        """Remove the oldest rows of a table of texts (`runtime.core.text_tables`), if the table exists."""
        if not self._one("SELECT count(*) FROM sqlite_master WHERE name=?", table):
            return False
        oldest = f"SELECT id FROM {table} ORDER BY id LIMIT ?"
        return self._db.execute(f"DELETE FROM {table} WHERE id IN ({oldest})", (_AT_ONCE,)).rowcount > 0

    def _remove(self, blocks: Seq[int]) -> None:
        self._db.executemany("DELETE FROM parts WHERE block=?", [(block,) for block in blocks])
        self._db.executemany("DELETE FROM blocks WHERE id=?", [(block,) for block in blocks])

    def _used_bytes(self) -> int:
        free = self._one("PRAGMA freelist_count")
        return int((self._one("PRAGMA page_count") - free) * self._page_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes in use. The file may be larger, with free room for later writes."""
        with self._errors():
            return self._used_bytes()

    def knows(self, engine: str) -> bool:
        """True if anything was ever written for this engine, for any owner."""
        with self._errors():
            return self._db.execute("SELECT 1 FROM owners WHERE engine=?", (engine,)).fetchone() is not None

    def engines(self) -> list[StoredEngine]:
        """The engines that have K/V in the directory, the last used first."""
        with self._errors():
            rows = self._db.execute(
                "SELECT engine, max(model), count(DISTINCT owners.id), "
                "coalesce(sum((SELECT sum(length(data)) FROM parts WHERE block=blocks.id)), 0), max(used) "
                "FROM owners JOIN blocks ON blocks.owner=owners.id GROUP BY engine ORDER BY max(used) DESC"
            ).fetchall()
            return [StoredEngine(digest, model, owners, size, used / 1e9) for digest, model, owners, size, used in rows]

    def prune(self, max_bytes: int) -> int:
        """Remove the least recently used records until `max_bytes` are in use; returns the bytes that were freed."""
        with self._errors():
            before = self._used_bytes()
            with self._transaction():
                while self._used_bytes() > max_bytes and self._remove_oldest(time.time_ns()):
                    pass
            self._db.executescript("PRAGMA incremental_vacuum")  # which steps to its end
            return before - self._used_bytes()


def _num_common(one: bytes, other: bytes) -> int:
    """Number of first tokens that are equal."""
    length = min(len(one), len(other))
    different = np.flatnonzero(np.frombuffer(one[:length], ">i4") != np.frombuffer(other[:length], ">i4"))
    return int(different[0]) if len(different) else length // _TOKEN_BYTES


def _checksum(path: int, name: str, data: Bytes) -> int:
    return zlib.crc32(data, zlib.crc32(name.encode(), path)) << 31 | len(data)
