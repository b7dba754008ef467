"""Traces: what a model was asked and what it answered."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Trace:
    """One answer of a model."""

    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    category: str | None = None
