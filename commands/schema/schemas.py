"""JSON schemas of the documents that commands print with `--json`, made from the documents' records."""

import re
from typing import Any

from pydantic import ConfigDict, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from commands.batch.document import BatchDocument
from commands.bench.work import BenchDocument
from commands.build.report import BuildDocument, ConvertDocument
from commands.cache.report import CacheListDocument, CachePruneDocument
from commands.check.document import CheckDocument
from commands.compare.report import CompareDocument
from commands.corpus.report import CorpusDocument
from commands.doctor.document import DoctorDocument
from commands.fingerprint.report import FingerprintDocument
from commands.integrity.report import VerifyDocument
from commands.output.documents.records import Record
from commands.predict.report import PredictDocument
from commands.regress.document import RegressDocument
from commands.run.document import RunDocument
from commands.summarize.document import SummarizeDocument
from commands.train.document import TrainDocument
from commands.tune.document import TuneDocument
from runtime.proof.records import Receipt

DOCUMENTS: dict[str, type[Record] | type[Receipt]] = {
    "batch": BatchDocument,
    "bench": BenchDocument,
    "build": BuildDocument,
    "cache_list": CacheListDocument,
    "cache_prune": CachePruneDocument,
    "check": CheckDocument,
    "compare": CompareDocument,
    "convert": ConvertDocument,
    "corpus": CorpusDocument,
    "doctor": DoctorDocument,
    "fingerprint": FingerprintDocument,
    "predict": PredictDocument,
    "receipt": Receipt,
    "regress": RegressDocument,
    "run": RunDocument,
    "summarize": SummarizeDocument,
    "train": TrainDocument,
    "tune": TuneDocument,
    "verify": VerifyDocument,
}
"""Name of a schema -> record of the document: `cache_list` for `specdec cache list`; `corpus` prints one kind.
`receipt` is a line of a file of receipts."""


class _Schema(GenerateJsonSchema):
    """Pydantic's, without titles, which name keys twice, and defaults, which are not what a missing key means."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        """Add the descriptions: the strings after its fields."""
        made = super().dataclass_schema(schema)
        kind, config = schema["cls"], ConfigDict(use_attribute_docstrings=True)
        described = TypeAdapter(list[kind], config=config).json_schema()  # type: ignore[valid-type]
        for name, field in described["$defs"][kind.__name__]["properties"].items():
            if "description" in field:
                made["properties"][name]["description"] = re.sub(r"\bNone\b", "null", field["description"])
        return made


def schema_of(name: str) -> dict[str, Any]:
    """The JSON schema of the document `name`, a key of `DOCUMENTS`."""
    document = DOCUMENTS[name]
    schema = TypeAdapter(document).json_schema(schema_generator=_Schema)
    definitions = schema.pop("$defs", {})
    title = f"specdec {name.replace('_', ' ')}" + (" --json" if issubclass(document, Record) else "")
    return {"$schema": _Schema.schema_dialect, **schema, "title": title, "$defs": definitions}
