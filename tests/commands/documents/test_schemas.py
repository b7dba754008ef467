"""The schemas of documents are made of their records, and say what a key holds."""

import json
from typing import Any

import pytest

from scripts.tools.schemas import DIRECTORY, DOCUMENTS, schema_text

METRICS = (
    "num_spec_steps",
    "num_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "draft_acceptance_rate",
    "mean_acceptance_length",
    "tokens_per_step",
    "acceptance_histogram",
    "acceptance_rate_per_position",
    "num_reused_tokens",
)
TIMES = ("ttft_s", "tpot_s", "latency_s")
SERIES = ("per_step_drafted", "per_step_accepted")


def schema(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((DIRECTORY / f"{name}.json").read_text(encoding="utf-8"))
    return data


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_schema_is_what_is_made_of_its_record(name: str) -> None:
    found = (DIRECTORY / f"{name}.json").read_text(encoding="utf-8")
    assert found == schema_text(name), "run scripts/tools/update_docs.py"


def test_every_schema_is_of_a_record() -> None:
    assert {path.stem for path in DIRECTORY.iterdir()} == set(DOCUMENTS)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_schemas_name_every_object_they_allow(name: str) -> None:
    def closed(node: Any) -> bool:
        if isinstance(node, list):
            return all(map(closed, node))
        if not isinstance(node, dict):
            return True
        return ("properties" not in node or node.get("additionalProperties") is False) and all(
            map(closed, node.values())
        )

    assert closed(schema(name))


@pytest.mark.parametrize("name", ["run", "summarize"])
def test_schemas_hold_every_metric_of_the_vocabulary(name: str) -> None:
    definitions = schema(name)["$defs"]
    assert set(METRICS + TIMES + SERIES) <= set(definitions["RequestCounts"]["properties"])
    assert {*METRICS, "output_tokens_per_second", "draft_time_s", "target_time_s", "host_time_s"} <= set(
        definitions["Total"]["properties"]
    )
