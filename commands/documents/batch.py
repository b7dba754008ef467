"""The document of `batch`: what this run has answered, and at which pace."""

import dataclasses
from typing import Any

from commands.batching.model import Job
from commands.batching.running import Report
from commands.documents.head import document_head
from commands.options.batch import BatchFiles
from commands.options.cluster import ClusterOptions


def batch_document(report: Report, files: BatchFiles, job: Job, cluster: ClusterOptions) -> dict[str, Any]:
    counts = report.counts
    return {
        **document_head("batch"),
        "input_file": str(files.input_file),
        "output_file": str(files.output_file),
        "settings": {
            "engine_dir": str(job.session.engine_dir),
            "model_names": list(job.names),
            "drafters": job.session.chosen.speculation.names,
            "draft_len_mode": job.draft_len_mode,
            "defaults": dataclasses.asdict(job.defaults),
            "ray": cluster.ray,
        },
        "num_requests": report.num_requests,
        "num_done_before": report.num_done_before,
        "num_failed": report.num_failed,
        **dataclasses.asdict(counts),
        "acceptance_rate": report.acceptance_rate,
        "tokens_per_step": counts.num_generated_tokens / counts.num_steps if counts.num_steps else None,
        "opening_s": report.opening_s,
        "wall_s": report.wall_s,
        "output_tokens_per_second": report.tokens_per_second,
        "workers": dict(sorted(report.workers.items())),
    }
