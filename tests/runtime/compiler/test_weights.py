"""A step's weights are read as safetensors' own reader reads them, into aligned memory."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from sentences import Said
from torch import Tensor

from runtime.compiler.weights import Layout, layout_of, open_weights, read_weights, save_weights
from runtime.errors import SpecDecError


@pytest.fixture
def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(7, 5, generator=generator)
    return {
        "one number": torch.tensor([3.5]),
        "scalar": torch.tensor(2),
        "bfloat16": table.bfloat16(),
        "float16": table.half(),
        "table": table,
        "its first rows": table[:3],  # shares its memory
        "flags": table > 0,
    }


@pytest.fixture
def layout(weights: dict[str, Tensor]) -> Layout:
    return layout_of(weights)


@pytest.fixture
def path(weights: dict[str, Tensor], tmp_path: Path) -> Path:
    save_weights(tmp_path / "weights.safetensors", weights)
    return tmp_path / "weights.safetensors"


def test_weights_are_those_of_the_file(path: Path, layout: Layout) -> None:
    ours, theirs = open_weights(path, layout), load_file(path)
    assert set(ours) == set(theirs) and len(ours) == 7
    for name, weight in theirs.items():
        assert ours[name].dtype == weight.dtype and ours[name].shape == weight.shape
        assert torch.equal(ours[name], weight)


def test_weights_stay_when_the_file_is_cut(path: Path) -> None:
    """What is mapped would end the process with a signal."""
    ours, theirs = read_weights(path), {name: weight.clone() for name, weight in load_file(path).items()}
    os.truncate(path, 0)
    assert set(ours) == set(theirs) and len(ours) == 7
    for name, weight in theirs.items():
        assert ours[name].dtype == weight.dtype and torch.equal(ours[name], weight)


def test_weights_of_a_dtype_that_torch_may_not_have_are_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"dtype":"I64"', b'"dtype":"U64"'))
    with pytest.raises(SafetensorError, match="has a dtype that no checkpoint has: U64"):
        read_weights(path)


def test_every_weight_begins_at_a_cache_line(path: Path, layout: Layout) -> None:
    assert {weight.data_ptr() % 64 for weight in open_weights(path, layout).values()} == {0}


def test_no_weights_are_a_file_too(tmp_path: Path) -> None:
    save_weights(tmp_path / "empty.safetensors", {})
    assert open_weights(tmp_path / "empty.safetensors", {}) == {}


def test_others_may_read_the_file_if_the_user_lets_them(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        save_weights(tmp_path / "weights.safetensors", {"a": torch.zeros(1)})
    finally:
        os.umask(before)
    assert (tmp_path / "weights.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("size", [0, 5, 40, -1])
def test_file_that_is_cut_off_is_found_out(path: Path, layout: Layout, size: int) -> None:
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    with pytest.raises(SafetensorError):
        open_weights(path, layout)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("scalar"), "1; scalar"),
        (lambda w: w.update(more=w["flags"]), "1; more"),
        (lambda w: w.update(table=w["table"][:6]), "[6, 5]; [7, 5]; table"),
        (lambda w: w.update(table=w["table"].T), "[5, 7]; [7, 5]; table"),
        (lambda w: w.update(float16=w["bfloat16"]), "bfloat16; float16"),
        (lambda w: w.update(table=w["table"].double()), "float64; float32; table"),
    ],
    ids=["lacking", "more", "smaller", "transposed", "of another dtype", "of a foreign dtype"],
)
def test_weights_that_a_step_does_not_want_are_named(
    change: Callable[[dict[str, Tensor]], None],
    message: str,
    weights: dict[str, Tensor],
    layout: Layout,
    tmp_path: Path,
    said: Said,
) -> None:
    change(weights)
    save_weights(tmp_path / "weights.safetensors", {name: weight.contiguous() for name, weight in weights.items()})
    with pytest.raises(SpecDecError) as raised:
        open_weights(tmp_path / "weights.safetensors", layout)
    said(raised, "weights.safetensors", *message.split("; "))
