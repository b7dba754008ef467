"""The JSON document of `specdec regress`."""

from typing import Annotated, Literal

from pydantic import Field

from commands.output.documents.records import MeasuredHead, Record, Token
from commands.output.documents.settings import EngineRecord
from runtime.checkpoint.config import Count, Measure, Share


class RegressAnswer(Record):
    """An old answer, and the new engine's choices for its tokens."""

    where: str = Field(description="the line of the file")
    problem: str | None = Field(description="why it was not compared; null where it was")
    num_tokens: Count
    place: Count | None = Field(description="position in the output of the first token that differs; null: unchanged")
    old_token: Token | None
    new_token: Token | None
    gap: float | None = Field(description="logits of the new engine between its token and the old one")
    agreement: Share | None = Field(
        description="share of the old tokens that the new engine chooses after the old text; null with --until-change"
    )
    mean_kl: Measure | None = Field(description="mean divergence from the old engine, in nats, with --against")
    new_ids: list[Token] | None = Field(description="the new answer, with --new-answers")


class RegressPosition(Record):
    """A position in the outputs, such as the third token, with counts over all answers that have it."""

    num_answers: Count
    agreement: Share
    mean_kl: Measure | None = Field(description="with --against")


class RegressTotal(Record):
    """Figures over all answers."""

    num_answers: Count
    num_not_compared: Count
    num_diverged: Count
    diverged: Share | None
    num_tokens: Count = Field(description="old tokens that were compared")
    agreement: Share | None = Field(
        description="share of all old tokens that the new engine chooses; null with --until-change"
    )
    mean_kl: Measure | None = Field(description="mean over all positions, in nats, with --against")
    median_place: Measure | None = Field(description="of the first token that differs, over answers that diverge")
    median_gap: float | None = Field(description="at that token")
    num_equal_new: Count | None = Field(description="new answers that equal the old ones, with --new-answers")
    rouge: dict[str, Annotated[float, Field(ge=0, le=100)]] | None = Field(
        description="of all new answers, with the old ones as references, with --new-answers and a tokenizer"
    )
    wall_s: Measure = Field(description="time of the comparison, without new answers")
    new_answers_s: Measure | None = Field(description="time of generating new answers from where they diverge")


class RegressDocument(MeasuredHead):
    """Document of `specdec regress --json`."""

    command: Literal["regress"]
    traces: str
    engine: EngineRecord
    old_engine: EngineRecord | None = Field(description="that of --against")
    max_diverged: Share | None
    passed: bool = Field(description="the exit code is 1 if not")
    total: RegressTotal
    positions: list[RegressPosition] = Field(
        description="entry i: position i of the outputs; empty with --until-change"
    )
    answers: list[RegressAnswer] = Field(description="the first 10,000")
    num_answers_left_out: Count = Field(0, description="beyond the first 10,000")
