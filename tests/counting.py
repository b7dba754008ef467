"""A container that counts what is read of it: what a step costs, on any machine."""

from typing import Any


class Reads:
    """Number of items that were read, of all the containers that it was given to."""

    def __init__(self) -> None:
        self.number = 0


class CountingBuffer:
    """Memory, or a view of it, whose items are read one by one or by slices, and never all of them."""

    def __init__(self, buffer: Any, reads: Reads) -> None:
        self.buffer, self.reads = buffer, reads

    def __len__(self) -> int:
        return len(self.buffer)

    def __getitem__(self, index: Any) -> Any:
        self.reads.number += len(range(*index.indices(len(self.buffer)))) if isinstance(index, slice) else 1
        return self.buffer[index]
