"""Work and output of `pull` and `rm`."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from commands.output.documents.records import Head, document_head
from commands.output.output import Output, megabytes
from runtime.checkpoint.cached_engines import cached_engines, engines_bytes, prune, readable_name
from runtime.checkpoint.config import Count
from runtime.checkpoint.hub import local_models, remove
from runtime.util.errors import SpecDecError


class PullDocument(Head):
    """Document of `specdec pull --json`."""

    command: Literal["pull"]
    model: str
    path: str = Field(description="the model's directory, or its first GGUF file")
    num_bytes: Count = Field(description="of the model's files")


class RmDocument(Head):
    """Document of `specdec rm --json`."""

    command: Literal["rm"]
    model: str
    num_engines: Count = Field(description="engines that were removed")
    num_bytes: Count = Field(description="of the downloaded files and the engines that were removed")


def show_pulled(model: str, path: Path, files: list[Path], output: Output) -> None:
    num_bytes = sum(file.stat().st_size for file in files)
    output.result(f"{model}: {megabytes(num_bytes)} in {path}")
    output.document(_document(PullDocument, "pull", model=model, path=str(path), num_bytes=num_bytes))


def remove_model(model: str, output: Output) -> None:
    """SpecDecError if there is nothing of this model to remove."""
    found = local_models()
    downloaded = [one for one in found if one.name == model or one.name.rpartition(":")[0] == model]
    names = {readable_name(Path(model)), *(readable_name(Path(one.name)) for one in downloaded)}
    before = cached_engines()
    engines = [engine for engine in before if engine.path.name.rpartition("-")[0] in names]
    if not downloaded and not engines:
        known = ", ".join(f"`{one.name}`" for one in found)
        raise SpecDecError(
            f"there are no downloaded files and no engines of: {model}",
            hint=f"`specdec list` shows what there is{f': {known}' if known else ''}",
        )
    whole = engines_bytes(before)
    removed = prune(engines)
    freed = whole - engines_bytes(cached_engines()) + sum(one.num_bytes for one in downloaded)
    for one in downloaded:
        remove(one)
    if len(removed) < len(engines):
        output.warning(f"in use, and kept: {len(engines) - len(removed)} engines of {model}")
    output.result(f"removed {model}: {megabytes(freed)}, {len(removed)} engines")
    output.document(_document(RmDocument, "rm", model=model, num_engines=len(removed), num_bytes=freed))


def _document(kind: type[Head], command: str, **fields: Any) -> dict[str, Any]:
    return kind(**document_head(command), **fields).as_json()
