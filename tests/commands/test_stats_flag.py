"""`--stats`: what each level shows and puts into the document, and that both agree."""

from collections.abc import Callable
from typing import Any

from command_line import NGRAM, PROMPT, Result, assert_valid, each

Run = Callable[..., Result]
ARGUMENTS = ["--ngram-config", NGRAM, *each("--input-text", [PROMPT, "One day"]), "--max-output-len", 30, "--end-id", 0]


def assert_series_add_up(stats: dict[str, Any]) -> None:
    drafted, accepted = stats["per_step_drafted"], stats["per_step_accepted"]
    assert len(drafted) == len(accepted) == stats["num_steps"]
    assert (sum(drafted), sum(accepted)) == (stats["num_draft_tokens"], stats["num_accepted_draft_tokens"])
    assert sum(n > 0 for n in drafted) == stats["num_spec_steps"]
    for i, count in enumerate(stats["acceptance_histogram"]):
        assert sum(a == i and d > 0 for d, a in zip(drafted, accepted, strict=True)) == count


def test_detailed_documents_have_the_counts_of_each_step(run: Run) -> None:
    document = run(*ARGUMENTS, "--json", "--stats", "detailed").document
    assert_valid("run", document)
    for request in document["requests"]:
        assert_series_add_up(request["stats"])
    document = run(*ARGUMENTS, "--json").document
    assert not {"per_step_drafted", "per_step_accepted"} & set(document["requests"][0]["stats"])
