"""Record of the JSON document of `drafters`."""

from typing import Literal

from pydantic import Field

from commands.output.documents.records import Head, Positive, Record
from runtime.checkpoint.config import Count, Measure, Size


class Fitting(Record):
    """A drafter that was tried on the sample."""

    drafter: str
    command: str
    draft_len: Count = Field(description="longest draft; 0 of no drafter")
    tokens_per_step: Measure = Field(description="expected of the target's steps")
    draft_s: Measure = Field(description="seconds to make a draft, on this machine")
    tokens_per_second: Positive = Field(description="predicted, after the prompts")
    speedup: Positive = Field(description="over no drafter")
    measured_speedup: Measure | None = Field(description="with `--measure`, timed in turn with no drafter")
    predicted_by_measured: Measure | None = Field(description="predicted speedup ÷ measured speedup")


class NotTried(Record):
    """A drafter that was not tried, and why."""

    drafter: str
    reason: str
    command: str


class OnHub(Record):
    """A drafter that was published for the model's family."""

    repo: str
    kind: str
    family: str
    source: str = Field(description="page that says so")
    command: str


class DraftersDocument(Head):
    """Document of `specdec drafters --json`."""

    command: Literal["drafters"]
    model: str
    num_prompts: Size
    num_tokens: Size = Field(description="tokens of the sample's outputs")
    is_own_sample: bool = Field(description="true if the requests are the user's")
    tried: list[Fitting] = Field(description="the fastest first")
    not_tried: list[NotTried]
    published: list[OnHub]
