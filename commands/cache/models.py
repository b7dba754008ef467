"""Output of `specdec list`: the models in the engine cache, each in the formats that it was built in, and downloads."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field
from rich.table import Table

from commands.build.document import described
from commands.cache.document import iso_time, used_at
from commands.output.documents.records import Head, Record, document_head
from commands.output.output import Output, megabytes
from runtime.checkpoint.bundle import read_bundle
from runtime.checkpoint.cached_engines import CachedEngine, engines_bytes
from runtime.checkpoint.config import Count, EngineConfig, Size
from runtime.checkpoint.hub import LocalModel
from runtime.util.cache import cache_dir, max_cache_bytes
from runtime.util.errors import SpecDecError

_DAMAGED = "damaged"


class ModelRecord(Record):
    """A model in one format. It may have several engines, with different limits."""

    model: str = Field(description="the last part of its path or hub id")
    format: str = Field(description="dtype and quantization, such as `bfloat16, W4A16 weights in groups of 64`")
    num_engines: Size
    num_bytes: Count = Field(description="a file that several engines have in common counts once")
    used: str = Field(description="when one of its engines was used last, ISO 8601 with the zone")
    in_use: bool = Field(description="by a process, now")


class HubModelRecord(Record):
    """A model of the hub that was downloaded."""

    model: str = Field(description="name by which it is run: `OWNER/NAME`, or `OWNER/NAME:Q4_K_M` for a GGUF file")
    num_bytes: Count
    used: str = Field(description="when its files were read last, ISO 8601 with the zone")


class ListDocument(Head):
    """Document of `specdec list --json`."""

    command: Literal["list"]
    models: list[ModelRecord] = Field(description="the model that was used last first")
    num_bytes: Count = Field(description="of all engines")
    downloaded: list[HubModelRecord] = Field(description="models of the hub, in its client's cache")
    max_bytes: Count = Field(description="SPECDEC_CACHE_SIZE: the engines that were used last are kept up to it")


@dataclass(frozen=True)
class CachedModel:
    """A model in one format, and its engines, the last used first."""

    name: str
    format: str
    engines: list[CachedEngine]

    @property
    def used_s(self) -> float:
        return self.engines[0].used_s

    @property
    def is_used(self) -> bool:
        return any(engine.is_used for engine in self.engines)


def models_of(engines: Iterable[CachedEngine]) -> list[CachedModel]:
    """The models that these engines were made from, in the engines' order."""
    found: dict[tuple[str, str], list[CachedEngine]] = {}
    for engine in engines:
        name = engine.path.name.rpartition("-")[0] or engine.path.name
        found.setdefault((name, _format_of(engine)), []).append(engine)
    return [CachedModel(*key, own) for key, own in found.items()]


def _format_of(engine: CachedEngine) -> str:
    try:
        return described_format(read_bundle(engine.path).config)
    except SpecDecError:
        return _DAMAGED


def described_format(config: EngineConfig) -> str:
    """The model's number formats in words, such as `bfloat16`, or `bfloat16, W4A16 weights in groups of 64, activations
    int8`.
    """
    return config.dtype if config.quantization is None else f"{config.dtype}, {described(config.quantization)}"


def list_document(models: list[CachedModel], downloaded: list[LocalModel]) -> dict[str, Any]:
    records = [
        ModelRecord(
            model=model.name,
            format=model.format,
            num_engines=len(model.engines),
            num_bytes=engines_bytes(model.engines),
            used=iso_time(model.used_s),
            in_use=model.is_used,
        )
        for model in models
    ]
    num_bytes = engines_bytes(engine for model in models for engine in model.engines)
    of_hub = [HubModelRecord(model=one.name, num_bytes=one.num_bytes, used=iso_time(one.used_s)) for one in downloaded]
    document = ListDocument(
        **document_head("list"),
        models=records,
        downloaded=of_hub,
        num_bytes=num_bytes,
        max_bytes=max_cache_bytes(),
    )
    return document.as_json()


def _show_downloaded(downloaded: list[LocalModel], output: Output) -> None:
    table = Table("downloaded from the hub", "size", "read last")
    table.columns[1].justify = "right"
    for model in downloaded:
        table.add_row(model.name, megabytes(model.num_bytes), used_at(model.used_s))
    if downloaded:
        output.result(table)


def show_models(models: list[CachedModel], downloaded: list[LocalModel], output: Output) -> None:
    _show_downloaded(downloaded, output)
    if not models:
        output.result(f"no model was built yet: `specdec run demo` builds one in {cache_dir()}")
        return
    table = Table("model", "format", "engines", "size", "used last", "in use")
    for i in (2, 3):
        table.columns[i].justify = "right"
    for model in models:
        size, used = megabytes(engines_bytes(model.engines)), "yes" if model.is_used else ""
        table.add_row(model.name, model.format, str(len(model.engines)), size, used_at(model.used_s), used)
    output.result(table)
    whole = engines_bytes(engine for model in models for engine in model.engines)
    output.result(f"{megabytes(whole)} of {max_cache_bytes() / 1e9:g} GB (SPECDEC_CACHE_SIZE): {cache_dir()}")
