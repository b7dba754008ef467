"""Records of the JSON document of `train`."""

from typing import Annotated

from pydantic import Field

from commands.output.documents.records import Head, Positive, Record
from runtime.checkpoint.config import Count, Size


class AcceptedLength(Record):
    """Number of steps that the held-out texts would take with greedy drafts of one length."""

    draft_len: Size
    num_steps_before: Size = Field(description="steps of the target with the head as it was, or new")
    num_steps_after: Size = Field(description="the same with the trained head")
    tokens_per_step_before: Annotated[float, Field(ge=1)]
    tokens_per_step_after: Annotated[float, Field(ge=1)]


class TrainSettings(Record):
    """Settings of a training."""

    model_dir: str
    draft_model_dir: str | None
    parallel: str | None = Field(None, description="the small model that was adapted")
    num_epochs: Size
    learning_rate: Positive
    num_unrolled_steps: Size
    draft_vocab_size: Size
    batch_tokens: Size
    max_text_len: Size
    learn_prompts: bool
    random_seed: int


class TrainDocument(Head):
    """Document of `specdec train --json`."""

    settings: TrainSettings
    output_dir: str
    num_texts: Size = Field(description="texts learned from")
    num_held_out_texts: Size
    num_left_out_texts: Count = Field(description="texts without room for an output")
    num_tokens: Size = Field(description="tokens of the texts learned from, prompts included")
    num_optimizer_steps: Size
    num_held_out_tokens: Size = Field(description="tokens of the held-out outputs")
    held_out_tokens_per_step: Annotated[list[AcceptedLength], Field(min_length=1)]
