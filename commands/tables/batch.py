"""What `batch` prints at its end."""

from typing import Any

from rich.table import Table

from commands.output import Output, number, percent


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
