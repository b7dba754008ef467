"""Texts in the directory of keys and values: answers, which prompts find by marks, and outputs, which lookups search.

Both are tables in the database of `runtime.core.block_store`, with its promises: a kill loses nothing that was
complete, and a row that has changed since it was written is not returned. The oldest rows are removed first. An answer
belongs to an owner and a vocabulary, not to an engine: an answer of another model with the same tokens is a draft as
well. An output belongs to an owner of an engine, and to the scopes of its request.
"""

import json
import sqlite3
import zlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from runtime.core.block_store import BlockStore, Owner, as_bytes, owner_name
from runtime.core.old_answers import Answer, Marks
from runtime.core.scopes import Scope

_TABLES = """
CREATE TABLE IF NOT EXISTS answers(id INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, prompt BLOB NOT NULL,
    way BLOB NOT NULL, tail BLOB NOT NULL, pieces BLOB NOT NULL, tokens BLOB NOT NULL, checksum INTEGER NOT NULL,
    UNIQUE(owner, prompt, way));
CREATE TABLE IF NOT EXISTS outputs(id INTEGER PRIMARY KEY AUTOINCREMENT, owner INTEGER NOT NULL, scopes TEXT NOT NULL,
    tokens BLOB NOT NULL, num_bytes INTEGER NOT NULL, checksum INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS outputs_of_owner ON outputs(owner, id);
CREATE INDEX IF NOT EXISTS outputs_size ON outputs(id, num_bytes);
"""
_MOST_BYTES_OF_ANSWERS, _SHARE, _LOOK_INTERVAL = 64 << 20, 16, 16
"""Limits on a table: answers have at most 64 MB, and each table at most a sixteenth of the directory's limit. The size
is checked after every 16 rows.
"""
_ROW_BYTES = 512
"""Approximate bytes of an answer's row beside its tokens."""
_MOST_READ_BYTES, _MOST_READ_TOKENS = 4_000_000, 1 << 18
"""Bytes of answers, and tokens of outputs, that are read for an owner; more would not be kept in memory."""


@dataclass(frozen=True)
class ReadAnswers:
    """Answers of an owner, the oldest first, the id of the table's last row, and ids of rows that were altered."""

    answers: list[Answer]
    last: int
    damaged: list[int]


def read_answers(store: BlockStore, vocabulary: str, salt: str | None, after: int) -> ReadAnswers:
    """Answers that were written after row `after`. Raises the errors of `BlockStore.read`."""
    owner, found, num_bytes, damaged = _owner(vocabulary, salt), list[Answer](), 0, list[int]()
    with store.reading() as database:
        sequence = database.execute("SELECT seq FROM sqlite_sequence WHERE name='answers'").fetchone()
        last = 0 if sequence is None else int(sequence[0])
        if last == after or not last:
            return ReadAnswers([], last, [])
        after = after if after < last else 0  # of a database that was begun anew
        rows = database.execute(
            "SELECT id, prompt, tail, pieces, way, tokens, checksum FROM answers "
            f"WHERE id>? AND {'+' if after else ''}owner=? ORDER BY id DESC",  # by id, of a few
            (after, owner),
        )
        for row, *parts, checksum in rows:
            if not all(isinstance(part, bytes) for part in parts) or _checksum(owner, parts) != checksum:
                damaged.append(row)
                continue
            *marks, tokens = parts
            found.append(Answer(Marks(*marks), tokens))
            num_bytes += len(tokens)
            if num_bytes >= _MOST_READ_BYTES:
                break
    return ReadAnswers(found[::-1], last, damaged)


def forget_answers(store: BlockStore, rows: Seq[int]) -> None:
    """Remove damaged rows."""
    if rows:
        with store.writing(0) as database:
            database.executemany("DELETE FROM answers WHERE id=?", [(row,) for row in rows])


def write_answers(store: BlockStore, vocabulary: str, answers: Seq[tuple[str | None, Answer]]) -> None:
    """Write answers with their owners' names, over those of the same prompt and way. Raises as `BlockStore.write`."""
    if not answers:
        return
    most = min(_MOST_BYTES_OF_ANSWERS, store.max_bytes // _SHARE)
    with store.writing(sum(len(answer.tokens) + _ROW_BYTES for _, answer in answers)) as database:
        _make_tables(database)
        for salt, answer in answers:
            owner, marks = _owner(vocabulary, salt), answer.marks
            parts = [marks.prompt, marks.tail, marks.pieces, marks.way, answer.tokens]
            row = (owner, *parts, _checksum(owner, parts))
            _insert(database, "answers(owner, prompt, tail, pieces, way, tokens, checksum)", row)
            _keep_last_rows(database, "answers", f"length(tokens) + {_ROW_BYTES}", most)


def write_output(store: BlockStore, owner: Owner, scopes: Seq[Scope], tokens: Seq[int]) -> None:
    """Write an output. Raises the errors of `BlockStore.write`."""
    written, data = json.dumps([(scope.kind, scope.digest) for scope in scopes]), as_bytes(tokens)
    num_bytes, most = len(written) + len(data), store.max_bytes // _SHARE
    with store.writing(num_bytes) as database:
        _make_tables(database)
        row = owner.id, written, data, num_bytes, _checksum(str(owner.path), [written.encode(), data])
        _insert(database, "outputs(owner, scopes, tokens, num_bytes, checksum)", row)
        _keep_last_rows(database, "outputs", "num_bytes", most)


def read_outputs(store: BlockStore, owner: Owner) -> list[tuple[list[Scope], list[int]]]:
    """The owner's last outputs, the oldest first; damaged rows are left out."""
    found, num_tokens = list[tuple[list[Scope], list[int]]](), 0
    with store.reading() as database:
        if database.execute("SELECT 1 FROM sqlite_master WHERE name='outputs'").fetchone() is None:
            return []
        rows = database.execute(
            "SELECT scopes, tokens, checksum FROM outputs WHERE owner=? ORDER BY id DESC", (owner.id,)
        )
        for written, data, checksum in rows:
            is_ours = isinstance(written, str) and isinstance(data, bytes)
            if is_ours and _checksum(str(owner.path), [written.encode(), data]) == checksum:
                tokens = np.frombuffer(data, ">i4").tolist()
                found.append(([Scope(kind, name) for kind, name in json.loads(written)], tokens))
                num_tokens += len(tokens)
            if num_tokens > _MOST_READ_TOKENS:
                break
    return found[::-1]


def _make_tables(database: sqlite3.Connection) -> None:
    for statement in _TABLES.split(";"):
        database.execute(statement)


def _insert(database: sqlite3.Connection, columns: str, row: Seq[object]) -> None:
    """Insert a row, which replaces the row with the same key; `columns` is such as `outputs(owner, scopes)`."""
    database.execute(f"INSERT OR REPLACE INTO {columns} VALUES({', '.join('?' * len(row))})", row)


def _keep_last_rows(database: sqlite3.Connection, table: str, num_bytes: str, most: int) -> None:
    """Remove old rows after every 16th, so that `most` bytes are left; `num_bytes` is a row's size, in SQL."""
    if database.execute("SELECT last_insert_rowid()").fetchone()[0] % _LOOK_INTERVAL == 0:
        total = f"sum({num_bytes}) OVER (ORDER BY id DESC)"
        last = f"SELECT max(id) FROM (SELECT id, {total} AS total FROM {table}) WHERE total>?"
        database.execute(f"DELETE FROM {table} WHERE id<=({last})", (most,))


def _owner(vocabulary: str, salt: str | None) -> str:
    return f"{vocabulary} {owner_name(salt)}"


def _checksum(owner: str, parts: Seq[bytes]) -> int:
    checksum = zlib.crc32(owner.encode())
    for part in parts:
        checksum = zlib.crc32(part, zlib.crc32(b"%d" % len(part), checksum))
    return checksum
