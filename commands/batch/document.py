"""Records of the JSON document of `batch`."""

from typing import Literal

from pydantic import Field

from commands.output.documents.records import Head, Record, absent
from commands.output.documents.settings import DrafterNames, OutputGrammar
from runtime.checkpoint.config import Count, Measure, Share, Size
from runtime.drafters.spec import DraftLenMode


class BatchDefaultsRecord(Record):
    """Defaults for requests."""

    max_output_len: Size | None
    temperature: Measure | None
    top_k: Count | None
    top_p: Share | None
    thinking_token_budget: Count | None = absent("most tokens that a model thinks in an output; null without a limit")
    random_seed: int
    grammar: OutputGrammar | None = absent("form of outputs; missing without one")


class BatchSettings(Record):
    """Settings of the command."""

    engine_dir: str
    model_names: list[str] = Field(min_length=1)
    drafters: DrafterNames
    draft_len_mode: DraftLenMode
    defaults: BatchDefaultsRecord
    ray: str | None = Field(description="local, or the address of a cluster; null without Ray")


class BatchDocument(Head):
    """Document of `specdec batch --json`."""

    command: Literal["batch"]
    input_file: str
    output_file: str
    settings: BatchSettings
    num_requests: Size
    num_done_before: Count = Field(
        description="requests that had a result when the command began; tokens, steps, times, workers: of the rest"
    )
    num_failed: Count = Field(description="results with an error, of all requests")
    num_prompt_tokens: Count
    num_generated_tokens: Count
    num_steps: Count
    num_drafts: Count = Field(description="steps that carried a draft")
    num_draft_tokens: Count
    num_accepted_tokens: Count
    acceptance_rate: Share | None = Field(description="num_accepted_tokens ÷ num_draft_tokens")
    tokens_per_step: Measure | None = Field(description="num_generated_tokens ÷ num_steps")
    opening_s: Measure = Field(description="until a worker, or this process, had opened the model")
    wall_s: Measure = Field(description="from the first request to the last result, opening excluded")
    output_tokens_per_second: Measure | None = Field(description="num_generated_tokens ÷ wall_s")
    workers: dict[str, Size] = Field(
        description="results by worker: its machine and process; of this process under an empty name"
    )
