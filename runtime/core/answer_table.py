"""Answers in the directory of keys and values: their tokens, and the marks by which a prompt finds them.

They are rows of a table of their own in the database of `runtime.core.block_store`, with its promises: a kill loses
nothing that was complete, and what is not as it was written is not given out. They belong to an owner and a vocabulary,
not to an engine: an answer of another model with the same tokens is a draft as well. The oldest rows go first.
"""

import zlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from runtime.core.answers import Answer, Marks
from runtime.core.block_store import BlockStore, keep_last_rows, owner_name

_TABLE = """
CREATE TABLE IF NOT EXISTS answers(id INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, prompt BLOB NOT NULL,
    way BLOB NOT NULL, tail BLOB NOT NULL, pieces BLOB NOT NULL, tokens BLOB NOT NULL, checksum INTEGER NOT NULL,
    UNIQUE(owner, prompt, way))
"""
_MOST_BYTES, _SHARE = 64 << 20, 16
"""The table's size, unless this share of the directory's limit is less. It is looked at after so many rows:"""
_LOOK_INTERVAL = 16
_ROW_BYTES = 512
"""Bytes of a row beside its tokens, about."""
_MOST_READ = 4_000_000
"""Bytes that are read for an owner: more are not kept in memory."""


@dataclass(frozen=True)
class ReadAnswers:
    """Answers of an owner, oldest first, and the number of the last row. `damaged`: ids of rows that were altered."""

    answers: list[Answer]
    last: int
    damaged: list[int]


def read_answers(store: BlockStore, vocabulary: str, salt: str | None, after: int) -> ReadAnswers:
    """Answers that were written after row `after`. The errors of `BlockStore.read`."""
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
            if num_bytes >= _MOST_READ:
                break
    return ReadAnswers(found[::-1], last, damaged)


def forget_answers(store: BlockStore, rows: Seq[int]) -> None:
    """Remove rows, which are damaged."""
    if rows:
        with store.writing(0) as database:
            database.executemany("DELETE FROM answers WHERE id=?", [(row,) for row in rows])


def write_answers(store: BlockStore, vocabulary: str, answers: Seq[tuple[str | None, Answer]]) -> None:
    """Write answers, each with the name of its owner, in the place of those with the same prompt and way. The errors of
    `BlockStore.write`.
    """
    if not answers:
        return
    num_bytes, limit = sum(len(answer.tokens) + _ROW_BYTES for _, answer in answers), store.max_bytes
    with store.writing(num_bytes) as database:
        database.execute(_TABLE)
        for salt, answer in answers:
            owner, marks = _owner(vocabulary, salt), answer.marks
            parts = [marks.prompt, marks.tail, marks.pieces, marks.way, answer.tokens]
            inserted = database.execute(
                "INSERT OR REPLACE INTO answers(owner, prompt, tail, pieces, way, tokens, checksum) "
                "VALUES(?, ?, ?, ?, ?, ?, ?)",
                (owner, *parts, _checksum(owner, parts)),
            )
            assert inserted.lastrowid is not None
            if inserted.lastrowid % _LOOK_INTERVAL == 0:
                keep_last_rows(database, "answers", f"length(tokens) + {_ROW_BYTES}", min(_MOST_BYTES, limit // _SHARE))


def _owner(vocabulary: str, salt: str | None) -> str:
    return f"{vocabulary} {owner_name(salt)}"


def _checksum(owner: str, parts: Seq[bytes]) -> int:
    checksum = zlib.crc32(owner.encode())
    for part in parts:
        checksum = zlib.crc32(part, zlib.crc32(b"%d" % len(part), checksum))
    return checksum
