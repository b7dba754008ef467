"""Output of `batch` at its end: the JSON document, or a table."""

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field
from rich.table import Table

from commands.batch.answering import Counts
from commands.batch.command import BatchFiles
from commands.batch.job import Job
from commands.documents.records import Head, Record, document_head
from commands.documents.settings import DrafterNames
from commands.options.ray_flags import ClusterOptions
from commands.output import Output, number, percent
from runtime.config import Count, Measure, Share, Size
from runtime.drafters.specs import DraftLenMode


@dataclass
class Report:
    """Summary of this run."""

    num_requests: int
    num_done_before: int
    num_failed: int = 0
    counts: Counts = field(default_factory=Counts)
    opening_s: float = 0.0
    wall_s: float = 0.0
    workers: Counter[str] = field(default_factory=Counter)
    """Results by the machine and the process that they come from, where there are several."""

    @property
    def tokens_per_second(self) -> float | None:
        return self.counts.num_generated_tokens / self.wall_s if self.wall_s else None

    @property
    def acceptance_rate(self) -> float | None:
        counts = self.counts
        return counts.num_accepted_tokens / counts.num_draft_tokens if counts.num_draft_tokens else None


class BatchDefaultsRecord(Record):
    """Defaults for requests."""

    max_output_len: Size | None
    temperature: Measure | None
    top_k: Count | None
    top_p: Share | None
    random_seed: int


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
        description="requests that had a result when the command began; the other keys cover the rest"
    )
    num_failed: Count = Field(description="results with an error")
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


def batch_document(report: Report, files: BatchFiles, job: Job, cluster: ClusterOptions) -> dict[str, Any]:
    counts = report.counts
    document = BatchDocument(
        **document_head("batch"),
        input_file=str(files.input_file),
        output_file=str(files.output_file),
        settings=BatchSettings(
            engine_dir=str(job.choice.engine_dir),
            model_names=list(job.names),
            drafters=job.choice.speculation.names,
            draft_len_mode=job.draft_len_mode,
            defaults=BatchDefaultsRecord(**dataclasses.asdict(job.defaults)),
            ray=cluster.ray,
        ),
        num_requests=report.num_requests,
        num_done_before=report.num_done_before,
        num_failed=report.num_failed,
        **dataclasses.asdict(counts),
        acceptance_rate=report.acceptance_rate,
        tokens_per_step=counts.num_generated_tokens / counts.num_steps if counts.num_steps else None,
        opening_s=report.opening_s,
        wall_s=report.wall_s,
        output_tokens_per_second=report.tokens_per_second,
        workers=dict(sorted(report.workers.items())),
    )
    return document.as_json()


def show(document: dict[str, Any], output: Output) -> None:
    if not document["workers"]:
        output.result(f"all {document['num_requests']:,} requests are done: {document['output_file']}")
        return
    table = Table("requests", "failed", "tokens", "tokens/s", "accepted", "tokens per step", "time", title="Batch")
    for column in table.columns:
        column.justify = "right"
    table.add_row(
        f"{sum(document['workers'].values()):,}",
        f"{document['num_failed']:,}",
        f"{document['num_generated_tokens']:,}",
        number(document["output_tokens_per_second"], 1),
        percent(document["acceptance_rate"]),
        number(document["tokens_per_step"]),
        f"{document['wall_s']:,.1f} s",
    )
    output.result(table)
    if len(document["workers"]) > 1:
        shares = ", ".join(f"{name} {count:,}" for name, count in document["workers"].items())
        output.result(f"results by worker: {shares}")
    output.result(f"results in the order of the requests: {document['output_file']}")
