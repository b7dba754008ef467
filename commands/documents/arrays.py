"""What `specdec run` writes beside its output: token ids and logits, as TensorRT-LLM's run.py does."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from runtime.files import write_file
from runtime.request import Sequence


def write_ids(sequences: list[Sequence], pad_id: int, csv: Path | None, npy: Path | None) -> None:
    """Rows of prompt and output ids, padded to the longest, as TensorRT-LLM's run.py writes them."""
    longest = max(len(sequence.tokens) for sequence in sequences)
    rows = np.array([s.tokens + [pad_id] * (longest - len(s.tokens)) for s in sequences], dtype=np.int32)
    if csv is not None:
        _write(csv, lambda file: np.savetxt(file, rows, fmt="%d", delimiter=","))
    if npy is not None:
        _write(npy, lambda file: np.save(file, rows))


def write_logits(sequences: list[Sequence], path: Path) -> None:
    """(outputs, longest output, vocab) float32; NaN after the end of an output."""
    logits = torch.nn.utils.rnn.pad_sequence(
        [torch.stack(sequence.logits) for sequence in sequences], batch_first=True, padding_value=float("nan")
    )
    _write(path, lambda file: np.save(file, logits.numpy()))


def _write(path: Path, save: Callable[[io.BytesIO], None]) -> None:
    """The file whole or as it was; numpy itself does not notice that a disk is full."""
    file = io.BytesIO()
    save(file)
    write_file(path, file.getvalue())
