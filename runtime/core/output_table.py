"""Outputs in the directory of keys and values: tokens that requests of an owner got, and the scopes they belong to.

They are a table of their own in the database of `runtime.core.block_store`, with its promises: a kill loses nothing
that was complete, and what is not as it was written is not given out. The table has at most a sixteenth of the
directory's limit; the oldest rows go first.
"""

import json
import zlib
from collections.abc import Sequence as Seq

import numpy as np

from runtime.core.block_store import BlockStore, Owner, as_bytes, keep_last_rows
from runtime.core.scopes import Scope

_TABLE = """
CREATE TABLE IF NOT EXISTS outputs(id INTEGER PRIMARY KEY AUTOINCREMENT, owner INTEGER NOT NULL, scopes TEXT NOT NULL,
    tokens BLOB NOT NULL, num_bytes INTEGER NOT NULL, checksum INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS outputs_of_owner ON outputs(owner, id);
CREATE INDEX IF NOT EXISTS outputs_size ON outputs(id, num_bytes);
"""
_SHARE, _LOOK_INTERVAL = 16, 16
"""The table's share of the limit is one in so many, and is looked at after so many rows."""
_MOST_READ = 1 << 18
"""Tokens that are read for an owner."""


def write_output(store: BlockStore, owner: Owner, scopes: Seq[Scope], tokens: Seq[int]) -> None:
    """Write an output. The errors of `BlockStore.write`."""
    written, data = json.dumps([(scope.kind, scope.digest) for scope in scopes]), as_bytes(tokens)
    num_bytes, limit = len(written) + len(data), store.max_bytes
    with store.writing(num_bytes) as database:
        for statement in _TABLE.split(";"):
            database.execute(statement)
        row = owner.id, written, data, num_bytes, _checksum(owner, written, data)
        inserted = database.execute(
            "INSERT INTO outputs(owner, scopes, tokens, num_bytes, checksum) VALUES(?, ?, ?, ?, ?)", row
        )
        assert inserted.lastrowid is not None
        if inserted.lastrowid % _LOOK_INTERVAL == 0:
            keep_last_rows(database, "outputs", "num_bytes", limit // _SHARE)


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
            if is_ours and _checksum(owner, written, data) == checksum:
                tokens = np.frombuffer(data, ">i4").tolist()
                found.append(([Scope(kind, name) for kind, name in json.loads(written)], tokens))
                num_tokens += len(tokens)
            if num_tokens > _MOST_READ:
                break
    return found[::-1]


def _checksum(owner: Owner, scopes: str, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(scopes.encode(), owner.path)) << 31 | len(data)
