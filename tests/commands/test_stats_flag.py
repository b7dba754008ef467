"""`--stats`: what each level shows and puts into the document, and that both agree."""

import re
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


def rows_of(stdout: str, title: str) -> list[list[str]]:
    """The cells of a table, bars left out."""
    lines = stdout[stdout.index(title) :].splitlines()[4:]
    end = next(i for i, line in enumerate(lines) if line.startswith("└"))
    return [[cell.strip() for i, cell in enumerate(line.strip("│").split("│")) if i != 1] for line in lines[:end]]


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


@pytest.mark.parametrize("command", ["run", "summarize"])
def test_detailed_tables_say_what_the_document_says(run: Run, summarize: Run, command: str) -> None:
    call, arguments = (run, ARGUMENTS) if command == "run" else (summarize, ["--ngram-config", NGRAM])
    total = call(*arguments, "--json").document["total"]
    stdout = call(*arguments, "--stats", "detailed").stdout
    histogram = rows_of(stdout, "Accepted tokens of a draft")
    assert [[row[0], row[1]] for row in histogram] == [
        [str(i), str(count)] for i, count in enumerate(total["acceptance_histogram"])
    ]
    positions = rows_of(stdout, "Acceptance by position")
    assert [row[1] for row in positions] == [str(count) for count in total["num_drafts_per_position"]]
    assert [row[2] for row in positions] == [
        "-" if rate is None else f"{rate * 100:.1f} %" for rate in total["acceptance_rate_per_position"]
    ]
    over_time = [re.split(" / ", row[1]) for row in rows_of(stdout, "Tokens per step over time")]
    sums = [sum(int(pair[i].replace(",", "")) for pair in over_time) for i in (0, 1)]
    assert sums == [total["num_generated_tokens"], total["num_steps"]]
