"""Output of `fingerprint`, and its JSON document."""

from dataclasses import asdict
from typing import Literal

import typer
from pydantic import Field

from commands.fingerprint.flags import FingerprintOptions
from commands.options.engine_choice import EngineChoice
from commands.output.documents.records import Head, document_head
from commands.output.output import Output
from runtime.proof.records import Fingerprint, Relation, differences, relation_of


class FingerprintDocument(Head):
    """Document of `specdec fingerprint --json`."""

    command: Literal["fingerprint"]
    name: str = Field(description="`system_fingerprint` in answers of `serve`")
    fingerprint: Fingerprint
    relation: Relation | None = Field(description="of the engine of --expect to this one; null without it")
    differences: list[str]
    passed: bool = Field(description="the exit code is 1 if not")


def print_fingerprint(options: FingerprintOptions, choice: EngineChoice, output: Output) -> None:
    """Print the engine's fingerprint, and compare it with `--expect`; exits with 1 unless both have the same bits."""
    from commands.options.sessions import engines_made, open_engine
    from runtime.proof.fingerprint import read_fingerprint

    expected = None if options.expect is None else read_fingerprint(options.expect)
    with engines_made(choice, output) as made, open_engine(made) as llm:
        found = llm.fingerprint
    relation = None if expected is None else relation_of(expected, found)
    document = FingerprintDocument(
        **document_head("fingerprint"),
        name=found.name,
        fingerprint=found,
        relation=relation,
        differences=[] if expected is None else differences(expected, found),
        passed=relation in (None, "same"),
    )
    output.text(found.name) if output.quiet else output.result(found.name)
    for key, value in asdict(found).items():
        shown = " ".join(value) if isinstance(value, tuple) else "-" if value is None else value
        output.result(f"  {key.replace('_', ' ')}: {shown}")
    if expected is not None:
        output.result("the same bits" if document.passed else f"other bits: {'; '.join(document.differences)}")
    output.document(document.as_json())
    if not document.passed:
        raise typer.Exit(1)
