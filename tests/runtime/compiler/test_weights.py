"""A step's weights are read as safetensors' own reader reads them, into aligned memory."""

import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from runtime.compiler.weights import open_weights, save_weights


@pytest.fixture
def path(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(7, 5, generator=generator)
    weights = {
        "one number": torch.tensor([3.5]),
        "scalar": torch.tensor(2),
        "bfloat16": table.bfloat16(),
        "float16": table.half(),
        "table": table,
        "its first rows": table[:3],  # shares its memory
        "flags": table > 0,
    }
    save_weights(tmp_path / "weights.safetensors", weights)
    return tmp_path / "weights.safetensors"


def test_weights_are_those_of_the_file(path: Path) -> None:
    ours, theirs = open_weights(path), load_file(path)
    assert set(ours) == set(theirs) and len(ours) == 7
    for name, weight in theirs.items():
        assert ours[name].dtype == weight.dtype and ours[name].shape == weight.shape
        assert torch.equal(ours[name], weight)


def test_every_weight_begins_at_a_cache_line(path: Path) -> None:
    assert {weight.data_ptr() % 64 for weight in open_weights(path).values()} == {0}


def test_no_weights_are_a_file_too(tmp_path: Path) -> None:
    save_weights(tmp_path / "empty.safetensors", {})
    assert open_weights(tmp_path / "empty.safetensors") == {}


def test_others_may_read_the_file_if_the_user_lets_them(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        save_weights(tmp_path / "weights.safetensors", {"a": torch.zeros(1)})
    finally:
        os.umask(before)
    assert (tmp_path / "weights.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("size", [0, 5, 40, -1])
def test_file_that_is_cut_off_is_found_out(path: Path, size: int) -> None:
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    with pytest.raises(SafetensorError):
        open_weights(path)
