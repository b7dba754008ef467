"""Containers that count what is read of them: what a step costs, on any machine."""

from collections.abc import Iterator
from typing import Any


class Reads:
    """How many items were read, of all the containers that it was given to."""

    def __init__(self) -> None:
        self.number = 0


class CountingList(list[Any]):
    """A list whose items are read one by one or by slices, and never all of them."""

    def __init__(self, items: list[Any], reads: Reads) -> None:
        super().__init__(items)
        self.reads = reads

    def __getitem__(self, index: Any) -> Any:
        item = super().__getitem__(index)
        self.reads.number += len(item) if isinstance(index, slice) else 1
        return item

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("the whole list is read")


class CountingBuffer:
    """Memory, or a view of it, in the same way."""

    def __init__(self, buffer: Any, reads: Reads) -> None:
        self.buffer, self.reads = buffer, reads

    def __len__(self) -> int:
        return len(self.buffer)

    def __getitem__(self, index: Any) -> Any:
        self.reads.number += len(range(*index.indices(len(self.buffer)))) if isinstance(index, slice) else 1
        return self.buffer[index]
