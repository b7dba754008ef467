"""JSON schemas of the documents that commands print with `--json`, made from the documents' records."""

import re
from typing import Any

from pydantic import ConfigDict, TypeAdapter, create_model
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from commands.batch.document import BatchDocument
from commands.build.document import BuildDocument, ConvertDocument
from commands.cache.document import CacheListDocument, CachePruneDocument
from commands.cache.hub import PullDocument, RmDocument
from commands.cache.models import ListDocument
from commands.check.document import CheckDocument
from commands.compare.document import CompareDocument
from commands.config.document import ConfigShowDocument
from commands.corpus.document import CorpusDocument
from commands.doctor.document import DoctorDocument
from commands.drafters.document import DraftersDocument
from commands.fingerprint.document import FingerprintDocument
from commands.integrity.document import VerifyDocument
from commands.output.documents.records import Record
from commands.predict.document import PredictDocument
from commands.regress.document import RegressDocument
from commands.run.document import RunDocument
from commands.summarize.document import SummarizeDocument
from commands.train.document import TrainDocument
from commands.tune.document import TuneDocument
from runtime.proof.records import Receipt

DOCUMENTS: dict[str, type[Record]] = {
    "batch": BatchDocument,
    "build": BuildDocument,
    "cache_list": CacheListDocument,
    "cache_prune": CachePruneDocument,
    "check": CheckDocument,
    "compare": CompareDocument,
    "config_show": ConfigShowDocument,
    "convert": ConvertDocument,
    "corpus": CorpusDocument,
    "doctor": DoctorDocument,
    "drafters": DraftersDocument,
    "fingerprint": FingerprintDocument,
    "list": ListDocument,
    "predict": PredictDocument,
    "pull": PullDocument,
    "regress": RegressDocument,
    "rm": RmDocument,
    "run": RunDocument,
    "summarize": SummarizeDocument,
    "train": TrainDocument,
    "tune": TuneDocument,
    "verify": VerifyDocument,
}
"""Name of a schema -> record of the document: `cache_list` for `specdec cache list`, `corpus` for `create`, `merge` and
`stats` alike.
"""
LINES = {"receipt": Receipt}
"""Name of a schema -> class of a line of a file."""


class _Schema(GenerateJsonSchema):
    """pydantic's generator of schemas, without titles, which repeat the keys, and without defaults, which do not say
    what a missing key means.
    """

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        """Add descriptions from a dataclass: the strings that follow its fields."""
        made = super().dataclass_schema(schema)
        kind, config = schema["cls"], ConfigDict(use_attribute_docstrings=True)
        described = TypeAdapter(list[kind], config=config).json_schema()  # type: ignore[valid-type]
        for name, field in described["$defs"][kind.__name__]["properties"].items():
            if "description" in field:
                made["properties"][name]["description"] = re.sub(r"\bNone\b", "null", field["description"])
        return made


def schema_of(name: str) -> dict[str, Any]:
    """The JSON schema of the document or line `name`, a key of `DOCUMENTS` or `LINES`."""
    if name in LINES:
        title, schema = f"specdec {name}", _schema_of_line(LINES[name])
    else:
        title = f"specdec {name.replace('_', ' ')} --json"
        schema = DOCUMENTS[name].model_json_schema(schema_generator=_Schema)
    definitions = schema.pop("$defs", {})
    return {"$schema": _Schema.schema_dialect, **schema, "title": title, "$defs": definitions}


def _schema_of_line(kind: type[Any]) -> dict[str, Any]:
    """The schema that a dataclass has as a part of a record: it allows no further keys."""
    made = create_model("Holder", __base__=Record, line=(kind, ...)).model_json_schema(schema_generator=_Schema)
    definitions: dict[str, Any] = made["$defs"]
    return {**definitions.pop(kind.__name__), "$defs": definitions}
