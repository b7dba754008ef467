"""A compiled step's weights: in a file of their own, in the step's layout, and only once in memory.

Inside the step's package they would be in memory twice, mapped and copied, and unpacked at every opening.
"""

import ctypes
import hashlib
import json
import math
import mmap
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import BufferedReader
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, NoReturn
from weakref import WeakValueDictionary

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from runtime.checkpoint.source import DTYPES, written_over
from runtime.kernels.memory import give_back_pages, huge_pages, reserve, small_pages
from runtime.util.digests import keep_digest
from runtime.util.errors import SpecDecError
from runtime.util.files import Stamp, stamp_of
from runtime.util.tensor_file import NUM_BITS, TensorEntry, read_header

_ALIGNMENT = 64  # bytes: a cache line, and what the compiled step may assume
_SHARED = "shared"
_NAMES = {name: str(dtype).removeprefix("torch.") for name, dtype in DTYPES.items()}
_CODES = {name: code for code, name in _NAMES.items()}

Layout = dict[str, tuple[str, list[int]]]
"""The dtype and shape of each weight, by its name."""


def save_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a safetensors file of contiguous tensors. Tensors that share memory are written separately."""
    write_weights(path, layout_of(weights), lambda: [weights])


def write_weights(
    path: Path,
    layout: Layout,
    parts: Callable[[], Iterable[Mapping[str, Tensor]]],
    known: Mapping[str, Tensor] | None = None,
) -> None:
    """Write weights like `save_weights`, if they are made in parts, one after another, that together have this layout.

    For a tensor that equals one of the `known` tensors of another step, only that tensor's name is written. The parts
    are then made twice, since the file begins with the list of known tensors.
    """
    found = ((name, _find(weight, known)) for part in parts() for name, weight in part.items()) if known else ()
    shared = {name: other for name, other in found if other is not None}
    own = {name: form for name, form in layout.items() if name not in shared}
    written, awaited = _Written(path, own, shared), set(own)
    try:
        for part in parts():
            for name in part.keys() & own.keys():
                assert layout_of({name: part[name]})[name] == layout[name]
                written.put(name, part[name])
                awaited.discard(name)
        assert not awaited  # else the thread would wait forever
        if _meanwhile is None:
            written.finish()
    except BaseException:
        written.abandon()
        raise
    if _meanwhile is not None:
        _meanwhile[path] = written


class _Written:
    """Weights in a single piece of memory, and a thread that writes them to a file."""

    def __init__(self, path: Path, layout: Layout, shared: dict[str, str]) -> None:
        header, self._sizes = _header(layout, {_SHARED: json.dumps(shared)} if shared else {})
        self.path, self.shared = path, shared
        memory, start = huge_pages(sum(map(_aligned, self._sizes.values()))), 0
        self.tensors: dict[str, Tensor] = {}
        for name, size in self._sizes.items():
            dtype, shape = layout[name]
            self.tensors[name] = memory[start : start + size].view(getattr(torch, dtype)).view(shape)
            start += _aligned(size)
        self._put = SimpleQueue[str | None]()
        pool = ThreadPoolExecutor(1)
        self._end = pool.submit(self._write, header)
        pool.shutdown(wait=False)

    def put(self, name: str, weight: Tensor) -> None:
        self.tensors[name].copy_(weight.detach())
        self._put.put(name)

    def finish(self) -> str:
        """Wait until all weights are written; returns the file's SHA-256. Raises OSError if the disk is full."""
        return self._end.result()

    def abandon(self) -> None:
        """Stop writing, and wait until the thread has ended."""
        self._put.put(None)
        wait([self._end])

    def _write(self, header: bytes) -> str:
        """Write the weights in the file's order, until the writing is abandoned."""
        sha256, is_put = hashlib.sha256(header), set[str]()
        with self.path.open("wb") as file:
            file.write(header)
            for name, weight in self.tensors.items():
                while name not in is_put:
                    if (one := self._put.get()) is None:
                        return ""
                    is_put.add(one)
                data = weight.flatten().view(torch.uint8).numpy().data
                file.write(data)
                sha256.update(data)
            file.flush()
            os.fsync(file.fileno())
        return sha256.hexdigest()


_meanwhile: dict[Path, _Written] | None = None


@contextmanager
def written_meanwhile() -> Iterator[Callable[[], None]]:
    """Have threads write weights within the block, while the weights are already used from the same memory. The
    function that it yields waits until all are written. Only one thread at a time may use it.
    """
    global _meanwhile
    assert _meanwhile is None
    begun = _meanwhile = dict[Path, _Written]()

    def finish() -> None:
        for path, written in begun.items():
            keep_digest(path, written.finish())

    try:
        yield finish
    finally:
        _meanwhile = None
        for written in begun.values():
            written.abandon()


def _header(layout: Layout, metadata: dict[str, str]) -> tuple[bytes, dict[str, int]]:
    """Header in safetensors' form with its length, and each tensor's bytes in the file's order, widest dtype first."""
    order = {name: number for number, name in enumerate(NUM_BITS)}
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    sizes, end = dict[str, int](), 0
    for name in sorted(layout, key=lambda name: (-order[_CODES[layout[name][0]]], name)):
        code, shape = _CODES[layout[name][0]], layout[name][1]
        sizes[name] = num_bytes_of({name: layout[name]})
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [end, end + sizes[name]]}
        end += sizes[name]
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded, sizes


def _find(weight: Tensor, known: Mapping[str, Tensor]) -> str | None:
    """The name of a known tensor with the same bits as `weight`; None if no known tensor has them."""
    for name, other in known.items():
        if (other.dtype, other.shape) == (weight.dtype, weight.shape) and torch.equal(other, weight):
            return name
    return None


def layout_of(weights: Mapping[str, Tensor]) -> Layout:
    return {name: (str(weight.dtype).removeprefix("torch."), list(weight.shape)) for name, weight in weights.items()}


def num_bytes_of(layout: Layout) -> int:
    return sum(math.prod(shape) * NUM_BITS[_CODES[dtype]] // 8 for dtype, shape in layout.values())


def open_weights(path: Path, wanted: Layout, known: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The file's tensors, in one piece of memory, and the `known` tensors that the file names.

    Raises SafetensorError if the file is damaged, and SpecDecError unless the tensors are those that the step expects,
    since it reads their memory by compiled offsets.
    """
    if _meanwhile is not None and (written := _meanwhile.get(path)) is not None:
        weights = written.tensors | _named(path, written.shared, known or {})
        _check_layout(path, layout_of(weights), wanted)
        return weights
    with path.open("rb") as file:
        header = read_header(file)
        tensors, shared = header.tensors, _shared(path, header.metadata, known or {})
        _check_layout(path, _layout_in(tensors) | layout_of(shared), wanted)
        memory = huge_pages(sum(_aligned(entry.num_bytes) for entry in tensors.values()))
        weights, start = {}, 0
        for name, entry in tensors.items():
            weights[name] = _read(file, entry, memory[start : start + entry.num_bytes])
            start += _aligned(entry.num_bytes)
    return weights | shared


def _layout_in(tensors: dict[str, TensorEntry]) -> Layout:
    return {name: (_NAMES.get(entry.dtype, entry.dtype), list(entry.shape)) for name, entry in tensors.items()}


def _shared(path: Path, metadata: dict[str, str], known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of another step whose names the file has."""
    try:
        names = dict(json.loads(metadata.get(_SHARED, "{}")))
    except (ValueError, TypeError, RecursionError) as error:
        raise SafetensorError(f"`{_SHARED}` does not say which weights are the target's: {error}") from error
    return _named(path, names, known)


def _named(path: Path, names: dict[str, str], known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The known tensors that the file names in place of its own."""
    if missing := sorted(set(names.values()) - set(known)):
        _refuse(path, f"names {len(missing)} weights that the target does not have, such as: {missing[0]}")
    return {name: known[other] for name, other in names.items()}


def read_weights(path: Path) -> dict[str, Tensor]:
    """The file's tensors, each in memory of its own. Raises SafetensorError if the file is damaged. The file is read,
    not mapped, so overwriting it later does not kill the process.
    """
    if _meanwhile is not None and (written := _meanwhile.get(path)) is not None:
        written.finish()
    with path.open("rb") as file:
        return {
            name: _read(file, entry, torch.empty(entry.num_bytes, dtype=torch.uint8))
            for name, entry in _entries(file).items()
        }


def _entries(file: BinaryIO) -> dict[str, TensorEntry]:
    tensors = read_header(file).tensors
    for name, entry in tensors.items():
        if entry.dtype not in DTYPES:
            raise SafetensorError(f"`{name}` has a dtype that no checkpoint has: {entry.dtype}")
    return tensors


def _read(file: BufferedReader, entry: TensorEntry, values: Tensor) -> Tensor:
    """A tensor of the file, made from the bytes `values`."""
    file.seek(entry.start)
    if file.readinto(values.numpy().data) != entry.num_bytes:
        raise SafetensorError("the file ends before its weights do")
    return values.view(DTYPES[entry.dtype]).view(entry.shape)


def _check_layout(path: Path, found: Layout, wanted: Layout) -> None:
    lacking, foreign = sorted(wanted.keys() - found), sorted(found.keys() - wanted)
    if lacking:
        _refuse(path, f"lacks {len(lacking)} of the step's weights, such as: {lacking[0]}")
    if foreign:
        _refuse(path, f"has {len(foreign)} weights that the step does not take, such as: {foreign[0]}")
    for name, (dtype, shape) in wanted.items():
        if found[name] != (dtype, shape):
            _refuse(path, f"has {found[name][0]} {found[name][1]} where the step wants {dtype} {shape}: {name}")


def _refuse(path: Path, problem: str) -> NoReturn:
    raise SpecDecError(f"`{path}` {problem}", hint="build it again", code="engine")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


# --- weights that are in memory while they are read ---


_HUGE_PAGE = 1 << 21
_READ_AT_ONCE = 1 << 30  # bytes: Linux reads no more than 2 GiB
_KEPT_BYTES = 64 << 20  # kept after use: a small model's weights are read once


@dataclass
class _FileMemory:
    """Memory in which each tensor of a file has its place."""

    path: Path
    file: BinaryIO
    stamp: Stamp
    address: int = 0
    entries: dict[int, TensorEntry] = field(default_factory=dict)
    """Entries of the tensors in their file, by the tensors' offsets in the memory."""
    places: list[int] = field(default_factory=list)
    """Offsets in the memory at which tensors begin, in order."""
    num_readers: Counter[int] = field(default_factory=Counter)
    filled: set[int] = field(default_factory=set)
    num_filled_bytes: int = 0

    def place_of(self, tensor: Tensor) -> int:
        """The place in the file of this tensor, which may be a part of a file's tensor."""
        return self.places[bisect_right(self.places, tensor.data_ptr() - self.address) - 1]

    def begin(self, place: int) -> None:
        self.num_readers[place] += 1
        if place not in self.filled:
            self._fill(place)
            self.filled.add(place)
            self.num_filled_bytes += self.entries[place].num_bytes

    def end(self, place: int) -> None:
        self.num_readers[place] -= 1
        if self.num_readers[place] == 0 and place in self.filled and self.num_filled_bytes > _KEPT_BYTES:
            num_bytes = self.entries[place].num_bytes
            give_back_pages(self.address + place, _pages_of(num_bytes))
            self.filled.remove(place)
            self.num_filled_bytes -= num_bytes

    def _fill(self, place: int) -> None:
        entry, done = self.entries[place], 0
        values = memoryview((ctypes.c_ubyte * entry.num_bytes).from_address(self.address + place))
        while done < entry.num_bytes:
            read = os.preadv(self.file.fileno(), [values[done : done + _READ_AT_ONCE]], entry.start + done)
            if not read:
                raise written_over(self.path)
            done += read
        if self.stamp.is_written_over(os.fstat(self.file.fileno())):
            raise written_over(self.path)


class _Mapping(mmap.mmap):
    """Memory whose description is kept as long as there is a tensor in it."""

    known: _FileMemory


_memories: WeakValueDictionary[int, _FileMemory] = WeakValueDictionary()  # by address


def absent_weights(path: Path) -> dict[str, Tensor]:
    """The file's tensors, each at an address of its own: zeros that take no memory, except while they are `present`.
    Raises SafetensorError if the file is damaged. The file is read and not mapped, as by `read_weights`.
    """
    with ExitStack() as stack:
        file = stack.enter_context(path.open("rb"))
        tensors = _entries(file)
        stack.pop_all()  # the file stays open as long as the tensors exist
    sizes = {name: _pages_of(entry.num_bytes) for name, entry in tensors.items()}
    large = [name for name, size in sizes.items() if size >= _HUGE_PAGE]
    small = [name for name, size in sizes.items() if size < _HUGE_PAGE]
    mapping = reserve(_Mapping, _HUGE_PAGE + sum(sizes.values()))
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    known = _FileMemory(path, file, stamp_of(os.fstat(file.fileno())), memory.data_ptr())
    # No two tensors share a huge page: one that is given back could not give back the page.
    end, of_large = -known.address % _HUGE_PAGE, sum(sizes[name] for name in large)
    small_pages(mapping, end + of_large, len(mapping) - end - of_large)
    weights = {}
    for name in (*large, *small):
        entry = known.entries[end] = tensors[name]
        known.places.append(end)
        weights[name] = memory[end : end + entry.num_bytes].view(DTYPES[entry.dtype]).view(entry.shape)
        end += sizes[name]
    mapping.known = known
    _memories[known.address] = known
    return weights


def _pages_of(num_bytes: int) -> int:
    """Bytes of the pages that `num_bytes` bytes occupy; these are huge pages if they need more than one."""
    page = _HUGE_PAGE if num_bytes >= _HUGE_PAGE else mmap.PAGESIZE
    return -(-max(num_bytes, 1) // page) * page


def is_absent(tensor: Tensor) -> bool:
    """True for a tensor whose numbers are in memory only while it is `present`."""
    return _memory_of(tensor) is not None


def _memory_of(tensor: Tensor) -> _FileMemory | None:
    if not isinstance(tensor, Tensor) or type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu":
        return None  # a traced tensor has no memory
    return _memories.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None


@contextmanager
def present(*those: nn.Module | Tensor) -> Iterator[None]:
    """Load the numbers of these tensors, and of all tensors of these modules, within the block. SpecDecError if a file
    has changed since its header was read.
    """
    found = ((memory, tensor) for tensor in tensors_of(those) if (memory := _memory_of(tensor)) is not None)
    places = {(memory.address, memory.place_of(tensor)): memory for memory, tensor in found}
    with ExitStack() as stack:
        for (_, place), memory in sorted(places.items(), key=lambda item: item[0]):
            stack.callback(memory.end, place)
            memory.begin(place)
        yield


def tensors_of(those: Iterable[nn.Module | Tensor]) -> Iterator[Tensor]:
    """All tensors of an iterable of tensors and modules."""
    for one in those:
        if isinstance(one, nn.Module):
            yield from one.parameters()
            yield from one.buffers()
        else:
            yield one


@contextmanager
def layer_by_layer(model: nn.Module, have: Callable[..., AbstractContextManager[None]] = present) -> Iterator[None]:
    """Within the block, call `have` for each layer of the model while that layer is called, also for its embeddings and
    output layer, and for everything else during the whole block.
    """
    layers = list(_layers_of(model))
    inside = {id(module) for layer in layers for module in layer.modules()}
    outside = (module for module in model.modules() if id(module) not in inside)
    layers += [module for module in outside if isinstance(module, nn.Embedding | nn.Linear)]
    of_layers = {id(tensor) for tensor in tensors_of(layers)}
    with ExitStack() as stack:
        stack.enter_context(have(*(one for one in tensors_of([model]) if id(one) not in of_layers)))
        for layer in layers:
            calls: list[ExitStack] = []
            stack.callback(layer.register_forward_pre_hook(partial(_begin_call, have, calls)).remove)
            stack.callback(layer.register_forward_hook(partial(_end_call, calls), always_call=True).remove)
        yield


def _begin_call(
    have: Callable[..., AbstractContextManager[None]], calls: list[ExitStack], layer: nn.Module, inputs: object
) -> None:
    calls.append(ExitStack())
    calls[-1].enter_context(have(layer))


def _end_call(calls: list[ExitStack], layer: nn.Module, inputs: object, outputs: object) -> None:
    calls.pop().close()


def _layers_of(module: nn.Module) -> Iterator[nn.Module]:
    """The modules in the outermost module lists."""
    for child in module.children():
        if isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield child
        else:
            yield from _layers_of(child)
