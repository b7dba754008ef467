"""The JSON schemas of `commands/schemas/`, made of the records of the commands."""

import json
import re
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from commands.batch.work import BatchDocument
from commands.bench.work import BenchDocument
from commands.build.report import BuildDocument, ConvertDocument
from commands.cache.report import CacheListDocument, CachePruneDocument
from commands.compare.report import CompareDocument
from commands.corpus.report import CorpusDocument
from commands.doctor.work import DoctorDocument
from commands.integrity.report import VerifyDocument
from commands.output.documents.records import Record
from commands.run.document import RunDocument
from commands.summarize.document import SummarizeDocument
from commands.train.work import TrainDocument
from commands.tune.work import TuneDocument

DIRECTORY = Path(__file__).parents[2] / "commands" / "schemas"
DOCUMENTS: dict[str, type[Record]] = {
    "batch": BatchDocument,
    "bench": BenchDocument,
    "build": BuildDocument,
    "cache_list": CacheListDocument,
    "cache_prune": CachePruneDocument,
    "compare": CompareDocument,
    "convert": ConvertDocument,
    "corpus": CorpusDocument,
    "doctor": DoctorDocument,
    "run": RunDocument,
    "summarize": SummarizeDocument,
    "train": TrainDocument,
    "tune": TuneDocument,
    "verify": VerifyDocument,
}
"""Records of each command's document; `corpus` prints one kind."""


class _Schema(GenerateJsonSchema):
    """Pydantic's, without titles, which name keys twice, and defaults, which are not what a missing key means."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        """Add the descriptions: the strings after its fields."""
        made = super().dataclass_schema(schema)
        kind = schema["cls"]
        described = TypeAdapter(list[kind], config=ConfigDict(use_attribute_docstrings=True)).json_schema()
        for name, field in described["$defs"][kind.__name__]["properties"].items():
            if "description" in field:
                made["properties"][name]["description"] = re.sub(r"\bNone\b", "null", field["description"])
        return made


def schema_text(name: str) -> str:
    """The file of a command's schema."""
    schema = DOCUMENTS[name].model_json_schema(schema_generator=_Schema)
    definitions = schema.pop("$defs", {})
    title = f"specdec {name.replace('_', ' ')} --json"
    whole = {"$schema": _Schema.schema_dialect, **schema, "title": title, "$defs": definitions}
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


def _path(name: str) -> Path:
    return DIRECTORY / f"{name}.json"


def stale_schemas() -> list[Path]:
    """Files that are not what is made of the records."""
    paths = {name: _path(name) for name in DOCUMENTS}
    return [path for name, path in paths.items() if not path.exists() or path.read_text() != schema_text(name)]


def write_schemas() -> None:
    for name in DOCUMENTS:
        _path(name).write_text(schema_text(name), encoding="utf-8")
