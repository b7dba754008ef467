"""A corpus's file that stays open: some bytes are read at a time, and it may be written over meanwhile."""

import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn, overload

from runtime.errors import SpecDecError
from runtime.files import stamp_of

DAMAGED = "make it again"
"""The hint for a file that is not what was written."""
_CHUNK_BYTES = 2**30


class CorpusFile:
    """A file whose bytes are read as they are now, fewer where it was cut: who has read looks at whether it is the
    same."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._descriptor = path, os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        self._stamp = stamp_of(os.fstat(self._descriptor))

    def reader(self, num_bytes: int, base: int) -> Callable[[int], bytes]:
        """Reader of bytes at a position, which is counted in units of four bytes from `base` on."""
        pread, descriptor = os.pread, self._descriptor

        def read(position: int) -> bytes:
            try:
                return pread(descriptor, num_bytes, base + 4 * position)
            except OSError as error:  # by a row that is none of what was opened, too
                self.check_is_the_same()
                raise SpecDecError(
                    f"the corpus cannot be read ({error.strerror}): {self._path}", hint=DAMAGED, code="damaged_corpus"
                ) from error

        return read

    def read(self, start: int, end: int) -> bytes:
        """One call does not read more than 2 GB."""
        starts = range(start, end, _CHUNK_BYTES)
        return b"".join(self.reader(min(_CHUNK_BYTES, end - i), i)(0) for i in starts)

    def check_is_the_same(self) -> None:
        if self._stamp.is_written_over(os.fstat(self._descriptor)):
            raise_replaced(self._path)


class Rows(Sequence[int]):
    """The rows of a suffix array in an open file."""

    def __init__(self, file: CorpusFile, start: int, num_rows: int, row_bytes: int) -> None:
        self._read, self._num_rows, self._scale = file.reader(row_bytes, start), num_rows, row_bytes // 4

    def __len__(self) -> int:
        return self._num_rows

    @overload
    def __getitem__(self, row: int) -> int: ...

    @overload
    def __getitem__(self, row: slice) -> list[int]: ...

    def __getitem__(self, row: int | slice) -> int | list[int]:
        if isinstance(row, slice):
            return [self[one] for one in range(*row.indices(self._num_rows))]
        return int.from_bytes(self._read(row * self._scale), "little", signed=True)


def raise_replaced(path: Path) -> NoReturn:
    raise SpecDecError(f"the corpus was written over while it was read: {path}", hint="start again when it is written")
