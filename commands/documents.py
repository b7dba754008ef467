"""What the documents of `--json` begin with, so that a program (and `compare`) knows what it reads."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

SCHEMA_VERSION = 1
"""Of the documents of `run`, `summarize` and `compare`; changed when a key changes its meaning or goes away."""


def document_head(command: str) -> dict[str, Any]:
    return {"command": command, "schema_version": SCHEMA_VERSION, "specdec_version": specdec_version()}


def specdec_version() -> str | None:
    """None where specdec was not installed, but runs from its directory."""
    try:
        return version("specdec-cli")
    except PackageNotFoundError:
        return None
