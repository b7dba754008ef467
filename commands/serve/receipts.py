"""A server's file of receipts, which grows by a line for each finished answer."""

from collections.abc import Callable
from pathlib import Path

from runtime.loop.serving import RequestHandle
from runtime.proof.receipts import receipt_of
from runtime.proof.records import Fingerprint, IdsForm

OnProgress = Callable[[list[RequestHandle]], None]


def logging_receipts(path: Path, fingerprint: Fingerprint, form: IdsForm, on_progress: OnProgress) -> OnProgress:
    """A callback that appends a receipt for each answer that has just ended, and then calls `on_progress`: the receipt
    is in the file before the client gets the end of its answer.
    """

    def log(answers: list[RequestHandle]) -> None:
        lines = [
            receipt_of(answer.sequence, fingerprint, form=form).line
            for answer in answers
            if answer.progress.finish_reason is not None and answer.asked.counts_output
        ]
        try:
            if lines:
                with path.open("a", encoding="utf-8") as file:
                    file.write("".join(lines))
        finally:
            on_progress(answers)

    return log
