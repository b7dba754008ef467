"""`specdec verify`: compares an artefact's files with their record, and names the first file that differs."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commands.options.expand import expand_groups
from commands.output.output import Output
from runtime.util.errors import SpecDecError
from runtime.util.files import check_regular

if TYPE_CHECKING:  # `--help` needs no import of these
    from runtime.builder.artefacts import ArtefactCheck

_HINTS = {
    "engine": "run `specdec build` again",
    "checkpoint": "run `specdec convert` again",
    "corpus": "make it again with `specdec corpus create`",
    "profile": "make it again: `specdec tune --engine-dir ENGINE --output PROFILE.json`",
    "traces": "write them again with `--output-traces`; a line that you change yourself has no `digest`",
    "model": "download or save the model again",
    "cache": "remove the named files: they are rebuilt when needed",
}


@expand_groups
def verify(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="An engine, checkpoint, corpus, profile, traces, model or cache: a directory or file."
        ),
    ],
    output: Output,
) -> None:
    """Read every file of an engine, checkpoint or other artefact, and compare it with its recorded checksum.

    Exits with 1 if a file is damaged, missing, or not in the record. The kind of artefact is detected.
    """
    from commands.integrity.document import show, verify_document

    found = _check(path)
    show(path, found, output)
    output.document(verify_document(path, found))
    wrong = [one for one in found.files if not one.is_sound]
    if wrong:
        files = "1 file is" if len(wrong) == 1 else f"{len(wrong)} files are"
        raise SpecDecError(
            f"{files} not what was written, such as `{wrong[0].name}` ({wrong[0].status}): {path}",
            hint=_HINTS[found.kind],
        )


def _check(path: Path) -> "ArtefactCheck":
    from runtime.builder.artefacts import check_corpus_or_profile, check_directory, check_model_file
    from runtime.checkpoint.gguf.reader import is_gguf

    if path.is_dir():
        return check_directory(path)
    check_regular(path)
    if not path.is_file():
        what = "neither a file nor a directory" if path.exists() else "there is no such file or directory"
        raise SpecDecError(f"{what}: {path}", hint="check the path")
    return check_model_file(path) if is_gguf(path) else check_corpus_or_profile(path) or _check_traces(path)


def _check_traces(path: Path) -> "ArtefactCheck":
    """SpecDecError for a file that does not look like a file of traces."""
    from runtime.builder.artefacts import ArtefactCheck, check_file
    from runtime.text.trace_lines import check_trace_lines, is_like_traces

    if not is_like_traces(path):
        raise SpecDecError(
            f"neither a GGUF model, a corpus, a profile nor traces, or too damaged to tell which: {path}",
            hint="check the path; if it was one of them, make it again",
        )
    found = check_file(path, lambda: check_trace_lines(path))
    if found.is_sound:
        num_lines, num_with_digest = check_trace_lines(path)
        if num_with_digest < num_lines:
            note = f"{num_lines - num_with_digest:,} of {num_lines:,} lines have no digest: they are your own"
            found = replace(found, status="no_checksum" if not num_with_digest else "ok", note=note)
    return ArtefactCheck("traces", [found])
