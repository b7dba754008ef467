"""The header of a safetensors file: as safetensors itself reads it, of sound files and of those that are not."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from strength import draws

from runtime.util.tensor_file import read_header, read_metadata

Forms = dict[str, tuple[str, list[int]]]


def theirs(path: Path) -> tuple[Forms, dict[str, str]] | None:
    """Tensors of a file as safetensors reads them; None if it refuses it."""
    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
            forms = {name: (tensor.get_dtype(), tensor.get_shape()) for name, tensor in slices.items()}
            return forms, file.metadata() or {}
    except SafetensorError:
        return None


def ours(path: Path) -> tuple[Forms, dict[str, str]] | None:
    try:
        with path.open("rb") as file:
            header = read_header(file)
    except SafetensorError:
        return None
    return {name: (entry.dtype, list(entry.shape)) for name, entry in header.tensors.items()}, header.metadata


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors: dict[str, Any] = {
        "table": np.arange(35, dtype=np.float32).reshape(7, 5),
        "empty": np.zeros((3, 0), dtype=np.int64),
        "scalar": np.array(7, dtype=np.int32),
        "flags": np.array([True, False]),
        "half": np.ones(2, dtype=np.float16),
    }
    save_file(tensors, tmp_path / "file", metadata={"made": "here", "é": "\u2028"})
    return tmp_path / "file"


def test_tensors_lie_where_it_says(path: Path) -> None:
    data = path.read_bytes()
    with path.open("rb") as file:
        tensors = read_header(file).tensors
    assert np.frombuffer(data[tensors["table"].start : tensors["table"].end], np.float32).tolist() == list(range(35))
    assert np.frombuffer(data[tensors["scalar"].start : tensors["scalar"].end], np.int32).tolist() == [7]
    assert list(tensors) == sorted(tensors, key=lambda name: tensors[name].start)
    assert ours(path) == theirs(path) != None  # noqa: E711


def check_same(path: Path, contents: Iterator[bytes]) -> int:
    """Compare both readings of all contents; returns how many of them both refuse."""
    num_refused = 0
    for content in contents:
        path.unlink(missing_ok=True)  # a file that is cut and written again waits for the disk
        path.write_bytes(content)
        found = ours(path)
        assert found == theirs(path), content
        num_refused += found is None
    return num_refused


def test_files_that_are_cut_or_longer_are_refused_as_by_safetensors(path: Path) -> None:
    data = path.read_bytes()
    sizes = range(0, len(data), draws(1, 3))
    assert check_same(path, (data[:size] for size in sizes)) == len(sizes)
    assert check_same(path, (data + bytes(size) for size in (1, 7, 8, 5000))) == 4


def test_flipped_bits_are_read_as_by_safetensors(path: Path) -> None:
    """Every bit of the header with `--slow`, else one or two of each byte."""
    data = path.read_bytes()
    bits = range(0, 8 * (8 + int.from_bytes(data[:8], "little")), draws(1, 5))

    def flipped() -> Iterator[bytes]:
        for bit in bits:
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            yield bytes(changed)

    assert len(bits) // 2 < check_same(path, flipped()) < len(bits)  # names and metadata may be others


def test_bytes_put_at_random_are_read_as_by_safetensors(path: Path) -> None:
    data, rng = path.read_bytes(), random.Random(0)
    header_end = 8 + int.from_bytes(data[:8], "little")

    def changed() -> Iterator[bytes]:
        for _ in range(draws(1000, 300)):
            start = rng.randrange(8, header_end)
            yield data[:start] + rng.choice(b'0123456789"[]{},:-. eE\\').to_bytes() + data[start + 1 :]

    assert check_same(path, changed()) > draws(500, 150)


def file_of(header: object, num_bytes: int) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + bytes(num_bytes)


def entry(dtype: object, shape: object, offsets: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


ACCEPTED: list[tuple[object, int]] = [
    ({}, 0),
    ({"__metadata__": None}, 0),
    ({"__metadata__": {}}, 0),
    ({"b": entry("F32", [2], [8, 16]), "a": entry("I64", [], [0, 8])}, 16),
    ({"a": entry("U8", [0], [0, 0]), "b": entry("F64", [1], [0, 8]), "c": entry("U8", [0, 9], [8, 8])}, 8),
    ({"a": entry("F4", [4], [0, 2])}, 2),
    ({"a": {**entry("BF16", [1], [0, 2]), "more": [1]}}, 2),
    (b' {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}   ', 1),
]
REFUSED: list[tuple[object, int]] = [
    ([], 0),
    (7, 0),
    (b"", 0),
    (b"{", 0),
    (b"\xff\xfe{\x00}\x00", 0),
    (b"\xef\xbb\xbf{}", 0),
    (b"[" * 100_000, 0),
    (b'{"a": ' + b"9" * 5000 + b"}", 0),
    ({}, 1),
    ({"__metadata__": {"a": 1}}, 0),
    ({"__metadata__": "a"}, 0),
    ({"a": 1}, 0),
    ({"a": {}}, 0),
    ({"a": entry("F31", [2], [0, 8])}, 8),
    ({"a": entry(["F32"], [2], [0, 8])}, 8),
    ({"a": entry("F32", [2.0], [0, 8])}, 8),
    ({"a": entry("F32", [True, 2], [0, 8])}, 8),
    ({"a": entry("F32", [-2], [0, -8])}, 0),
    ({"a": entry("F32", [-1, -2], [0, 8])}, 8),
    ({"a": entry("F32", 2, [0, 8])}, 8),
    ({"a": entry("F32", [2], [0, 8, 8])}, 8),
    ({"a": entry("F32", [2], [0])}, 8),
    ({"a": entry("F32", [3], [0, 8])}, 8),
    ({"a": entry("F32", [1], [0, 8])}, 8),
    ({"a": entry("F4", [3], [0, 2])}, 2),
    ({"a": entry("F32", [2], [8, 16])}, 16),  # a hole before it
    ({"a": entry("F32", [2], [0, 8]), "b": entry("F32", [2], [4, 12])}, 12),  # they overlap
    ({"a": entry("F32", [2], [0, 8]), "b": entry("F32", [2], [0, 8])}, 8),
    ({"a": entry("F32", [2], [0, 8]), "b": entry("F32", [2], [12, 20])}, 20),
    ({"a": entry("F32", [2**40, 2**40, 0], [0, 0])}, 0),
    ({"a": entry("F32", [2**64], [0, 2**66])}, 0),
]


@pytest.mark.parametrize(("header", "num_bytes"), [*ACCEPTED, *REFUSED])
def test_headers_are_accepted_or_refused_as_by_safetensors(header: object, num_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(file_of(header, num_bytes))
    assert ours(path) == theirs(path)
    assert (ours(path) is None) == ((header, num_bytes) in REFUSED)


@pytest.mark.parametrize("length", [100_000_001, 2**63, 2**64 - 1])
def test_lengths_beyond_the_file_are_not_read(length: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(length.to_bytes(8, "little") + b"{}")
    assert ours(path) is theirs(path) is None


def test_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 4976698672\n")
    with path.open("rb") as file, pytest.raises(SafetensorError, match="git lfs pull"):
        read_header(file)


def test_what_a_cut_file_says_of_itself(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])
    with path.open("rb") as file:
        assert read_metadata(file) == {"made": "here", "é": "\u2028"}
    path.write_bytes(path.read_bytes()[:50])
    with path.open("rb") as file, pytest.raises(SafetensorError, match="ends before its header does"):
        read_metadata(file)
