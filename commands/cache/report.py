"""Output of `cache list` and `cache prune`."""

from datetime import datetime
from typing import Any, Literal

from pydantic import Field
from rich.table import Table

from commands.output.documents.records import Head, Record, document_head
from commands.output.output import Output, megabytes
from runtime.checkpoint.config import Count
from runtime.util.cache import CachedEngine, cache_dir, engines_bytes


class CachedEngineRecord(Record):
    """An engine in the cache."""

    path: str
    num_bytes: Count
    used: str = Field(description="when it was used last, ISO 8601 with the zone")
    in_use: bool = Field(description="by a process, now")


class CacheListDocument(Head):
    """Document of `specdec cache list --json`."""

    command: Literal["cache list"]
    engines: list[CachedEngineRecord] = Field(description="the one that was used last first")
    other_bytes: Count = Field(description="of kernels, digests and others")


class CachePruneDocument(Head):
    """Document of `specdec cache prune --json`."""

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


def show_cache(engines: list[CachedEngine], others: int, output: Output) -> None:
    table = Table("engine", "size", "used last", "in use", title=str(cache_dir()))
    table.columns[1].justify = "right"
    for engine in engines:
        table.add_row(engine.path.name, megabytes(engine.num_bytes), _date(engine), "yes" if engine.is_used else "")
    if engines:
        output.result(table)
    size = megabytes(engines_bytes(engines))
    output.result(f"{_number(engines)}, {size}; kernels, digests and others {megabytes(others)}: {cache_dir()}")


def show_pruned(removed: list[CachedEngine], freed: int, left: int, is_dry_run: bool, output: Output) -> None:
    for engine in removed:
        output.result(f"{engine.path.name}  {megabytes(engine.num_bytes)}, used last {_date(engine)}")
    done = "would be removed" if is_dry_run else "removed"
    output.result(f"{_number(removed)} {done}, {megabytes(freed)}; {megabytes(left)} of engines left")


def _date(engine: CachedEngine) -> str:
    return used_at(engine.used_s)


def used_at(time_s: float) -> str:
    return f"{datetime.fromtimestamp(time_s):%Y-%m-%d %H:%M}"


def _number(engines: list[CachedEngine]) -> str:
    return "1 engine" if len(engines) == 1 else f"{len(engines)} engines"
