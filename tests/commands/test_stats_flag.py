"""`--stats`: what each level shows and puts into the document, and that both agree."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import NGRAM, PROMPT, Result, Specdec, assert_valid, each

Run = Callable[..., Result]
ARGUMENTS = ["--ngram-config", NGRAM, *each("--input-text", [PROMPT, "One day"]), "--max-output-len", 30, "--end-id", 0]


@pytest.fixture
def summarize(specdec: Specdec, llama_engine_dir: Path, articles: Path) -> Run:
    where = ["--engine-dir", llama_engine_dir, "--dataset", articles, "--test-engine", "--output-len", 12]
    return lambda *arguments: specdec("summarize", *where, *arguments)


def assert_series_add_up(stats: dict[str, Any]) -> None:
    drafted, accepted = stats["per_step_drafted"], stats["per_step_accepted"]
    assert len(drafted) == len(accepted) == stats["num_steps"]
    assert (sum(drafted), sum(accepted)) == (stats["num_draft_tokens"], stats["num_accepted_draft_tokens"])
    assert sum(n > 0 for n in drafted) == stats["num_spec_steps"]
    for i, count in enumerate(stats["acceptance_histogram"]):
        assert sum(a == i and d > 0 for d, a in zip(drafted, accepted, strict=True)) == count


@pytest.mark.parametrize("command", ["run", "summarize"])
def test_detailed_documents_have_the_counts_of_each_step(run: Run, summarize: Run, command: str) -> None:
    call, arguments = (run, ARGUMENTS) if command == "run" else (summarize, ["--ngram-config", NGRAM])
    document = call(*arguments, "--json", "--stats", "detailed").document
    assert_valid(command, document)
    for request in document["requests"]:
        assert_series_add_up(request["stats"])
    for level in ("summary", "none"):
        document = call(*arguments, "--json", "--stats", level).document
        assert_valid(command, document)
        assert not {"per_step_drafted", "per_step_accepted"} & set(document["requests"][0]["stats"])
