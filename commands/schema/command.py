"""`specdec schema`: prints the JSON schema of a command's `--json` document."""

import json
import sys
from typing import Annotated

import typer

from commands.options.expand import expand_groups
from runtime.util.errors import UsageError
from runtime.util.words import word_among


@expand_groups
def schema(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Document, such as `run` or `cache-list`; without a name all names."),
    ] = None,
) -> None:
    """Print the JSON schema of a command's `--json` document, or the names of the documents that have one.

    UsageError for a name that no document has.
    """
    from commands.schema.schemas import DOCUMENTS, LINES, schema_of

    names = [*DOCUMENTS, *LINES]
    if name is None:
        print("\n".join(names))
        return
    known = word_among(name.replace(" ", "_"), names)
    if known is None:
        raise UsageError(f"no JSON document has this name: {name}", hint=f"the names are {', '.join(names)}")
    sys.stdout.write(json.dumps(schema_of(known), indent=2, ensure_ascii=False) + "\n")
