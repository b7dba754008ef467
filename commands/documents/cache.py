"""The JSON documents of `specdec cache list` and `prune`."""

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from commands.documents.records import Head, Record, document_head
from runtime.cached_engines import CachedEngine
from runtime.config import Count


class CachedEngineRecord(Record):
    """An engine in the cache."""

    path: str
    num_bytes: Count
    used: str = Field(description="when it was used last, ISO 8601 with the zone")
    in_use: bool = Field(description="by a process, now")


class CacheListDocument(Head):
    """What `specdec cache list --json` prints."""

    command: Literal["cache list"]
    engines: list[CachedEngineRecord] = Field(description="the one that was used last first")
    other_bytes: Count = Field(description="of kernels, digests and others")


class CachePruneDocument(Head):
    """What `specdec cache prune --json` prints."""

    command: Literal["cache prune"]
    dry_run: bool
    removed: list[CachedEngineRecord] = Field(description="with dry_run, what would be")
    left_bytes: Count = Field(description="of the engines that are left")


def cache_list_document(engines: list[CachedEngine], others: int) -> dict[str, Any]:
    records = [_record(one) for one in engines]
    return CacheListDocument(**document_head("cache list"), engines=records, other_bytes=others).as_json()


def cache_prune_document(removed: list[CachedEngine], left: int, is_dry_run: bool) -> dict[str, Any]:
    records = [_record(one) for one in removed]
    document = CachePruneDocument(**document_head("cache prune"), dry_run=is_dry_run, removed=records, left_bytes=left)
    return document.as_json()


def _record(engine: CachedEngine) -> CachedEngineRecord:
    used = datetime.fromtimestamp(engine.used_s).astimezone().isoformat(timespec="seconds")
    return CachedEngineRecord(path=str(engine.path), num_bytes=engine.num_bytes, used=used, in_use=engine.is_used)
