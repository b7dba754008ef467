"""A store of token sequences on disk, in which the occurrences of any n-gram are found by binary search.

A corpus is one safetensors file with two tensors. `tokens` (int32) has the documents one after the other, each closed
by -1. `suffix_array` has the start of every suffix of every document, sorted by the suffixes' bytes as they lie in the
file. This is not the order of the ids, but it also puts an n-gram's occurrences side by side, and lets bytes of the
file be compared without converting them. The closing -1 is all ones and sorts behind every token. So in a range of
occurrences, those at the end of a document come last, and are left out.

A file of up to 256 MB is read into memory, so that later changes of the file do not matter. From a larger file a lookup
reads the bytes it needs. The file is not mapped: reading a mapped file that was shortened would kill the process.
"""

import hashlib
import json
import os
import struct
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from functools import lru_cache
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn, overload

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file

from runtime.checkpoint.checksums import document_digest
from runtime.checkpoint.config import Size, as_json, parse
from runtime.util.digests import Range, file_digest, read_digest
from runtime.util.errors import SpecDecError
from runtime.util.files import check_regular, new_file, stamp_of
from runtime.util.tensor_file import read_header, read_metadata

_AGAIN = "make it again"
_CHUNK_BYTES = 2**30


class CorpusFile:
    """An open file whose bytes are read at each call. If the file was shortened, fewer bytes are returned; so the
    caller has to call `check_is_the_same`.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._descriptor = path, os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        self._stamp = stamp_of(os.fstat(self._descriptor))

    def reader(self, num_bytes: int, base: int) -> Callable[[int], bytes]:
        """Function that reads bytes at a position; positions count units of four bytes from `base`."""
        pread, descriptor = os.pread, self._descriptor

        def read(position: int) -> bytes:
            try:
                return pread(descriptor, num_bytes, base + 4 * position)
            except OSError as error:  # also if a row of the suffix array points outside the file
                self.check_is_the_same()
                raise _damaged(f"the corpus cannot be read ({error.strerror})", self._path) from error

        return read

    def read(self, start: int, end: int) -> bytes:
        """Bytes `start` to `end`, read in several calls, since a call of the system reads at most 2 GB."""
        starts = range(start, end, _CHUNK_BYTES)
        return b"".join(self.reader(min(_CHUNK_BYTES, end - i), i)(0) for i in starts)

    def check_is_the_same(self) -> None:
        if self._stamp.is_written_over(os.fstat(self._descriptor)):
            _raise_replaced(self._path)


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


def _raise_replaced(path: Path) -> NoReturn:
    raise SpecDecError(f"the corpus was written over while it was read: {path}", hint="start again when it is written")


def _damaged(problem: str, path: Path) -> SpecDecError:
    return SpecDecError(f"{problem}: {path}", hint=_AGAIN, code="damaged_corpus")


CORPUS_FORMAT_VERSION = 2  # 1: its metadata had no digest
_CLOSING = b"\xff\xff\xff\xff"
_TOKEN_BYTES = 4
_MIN_SHARE = 8  # one in this many
_NUM_READ = 32  # rows read one by one
_NUM_KEPT = 4096
_MAX_BYTES_COPIED = 256 * 2**20  # takes a quarter of a second to open
_DTYPES = {"tokens": ("I32",), "suffix_array": ("I32", "I64")}
_KEY = "specdec_corpus"  # of the file's metadata
_INFO_DIGEST = "info_digest"
_CHANGED = "the corpus is damaged, its content has changed"

Array = NDArray[Any]


@dataclass(frozen=True)
class CorpusInfo:
    """Metadata of a corpus. `content_digest` covers both tensors, `info_digest` all other fields."""

    vocab_size: Size
    tokenizer_digest: str
    num_documents: Size
    num_tokens: Size
    content_digest: str
    info_digest: str = ""
    format_version: int = CORPUS_FORMAT_VERSION


class Match(NamedTuple):
    """The occurrences of an n-gram that have a token behind them: rows `start` to `end` of the suffix array."""

    ngram_size: int
    start: int
    end: int

    @property
    def num_occurrences(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class NgramCounts:
    """The n-grams of one size: occurrences, different n-grams, and those that occur more than once."""

    ngram_size: int
    num_occurrences: int
    num_distinct: int
    num_repeated: int


class Continuation(NamedTuple):
    """A token that followed a match, and the number of times that it did."""

    token: int
    num_occurrences: int


class _Run(NamedTuple):
    """Rows of the suffix array in which the same token follows the match."""

    token: int
    start: int
    end: int


class Corpus:
    """An open corpus. A lookup in a file that was not read into memory reads only the bytes that it needs."""

    def __init__(self, path: Path, info: CorpusInfo, data: bytes | CorpusFile, offsets: dict[str, Range]) -> None:
        self.path, self.info, self._bytes = path, info, data
        self._offsets, (self._first, _) = offsets, offsets["tokens"]
        self.num_bytes = max(end for _, end in offsets.values())
        start, end = offsets["suffix_array"]
        row_bytes = (end - start) // info.num_tokens
        self._rows: Sequence[int]
        if isinstance(data, CorpusFile):
            self._rows = Rows(data, start, info.num_tokens, row_bytes)
        else:
            self._rows = memoryview(data)[start:end].cast("i" if row_bytes == 4 else "q")
        # The runs of the most frequent n-grams take longest to find, and are asked for most often.
        self._runs = lru_cache(_NUM_KEPT)(self._find_runs)
        self._rows_of = lru_cache(None)(self._find_rows)  # as many as there are tokens

    @classmethod
    def open(cls, path: Path) -> "Corpus":
        """The corpus in a file. SpecDecError if the file does not exist, is not a corpus, has another format, or has
        changed since it was written. The digest of a file is computed again only if the file has changed.
        """
        with _open_file(path) as file:
            stamp = stamp_of(os.fstat(file.fileno()))
            info, offsets = _read_info(file, path)
            if file_digest(path, _content_ranges(offsets)) != info.content_digest:
                raise _damaged(_CHANGED, path)
            data: bytes | CorpusFile = CorpusFile(path, file)
            num_bytes = max(end for _, end in offsets.values())
            if isinstance(data, CorpusFile) and num_bytes <= _MAX_BYTES_COPIED:
                data = data.read(0, num_bytes)
                if len(data) < num_bytes:  # it is shorter by now
                    _raise_replaced(path)
            corpus = cls(path, info, data, offsets)
            if stamp_of(path.stat()) != stamp:
                _raise_replaced(path)
            return corpus

    @classmethod
    def of(cls, name: str, documents: Iterable[Sequence[int] | Array], vocab_size: int, tokenizer: str) -> "Corpus":
        """A corpus in memory alone. `tokenizer` is the tokenizer's digest. SpecDecError as for `write_corpus`."""
        path = Path(name)
        tokens, num_documents = _joined(path, documents, vocab_size)
        rows = suffix_array(tokens)
        info = CorpusInfo(vocab_size, tokenizer, num_documents, len(rows), content_digest="")
        offsets = {"tokens": (0, tokens.nbytes), "suffix_array": (tokens.nbytes, tokens.nbytes + rows.nbytes)}
        return cls(path, info, tokens.tobytes() + rows.tobytes(), offsets)

    def check_is_the_same(self) -> None:
        """SpecDecError if a large file was shortened or overwritten since it was opened, since its bytes are read when
        they are needed. A new file under the same name does no harm.
        """
        if isinstance(self._bytes, CorpusFile):
            self._bytes.check_is_the_same()

    def check_content(self) -> None:
        """SpecDecError unless every byte is as it was written. It always reads the whole file."""
        if read_digest(self.path, _content_ranges(self._offsets)) != self.info.content_digest:
            raise _damaged(_CHANGED, self.path)

    def documents(self) -> list[Array]:
        """The token ids of each document."""
        tokens = self._array("tokens")
        ends = np.flatnonzero(tokens < 0)
        return [document[:-1] for document in np.split(tokens, ends[:-1] + 1)]

    def ngram_counts(self, max_size: int) -> list[NgramCounts]:
        """Counts of n-grams of each size up to `max_size`. Reads the whole file."""
        counts, text, rows = [], self._array("tokens"), self._array("suffix_array")
        is_whole = np.ones(self.info.num_tokens, dtype=bool)  # rows whose documents continue for this many tokens
        is_same = np.append(False, is_whole[1:])  # rows that share this many tokens with the one before
        for size in range(1, max_size + 1):
            tokens = text[np.minimum(rows + (size - 1), len(text) - 1)]
            is_whole &= tokens >= 0
            is_same &= is_whole & (tokens == np.roll(tokens, 1))
            num_occurrences, num_same = int(is_whole.sum()), int(is_same.sum())
            starts_run = is_same & ~np.roll(is_same, 1)
            counts.append(NgramCounts(size, num_occurrences, num_occurrences - num_same, int(starts_run.sum())))
        return counts

    def longest_match(self, tail: Sequence[int], max_size: int, min_size: int = 1) -> Match | None:
        """The occurrences, with a token behind them, of the longest suffix of `tail` that has `min_size` to `max_size`
        tokens; None if no such suffix occurs.

        If an n-gram occurs, its suffixes occur too, so the size is found by bisection. SpecDecError as from
        `check_is_the_same`.
        """
        encoded = _encode(tail[-max_size:])
        found: tuple[int, int] | None = None
        low, high = min_size, len(encoded) // _TOKEN_BYTES
        size = high
        while low <= high:
            start = self._first_row(encoded, size)
            if start is None:
                high = size - 1
            else:
                found, low = (size, start), size + 1
            size = (low + high + 1) // 2
        match = None
        if found is not None:
            size, start = found
            match = Match(size, start, self._end_row(encoded[-_TOKEN_BYTES * size :], start))
        self.check_is_the_same()  # afterwards, so that it covers all bytes that were read
        return match

    def continuation(self, match: Match, max_len: int) -> list[Continuation]:
        """The most frequent continuation: the most frequent next token, then the most frequent token after that, and so
        on.

        It ends where documents end, and before a token that followed in less than an eighth of the occurrences.
        """
        found: list[Continuation] = []
        while match.num_occurrences and len(found) < max_len:
            common = self._common_tokens(match, max_len - len(found))
            found += [Continuation(token, match.num_occurrences) for token in common]
            match = self._without_ends(match._replace(ngram_size=match.ngram_size + len(common)))
            if len(found) == max_len or not match.num_occurrences:
                break
            if not (runs := self._runs(match)):
                break
            best = runs[0]
            found.append(Continuation(best.token, best.end - best.start))
            match = self._without_ends(Match(match.ngram_size + 1, best.start, best.end))
        self.check_is_the_same()
        return found

    def _first_row(self, encoded: bytes, size: int) -> int | None:
        """The first row of the last `size` tokens of `encoded`; None if no token ever follows them."""
        pattern = encoded[len(encoded) - _TOKEN_BYTES * size :]
        start, stop = self._rows_of(pattern[:_TOKEN_BYTES])
        row = bisect_left(self._rows, pattern, start, stop, key=self._reader(len(pattern)))
        if row == stop:
            return None
        here = self._reader(len(pattern) + _TOKEN_BYTES)(self._rows[row])
        return row if here.startswith(pattern) and not here.endswith(_CLOSING) else None

    def _end_row(self, pattern: bytes, start: int) -> int:
        """The row after the last one, from `start` on, in which a token follows the pattern."""
        closed = pattern + _CLOSING
        _, stop = self._rows_of(pattern[:_TOKEN_BYTES])
        return bisect_left(self._rows, closed, start, stop, key=self._reader(len(closed)))

    def _find_rows(self, token: bytes) -> tuple[int, int]:
        """The first row of a token, and the row after its last."""
        read = self._reader(_TOKEN_BYTES)
        start = bisect_left(self._rows, token, key=read)
        return start, bisect_right(self._rows, token, start, key=read)

    def _without_ends(self, match: Match) -> Match:
        """The match without the rows in which the document ends behind it."""
        read = self._reader(_TOKEN_BYTES, match.ngram_size)
        if read(self._rows[match.end - 1]) != _CLOSING:
            return match
        return match._replace(end=bisect_left(self._rows, _CLOSING, match.start, match.end, key=read))

    def _common_tokens(self, match: Match, max_len: int) -> list[int]:
        """Tokens with which all continuations begin: those that the first and the last of the sorted rows share."""
        read = self._reader(_TOKEN_BYTES * max_len, match.ngram_size)
        first, last = (_decode(read(self._rows[row])) for row in (match.start, match.end - 1))
        common = takewhile(lambda pair: pair[0] == pair[1] >= 0, zip(first, last, strict=False))
        return [token for token, _ in common]

    def _find_runs(self, match: Match) -> list[_Run]:
        """Runs of rows with the same next token, the longest first.

        Rows are sorted, so such rows are side by side. Rows are probed at distances of at most an eighth of their
        number, so that no run of that length is missed.
        """
        read = self._reader(_TOKEN_BYTES, match.ngram_size)
        step = match.num_occurrences // _MIN_SHARE if match.num_occurrences > _NUM_READ else 1
        next_tokens = [read(position) for position in self._rows[match.start : match.end : step]]
        runs, probe = [], match.start
        for token, group in groupby(next_tokens):
            start, probe = probe, probe + step * len(list(group))
            end = min(probe, match.end)
            if step > 1:
                start = bisect_left(self._rows, token, max(match.start, start - step), start, key=read)
                end = bisect_right(self._rows, token, probe - step, end, key=read)
            if (end - start) * _MIN_SHARE >= match.num_occurrences:
                runs.append(_Run(int.from_bytes(token, "little"), start, end))
        return sorted(runs, key=lambda run: (run.start - run.end, run.token))

    def _reader(self, num_bytes: int, depth: int = 0) -> Callable[[int], bytes]:
        """Function that reads a suffix's bytes from `depth` tokens on."""
        data, base = self._bytes, self._first + _TOKEN_BYTES * depth
        if isinstance(data, CorpusFile):
            return data.reader(num_bytes, base)
        return lambda position: data[(start := base + 4 * position) : start + num_bytes]

    def _array(self, name: str) -> Array:
        """A whole tensor, in memory."""
        start, end = self._offsets[name]
        data = self._bytes.read(start, end) if isinstance(self._bytes, CorpusFile) else self._bytes[start:end]
        self.check_is_the_same()
        row_bytes = (end - start) // self.info.num_tokens if name == "suffix_array" else _TOKEN_BYTES
        return np.frombuffer(data, dtype=f"<i{row_bytes}")


def write_corpus(
    path: Path, documents: Iterable[Sequence[int] | Array], *, vocab_size: int, tokenizer_digest: str, replace: bool
) -> CorpusInfo:
    """Write a corpus of these documents, completely or not at all; SpecDecError for an empty or invalid document."""
    tokens, num_documents = _joined(path, documents, vocab_size)
    rows = suffix_array(tokens)
    digest = _content_digest(tokens, rows)
    info = CorpusInfo(vocab_size, tokenizer_digest, num_documents, len(rows), digest)
    info = replace_fields(info, info_digest=document_digest(as_json(info), _INFO_DIGEST))
    metadata = {_KEY: json.dumps(as_json(info))}
    with new_file(path, replace=replace) as temporary:
        save_file({"tokens": tokens, "suffix_array": rows}, temporary, metadata=metadata)
    return info


def _joined(path: Path, documents: Iterable[Sequence[int] | Array], vocab_size: int) -> tuple[Array, int]:
    """The documents' tokens, each document closed by -1, and the number of documents."""
    pieces = []
    for number, document in enumerate(documents, 1):
        tokens = np.asarray(document, dtype=np.int64)
        if not len(tokens):
            raise SpecDecError(f"document {number} has no tokens", hint="leave it out")
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            outside = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
            raise SpecDecError(
                f"document {number} has an id outside the vocabulary of {vocab_size}: {outside}",
                hint="a corpus holds tokens of one tokenizer",
            )
        pieces.append(np.append(tokens, -1).astype("<i4"))
    if not pieces:
        raise SpecDecError(f"a corpus needs a document: {path}", hint="give it a text or traces")
    return np.concatenate(pieces), len(pieces)


def merge_corpora(path: Path, corpora: Sequence[Corpus], *, replace: bool) -> CorpusInfo:
    """Write the documents of several corpora into one; SpecDecError unless all have the same tokenizer."""
    first = corpora[0]
    for corpus in corpora:
        if corpus.info.tokenizer_digest != first.info.tokenizer_digest:
            raise SpecDecError(
                f"the corpora have different tokenizers: {first.path} and {corpus.path}",
                hint="make them with the same tokenizer",
                code="corpora_of_two_tokenizers",
            )
    return write_corpus(
        path,
        [document for corpus in corpora for document in corpus.documents()],
        vocab_size=first.info.vocab_size,
        tokenizer_digest=first.info.tokenizer_digest,
        replace=replace,
    )


def suffix_array(tokens: Array) -> Array:
    """Start positions of the suffixes of the documents in `tokens`, in byte order; int32 if that is enough.

    They are sorted by prefix doubling: once suffixes are sorted by their first n tokens, the ranks of both halves sort
    them by 2n tokens; suffixes that differ already keep their places. Each closing -1 counts as different from all
    others, so a comparison never continues into the next document, and equal suffixes keep the order of their
    documents.
    """
    active, closings = np.flatnonzero(tokens >= 0), np.flatnonzero(tokens < 0)
    num_rows, num_compared = len(active), 1
    rows, suffixes = np.arange(num_rows), np.empty(num_rows, dtype=np.int64)
    ranks = np.empty(len(tokens), dtype=np.int64)
    ranks[closings] = num_rows + np.arange(len(closings))
    keys = tokens[active].astype("<u4").view(">u4").astype(np.int64)  # compared as bytes are
    while True:
        order = np.argsort(keys)
        active, keys = active[order], keys[order]
        is_first = np.append(True, keys[1:] != keys[:-1])
        suffixes[rows] = active
        ranks[active] = rows[np.maximum.accumulate(np.where(is_first, np.arange(len(rows)), 0))]
        is_tied = ~(is_first & np.append(is_first[1:], True))
        rows, active = rows[is_tied], active[is_tied]
        if not len(rows):
            return suffixes.astype("<i4" if len(tokens) < 2**31 else "<i8")
        keys = ranks[active] * len(tokens) + ranks[active + num_compared]
        num_compared *= 2


def is_corpus(path: Path) -> bool:
    """True if the file says that it is a corpus, whatever its format and however damaged it is."""
    check_regular(path)
    try:
        with path.open("rb") as file:
            return _KEY in read_metadata(file)
    except (OSError, SafetensorError):
        return False


def _open_file(path: Path) -> BinaryIO:
    if path.is_dir():
        raise SpecDecError(f"a corpus is a file, and this is a directory: {path}", hint="name the file")
    check_regular(path)
    if not path.is_file():
        raise SpecDecError(
            f"there is no such corpus: {path}", hint="make a corpus from texts or traces", code="no_corpus"
        )
    return path.open("rb")


def _read_info(file: BinaryIO, path: Path) -> tuple[CorpusInfo, dict[str, Range]]:
    """Read the open file's metadata and the positions of its tensors."""
    try:
        header = read_header(file)
    except SafetensorError as error:
        whole = "the corpus is damaged or cut off" if is_corpus(path) else "this is not a corpus"
        raise _damaged(f"{whole} ({error})", path) from None
    if _KEY not in header.metadata:
        raise SpecDecError(f"this is not a corpus: {path}", hint="make a corpus from texts or traces", code="no_corpus")
    try:
        record = json.loads(header.metadata[_KEY])
        info = parse(CorpusInfo, record, str(path))
    except (ValueError, RecursionError) as error:
        raise _damaged(f"the corpus is damaged ({error})", path) from None
    except SpecDecError as error:
        raise SpecDecError(error.message, hint=_AGAIN, code="damaged_corpus") from None
    if info.info_digest != document_digest(record, _INFO_DIGEST):
        raise _damaged("the corpus is damaged, its metadata has changed", path)
    offsets = {}
    lengths = {"tokens": info.num_tokens + info.num_documents, "suffix_array": info.num_tokens}
    for name, dtypes in _DTYPES.items():
        tensor = header.tensors.get(name)
        if tensor is None or tensor.dtype not in dtypes or tensor.shape != (lengths[name],) or not info.num_tokens:
            problem = f"the corpus is damaged, `{name}` is missing or has another size than its metadata says"
            raise _damaged(problem, path)
        offsets[name] = (tensor.start, tensor.end)
    return info, offsets


def _content_ranges(offsets: dict[str, Range]) -> list[Range]:
    """Byte ranges covered by `content_digest`."""
    return [offsets["tokens"], offsets["suffix_array"]]


def _content_digest(tokens: Array, rows: Array) -> str:
    sha256 = hashlib.sha256(np.ascontiguousarray(tokens).data)
    sha256.update(np.ascontiguousarray(rows).data)
    return sha256.hexdigest()


def _encode(tokens: Sequence[int]) -> bytes:
    """Tokens as the bytes that the file has."""
    return struct.pack(f"<{len(tokens)}i", *tokens)


def _decode(data: bytes) -> list[int]:
    """The inverse of `_encode`; an incomplete token at the end is dropped."""
    return list(struct.unpack_from(f"<{len(data) // _TOKEN_BYTES}i", data))
