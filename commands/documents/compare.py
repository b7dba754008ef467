"""The JSON document of `specdec compare`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from commands.documents.records import Head, Record, document_head
from runtime.config import Count, Measure
from runtime.evaluation.comparison import Unit, compare_documents


class DifferentSetting(Record):
    """A setting, or a fact of the engine or the versions, that differs."""

    name: str
    a: Any = Field(description="null where this side does not have it")
    b: Any = Field(description="null where this side does not have it")


class ComparedRequests(Record):
    """Which requests are the same."""

    num_a: Count
    num_b: Count
    num_same_prompt: Count
    num_identical_outputs: Count = Field(description="of those of the same prompt, outputs with the same ids")
    paired: bool = Field(description="whether every request of each has its prompt in the other")


class IntervalRecord(Record):
    """Where a ratio lies."""

    ratio: Measure = Field(description="typical ratio of B to A of an observation (Hodges-Lehmann)")
    low: Measure
    high: Measure


class ComparedMetric(Record):
    """A metric of both documents."""

    title: str
    unit: Unit
    a: float | None
    b: float | None
    difference: float | None = Field(description="b - a")
    ratio: float | None = Field(description="b / a; null where a is 0 or either is null")
    interval: IntervalRecord | None = Field(
        description="where the ratio of an observation lies; null where nothing can be said, or counts are exact"
    )
    num_observations: Annotated[list[Count], Field(min_length=2, max_length=2)] | None = Field(
        description="of A and of B; requests that ran together are one observation of their time"
    )
    verdict: Literal["same", "different", "within noise", "unknown"]
    method: Literal["exact", "paired", "unpaired", "none"] = Field(
        description="exact: counts that would be the same again; paired: Wilcoxon's signed ranks; "
        "unpaired: Mann and Whitney's ranks"
    )
    reason: str | None


class CompareDocument(Head):
    """What `specdec compare --json` prints."""

    command: Literal["compare"]
    compared_command: Literal["run", "summarize"]
    a: str = Field(description="path of A.json")
    b: str = Field(description="path of B.json")
    settings: list[DifferentSetting] = Field(description="settings, engine and versions that differ")
    requests: ComparedRequests
    level: float = Field(gt=0, lt=1, description="of the intervals")
    control: IntervalRecord | None = Field(
        description="time for a token of the engine without a drafter, B / A; null where the documents do not have it "
        "or the engines differ"
    )
    metrics: dict[str, ComparedMetric]


def compare_document(a: Path, b: Path, document_a: dict[str, Any], document_b: dict[str, Any]) -> dict[str, Any]:
    document = CompareDocument(
        **document_head("compare"),
        compared_command=document_a["command"],
        a=str(a),
        b=str(b),
        **compare_documents(document_a, document_b),
    )
    return document.as_json()
