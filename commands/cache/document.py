"""Output of `cache list` and `cache prune`."""

from datetime import datetime
from typing import Any, Literal

from pydantic import Field
from rich.table import Table

from commands.cache.store import Kept
from commands.output.documents.records import Head, Record, document_head
from commands.output.output import Output, megabytes
from runtime.checkpoint.cached_engines import CachedEngine, engines_bytes
from runtime.checkpoint.config import Count
from runtime.util.cache import cache_dir


class CachedEngineRecord(Record):
    """An engine in the cache."""

    path: str
    num_bytes: Count
    used: str = Field(description="when it was used last, ISO 8601 with the zone")
    in_use: bool = Field(description="by a process, now")


class KeptEngineRecord(Record):
    """The keys and values that are kept on disk for an engine."""

    model: str = Field(description="its architecture and dtype")
    num_owners: Count = Field(description="API keys and `cache_salt`s, and requests without")
    num_bytes: Count
    used: str = Field(description="when some were used last, ISO 8601 with the zone")


class KeptRecord(Record):
    """Keys and values on disk."""

    path: str
    num_bytes: Count = Field(description="in use; the file may be larger, by room for what comes next")
    max_bytes: Count
    engines: list[KeptEngineRecord] = Field(description="the one that was used last first")


class CacheListDocument(Head):
    """Document of `specdec cache list --json`."""

    command: Literal["cache list"]
    engines: list[CachedEngineRecord] = Field(description="the one that was used last first")
    other_bytes: Count = Field(description="of kernels, digests and others")
    kv: KeptRecord | None = Field(description="keys and values of `--kv-cache-dir`, else of `chat --continue`")


class CachePruneDocument(Head):
    """Document of `specdec cache prune --json`."""

    command: Literal["cache prune"]
    dry_run: bool
    removed: list[CachedEngineRecord] = Field(description="with dry_run, what would be")
    left_bytes: Count = Field(description="of the engines, or of the keys and values, that are left")


def cache_list_document(engines: list[CachedEngine], others: int, kept: Kept | None) -> dict[str, Any]:
    records = [_record(one) for one in engines]
    kv = None if kept is None else _kept_record(kept)
    return CacheListDocument(**document_head("cache list"), engines=records, other_bytes=others, kv=kv).as_json()


def _kept_record(kept: Kept) -> KeptRecord:
    engines = [
        KeptEngineRecord(model=one.model, num_owners=one.num_owners, num_bytes=one.num_bytes, used=iso_time(one.used_s))
        for one in kept.engines
    ]
    return KeptRecord(path=str(kept.directory), num_bytes=kept.num_bytes, max_bytes=kept.max_bytes, engines=engines)


def iso_time(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).astimezone().isoformat(timespec="seconds")


def cache_prune_document(removed: list[CachedEngine], left: int, is_dry_run: bool) -> dict[str, Any]:
    records = [_record(one) for one in removed]
    document = CachePruneDocument(**document_head("cache prune"), dry_run=is_dry_run, removed=records, left_bytes=left)
    return document.as_json()


def _record(engine: CachedEngine) -> CachedEngineRecord:
    used = iso_time(engine.used_s)
    return CachedEngineRecord(path=str(engine.path), num_bytes=engine.num_bytes, used=used, in_use=engine.is_used)


def show_cache(engines: list[CachedEngine], others: int, output: Output) -> None:
    table = Table("engine", "size", "used last", "in use", title=str(cache_dir()))
    table.columns[1].justify = "right"
    for engine in engines:
        size, used = megabytes(engine.num_bytes), "yes" if engine.is_used else ""
        table.add_row(engine.path.name, size, used_at(engine.used_s), used)
    if engines:
        output.result(table)
    each, whole = sum(engine.num_bytes for engine in engines), engines_bytes(engines)
    output.result(
        f"{_number(engines)}, {megabytes(whole)}; kernels, digests and others {megabytes(others)}: {cache_dir()}"
    )
    if whole < each:
        output.result(f"weights that engines share count once in this total; the sizes add up to {megabytes(each)}")


def show_store(kept: Kept, output: Output) -> None:
    table = Table("keys and values of", "owners", "size", "used last", title=str(kept.directory))
    for i in (1, 2):
        table.columns[i].justify = "right"
    for one in kept.engines:
        table.add_row(one.model, str(one.num_owners), megabytes(one.num_bytes), used_at(one.used_s))
    if kept.engines:
        output.result(table)
    output.result(f"{megabytes(kept.num_bytes)} of {kept.max_bytes / 1e9:g} GB of keys and values: {kept.directory}")


def show_pruned_store(freed: int, left: int, is_dry_run: bool, output: Output) -> None:
    done = "would be removed" if is_dry_run else "removed"
    output.result(f"{megabytes(freed)} of keys and values {done}; {megabytes(left)} left")


def show_pruned(removed: list[CachedEngine], freed: int, left: int, is_dry_run: bool, output: Output) -> None:
    for engine in removed:
        output.result(f"{engine.path.name}  {megabytes(engine.num_bytes)}, used last {used_at(engine.used_s)}")
    done = "would be removed" if is_dry_run else "removed"
    output.result(f"{_number(removed)} {done}, {megabytes(freed)}; {megabytes(left)} of engines left")


def used_at(time_s: float) -> str:
    return f"{datetime.fromtimestamp(time_s):%Y-%m-%d %H:%M}"


def _number(engines: list[CachedEngine]) -> str:
    return "1 engine" if len(engines) == 1 else f"{len(engines)} engines"
