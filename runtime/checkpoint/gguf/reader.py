"""GGUF files: their header, read without torch and without trusting it.

A file is a header (counts, metadata, a table of tensors) and then the tensors, each at a multiple of the alignment.
Sizes are compared with limits and with the file's size before memory is taken for them.
"""

import re
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from runtime.util.errors import SpecDecError
from runtime.util.files import Stamp, check_regular, stamp_of

ORIGINAL = "give the model that the GGUF file was made from: its config.json and safetensors files"
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_MOST_PADDING_BYTES = 1 << 20
"""Limit on the bytes behind the last tensor: some tools fill up a file to whole blocks of a disk."""
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
TOKENIZER, CHAT_TEMPLATE = "tokenizer.ggml.", "tokenizer.chat_template"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
"""Name of a file of a model in several files, such as `NAME-00001-of-00003.gguf`."""
_MAX_ENTRIES = 2**20  # of metadata and of tensors each
_MAX_ITEMS = 2**24  # of an array: a vocabulary has fewer


@dataclass(frozen=True)
class BlockType:
    """Storage format: `num_numbers` numbers in a block of `num_bytes` bytes."""

    name: str
    num_numbers: int
    num_bytes: int


TYPES = {
    0: BlockType("F32", 1, 4), 1: BlockType("F16", 1, 2), 30: BlockType("BF16", 1, 2), 8: BlockType("Q8_0", 32, 34),
    2: BlockType("Q4_0", 32, 18), 3: BlockType("Q4_1", 32, 20), 6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    10: BlockType("Q2_K", 256, 84), 11: BlockType("Q3_K", 256, 110), 12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176), 14: BlockType("Q6_K", 256, 210),
    20: BlockType("IQ4_NL", 32, 18), 23: BlockType("IQ4_XS", 256, 136), 39: BlockType("MXFP4", 32, 17),
}  # fmt: skip
"""Block types by their numbers in files."""
_NOT_READ = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
}  # fmt: skip


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor in the file `path`, `offset` bytes from its beginning; a matrix's `shape` is [outputs, inputs]."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    path: Path
    offset: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) // self.type.num_numbers * self.type.num_bytes


@dataclass(frozen=True)
class GGUFHeader:
    """A file's header; for a model in several files, the first file's metadata and the tensors of all files."""

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))


def is_gguf(path: Path) -> bool:
    """True for a GGUF file, by its name or its first bytes: in a hub's cache, files have other names."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC
    return False


def templates_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The chat templates by name: `default`, and for example `tool_use` from `tokenizer.chat_template.tool_use`."""
    others = {
        key.removeprefix(f"{CHAT_TEMPLATE}."): value
        for key, value in metadata.items()
        if key.startswith(f"{CHAT_TEMPLATE}.")
    }
    return ({"default": metadata[CHAT_TEMPLATE]} if CHAT_TEMPLATE in metadata else {}) | others


def templates_as_one(templates: dict[str, Any]) -> Any:
    """Chat templates in the form that transformers takes: a single text, texts by name, or None."""
    return templates if len(templates) > 1 else next(iter(templates.values()), None)


def has_tokenizer(path: Path) -> bool:
    return f"{TOKENIZER}tokens" in read_gguf(path).metadata


def read_gguf(path: Path) -> GGUFHeader:
    """The header. SpecDecError for a file that is not GGUF, is damaged, or has types that are not supported, and for a
    model in several files as for `gguf_files`, or if the files are of several models.
    """
    files = gguf_files(path)
    headers = [_read(file, stamp_of(file.stat())) for file in files]
    first = headers[0]
    for i, header in enumerate(headers[1:], 1):
        said = [header.metadata.get(key) for key in ("split.no", "split.count")]
        if said != [i, len(files)]:
            raise SpecDecError(
                f"the files are not of one GGUF model: `{files[i]}` is part {said[0]} of {said[1]}, counted from 0",
                hint="download them again",
            )
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    num_tensors = sum(len(header.tensors) for header in headers)
    if {len(tensors), first.metadata.get("split.tensors.count", num_tensors)} != {num_tensors}:
        raise SpecDecError(
            f"the files of a GGUF model have {num_tensors} tensors, {len(tensors)} of them different, and the first "
            f"file announces {first.metadata.get('split.tensors.count', num_tensors)}: {path}",
            hint="download them again",
        )
    return GGUFHeader(first.metadata, tensors)


def gguf_files(path: Path) -> list[Path]:
    """All files of the model whose first or only file this is. SpecDecError for a later part, or a missing one."""
    metadata = _read(path, stamp_of(path.stat())).metadata
    count, number, named = metadata.get("split.count", 0), metadata.get("split.no", 0), _PART.fullmatch(path.name)
    if count in (0, 1):
        return [path]
    if named is None or [int(named[2]) - 1, int(named[3])] != [number, count]:
        raise SpecDecError(
            f"the file is part {number} of {count} of a GGUF model, counted from 0, and its name does not say so: "
            f"{path}",
            hint="give the parts their names back: NAME-00001-of-00002.gguf and so on",
        )
    paths = [path.with_name(f"{named[1]}-{i:05}-of-{named[3]}.gguf") for i in range(1, count + 1)]
    for one in paths:
        check_regular(one)
    missing = [one.name for one in paths if one != path and not one.is_file()]
    if missing:
        raise SpecDecError(
            f"of {count} files of a GGUF model {len(missing)} are missing: {', '.join(missing[:3])}",
            hint=f"download them into {path.parent}",
        )
    if number != 0:
        raise SpecDecError(f"the file is not the first of its GGUF model: {path}", hint=f"give {paths[0]}")
    return paths


def without_later_parts(paths: list[Path]) -> list[Path]:
    """These paths, with only the first file of each model."""
    models = {(named[1], named[3]) if (named := _PART.fullmatch(path.name)) else path: path for path in reversed(paths)}
    return list(models.values())[::-1]


def check_part(path: Path) -> None:
    """SpecDecError if this file, a part of a model, is damaged; other parts are not read."""
    _read(path, stamp_of(path.stat()))


@cache  # one command asks several times
def _read(path: Path, stamp: Stamp) -> GGUFHeader:
    num_bytes = stamp.num_bytes
    with path.open("rb") as file:
        reader = _Reader(file, path, num_bytes)
        if reader.take(4) != _MAGIC:
            raise SpecDecError(
                f"this is not a GGUF file: {path}", hint="it does not begin with `GGUF`; download it again"
            )
        version = reader.number("I")
        if version not in _VERSIONS:
            raise SpecDecError(
                f"GGUF files of version {version} are not read: {path}", hint="specdec reads versions 2 and 3"
            )
        num_tensors, num_entries = reader.count(_MAX_ENTRIES), reader.count(_MAX_ENTRIES)
        metadata = dict(reader.entry() for _ in range(num_entries))
        table = [reader.tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            reader.fail(f"`general.alignment` is no power of 2, {alignment}")
        start = -(-file.tell() // alignment) * alignment
    if not all(isinstance(metadata.get(key, 0), int) for key in ("split.count", "split.no")):
        reader.fail("the number of its model's files is none")
    for name, _, _, offset in table:
        if offset % alignment:
            reader.fail(f"`{name}` begins at {offset:,}, no multiple of its alignment, {alignment}")
    tensors = {name: _placed(name, shape, number, start + offset, path) for name, shape, number, offset in table}
    for tensor in tensors.values():
        if tensor.offset + tensor.num_bytes > num_bytes:
            reader.fail(f"it ends before `{tensor.name}` does")
    end = max((tensor.offset + tensor.num_bytes for tensor in tensors.values()), default=start)
    if num_bytes - end > _MOST_PADDING_BYTES:
        reader.fail(f"{num_bytes:,} bytes, where its header speaks of {end:,}")
    return GGUFHeader(metadata, tensors)


def _placed(name: str, shape: tuple[int, ...], number: int, offset: int, path: Path) -> GGUFTensor:
    if number not in TYPES:
        said = _NOT_READ.get(number, f"the number {number}")
        read = ", ".join(one.name for one in TYPES.values())
        raise SpecDecError(f"`{name}` is of a type that is not read, {said}: {path}", hint=f"specdec reads {read}")
    if not shape or shape[-1] % TYPES[number].num_numbers:
        raise damaged(f"`{path}` is damaged: `{name}` of {list(shape)} is not made of whole blocks")
    return GGUFTensor(name, shape, TYPES[number], path, offset)


def damaged(said: str) -> SpecDecError:
    """The error for a GGUF file that contradicts itself, or lacks a part."""
    return SpecDecError(said, hint="download it again")


class _Reader:
    """Reads one value after another; SpecDecError at the end of the file."""

    def __init__(self, file: BinaryIO, path: Path, num_bytes: int) -> None:
        self._file, self._path, self._num_bytes = file, path, num_bytes

    def fail(self, how: str) -> None:
        raise damaged(f"`{self._path}` is damaged: {how}")

    def take(self, count: int) -> bytes:
        data = self._file.read(min(count, self._num_bytes))
        if len(data) < count:
            self.fail("it ends within its header")
        return data

    def number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def count(self, most: int) -> int:
        found = int(self.number("Q"))
        if found > most:
            self.fail(f"it says that it holds {found:,} values")
        return found

    def text(self) -> str:
        return self.texts(1)[0]

    def texts(self, length: int) -> list[str]:
        """The next `length` texts, read quickly: a vocabulary has hundreds of thousands."""
        read, most, texts = self._file.read, self._num_bytes, list[str]()
        for _ in range(length):
            number = read(8)
            size = int.from_bytes(number, "little")
            if size > most:
                self.fail(f"it says that it holds a text of {size:,} bytes")
            text = read(size)
            if len(number) + len(text) < 8 + size:
                self.fail("it ends within its header")
            texts.append(text.decode("utf-8", errors="replace"))
        return texts

    def entry(self) -> tuple[str, Any]:
        return self.text(), self._value(self.number("I"))

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind == _ARRAY:
            item, length = self.number("I"), self.count(_MAX_ITEMS)
            if item in _NUMBERS:
                form = _NUMBERS[item]
                return list(struct.unpack(f"<{length}{form}", self.take(struct.calcsize(f"<{length}{form}"))))
            if item == _TEXT:
                return self.texts(length)
            self.fail(f"an array of values of the kind {item}")
        if kind not in _NUMBERS:
            self.fail(f"a value of the kind {kind}")
        return self.number(_NUMBERS[kind])

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self.text(), self.number("I")
        if num_dims > 4:
            self.fail(f"`{name}` has {num_dims} dimensions")
        shape = tuple(reversed([self.count(2**40) for _ in range(num_dims)]))
        return name, shape, self.number("I"), self.number("Q")
