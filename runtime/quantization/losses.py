"""Weights that a dtype is too small for."""

import torch
from torch import Tensor

from runtime.errors import SpecDecError
from runtime.source import SourceTensor

_FEW = 1e-4  # of a sound model's weights are so near zero that float16 has no other number for them


class Losses:
    """Counts the weights that a dtype is too small for, at either end of its range."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = str(dtype).removeprefix("torch.")
        self._num_weights = 0
        self._infinite: dict[str, int] = {}
        self._zero: dict[str, int] = {}

    def check(self, saved: Tensor, written: Tensor, entry: SourceTensor) -> None:
        """Count those of one tensor. SpecDecError for weights that are no numbers as they were saved."""
        if not saved.dtype.is_floating_point:
            return
        self._num_weights += saved.numel()
        if not bool(written.isfinite().all()):
            num_bad = int((~saved.isfinite()).sum())
            if num_bad:
                raise SpecDecError(
                    f"{num_bad:,} of {saved.numel():,} numbers of `{entry.source_name}` are NaN or infinite: "
                    f"{entry.file}",
                    hint="the model is damaged; download it again, or train it again",
                )
            self._infinite[entry.name] = int((~written.isfinite()).sum())
        if saved.dtype != written.dtype:
            num_zero = int(saved.count_nonzero() - written.count_nonzero())
            if num_zero:
                self._zero[entry.name] = num_zero

    def messages(self) -> list[str]:
        """Warnings about weights that became infinite, and about zeros if there are many."""
        said = []
        num_infinite, num_zero = sum(self._infinite.values()), sum(self._zero.values())
        if num_infinite:
            said.append(
                f"weights too large for {self._dtype} became infinite: {num_infinite:,}, such as in "
                f"`{next(iter(self._infinite))}`; bfloat16 holds them"
            )
        if num_zero > self._num_weights * _FEW:
            said.append(
                f"weights too small for {self._dtype} became zero: {num_zero:,} ({num_zero / self._num_weights:.2%}), "
                f"such as in `{max(self._zero, key=lambda name: self._zero[name])}`; bfloat16 holds them"
            )
        return said
