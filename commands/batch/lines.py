"""The two files of a batch: requests and results.

Requests are OpenAI's batch lines, or plain prompts. Their file is checked before the engine is built, and read again
as requests are answered, since it may be larger than the memory. A request's id is a digest of everything that its
result depends on: the request's own fields, and the `job`, which stands for the model and the settings. So the id of a
result shows whether the result answers this request with this model.

Results are appended as they come, to a file beside the file of results (`results.jsonl.partial`); they are put in order
when all results are there. After a kill the next run takes up the partial file: its results are final, and a torn last
line is cut off. Each result is in the file once, whichever worker made it.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from runtime.util.digests import digest
from runtime.util.errors import SpecDecError
from runtime.util.files import check_regular, new_file, remove_left_over
from runtime.util.reading import parse_json, raise_unreadable, shown

_FORM = 'write {"custom_id", "method", "url", "body"} as OpenAI has it, or {"prompt": "..."}, one a line'
_ID_LEN = 24
_MOST_LINE_BYTES = 64 << 20
"""More bytes than any line needs, even with several prompts that are as long as a model has room for."""
_URLS = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}


@dataclass(frozen=True)
class BatchRequest:
    """A line of the file of requests, as it was read."""

    id: str
    custom_id: str
    method: str
    url: str
    body: Any


@dataclass(frozen=True)
class Place:
    """Position of a request in its file."""

    id: str
    custom_id: str
    line: int
    start: int
    num_bytes: int


@dataclass(frozen=True)
class RequestFile:
    """The requests of a file in order. The file is checked once, and a line is read again when it is needed."""

    path: Path
    job: str
    places: list[Place]

    def read(self, places: Sequence[Place]) -> Iterator[BatchRequest]:
        """Read the requests at these places; SpecDecError if the file has changed."""
        try:
            with self.path.open("rb") as file:
                for place in places:
                    file.seek(place.start)
                    request = parse_line(file.read(place.num_bytes), place.line, self.path, self.job)
                    if request is None or request.id != place.id:
                        raise SpecDecError(
                            f"the file changed while it was read, on line {place.line}: {self.path}",
                            hint="start again when it is written",
                        )
                    yield request
        except OSError as error:
            raise_unreadable(self.path, error)


def look_through(path: Path, job: str) -> RequestFile:
    """Check the file; SpecDecError names a line that is not a request, or that has the `custom_id` of another line."""
    places: list[Place] = []
    lines: dict[str, int] = {}
    start = 0
    check_regular(path)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_MOST_LINE_BYTES + 1), b""), 1):
                if len(line) > _MOST_LINE_BYTES:
                    raise SpecDecError(
                        f"line {number} is longer than {_MOST_LINE_BYTES >> 20} MB: {path}",
                        hint="check that this is the right file",
                    )
                request = parse_line(line, number, path, job)
                if request is not None:
                    first = lines.setdefault(request.custom_id, number)
                    if first != number:
                        raise SpecDecError(
                            f"lines {first} and {number} have the same `custom_id`, {shown(request.custom_id)}: {path}",
                            hint="give each request a `custom_id` of its own",
                        )
                    places.append(Place(request.id, request.custom_id, number, start, len(line)))
                start += len(line)
    except OSError as error:
        raise_unreadable(path, error)
    if not places:
        raise SpecDecError(f"the file has no requests: {path}", hint=_FORM)
    return RequestFile(path, job, places)


def parse_line(line: bytes, number: int, path: Path, job: str) -> BatchRequest | None:
    """Parse a line of the file of requests; None for a line of white space. SpecDecError if it is not a request."""
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        byte = f"its byte {error.start + 1} is 0x{error.object[error.start]:02x}"
        raise SpecDecError(
            f"line {number} is not text in UTF-8, {byte}: {path}",
            hint="save the file as UTF-8",
        ) from None
    if not text.strip():
        return None
    row = parse_json(text.rstrip(), path, first_line=number)  # the end of a cut line is not on the next line
    if not isinstance(row, dict):
        raise SpecDecError(f"line {number} is not a JSON object, {shown(row)}: {path}", hint=_FORM)
    request = _openai_request(row) if "body" in row or "url" in row else _plain_request(row, number)
    for name, value in zip(("custom_id", "method", "url"), request, strict=False):
        if value in (None, ""):
            raise SpecDecError(f"line {number} has no `{name}`: {path}", hint=_FORM)
        if not isinstance(value, str) or not _is_writable(value):
            raise SpecDecError(f"`{name}` on line {number} is not text, {shown(value)}: {path}", hint=_FORM)
    if request[3] is None:
        raise SpecDecError(f"line {number} has neither a `body` nor a `prompt`: {path}", hint=_FORM)
    asked = json.dumps(request, sort_keys=True)
    return BatchRequest(f"batch_req_{digest([job, asked])[:_ID_LEN]}", *request)


def _openai_request(row: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    return row.get("custom_id"), row.get("method", "POST"), row.get("url"), row.get("body")


def _plain_request(row: dict[str, Any], number: int) -> tuple[Any, Any, Any, Any]:
    """A request from a plain prompt, without OpenAI's wrapper. Its `custom_id` is the line number if the
    row has none.
    """
    body = {name: value for name, value in row.items() if name != "custom_id"}
    url = next((url for name, url in _URLS.items() if name in body), None)
    return row.get("custom_id", f"line-{number}"), "POST", url or "none", None if url is None else body


def _is_writable(text: str) -> bool:
    r"""True if UTF-8 can encode the text. It cannot encode half of a surrogate pair, such as `\ud800`, which JSON may
    contain.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_FLUSH_INTERVAL_S = 1.0
_START = b'{"id":"batch_req_'


@dataclass(frozen=True)
class _Line:
    """Position of a result in its file."""

    path: Path
    start: int
    num_bytes: int
    is_error: bool


class Results:
    """Results of the requests at `places`: in the file at `path` and in the partial file beside it, whose lock is
    held.
    """

    def __init__(self, path: Path, partial: Path, file: BinaryIO, places: Sequence[Place]) -> None:
        self.path, self._partial, self._file, self._places = path, partial, file, places
        self._ids = {place.custom_id: place.id for place in places}
        self._lines: dict[str, _Line] = {}
        if path.exists():
            num_bytes = self._read(path)
            if num_bytes != path.stat().st_size:
                raise _not_ours(path, "it holds something else")
        self._is_written = len(self._lines) == len(places)
        file.truncate(self._read(partial))
        self._end = file.seek(0, os.SEEK_END)
        self._flushed_s = time.monotonic()

    @property
    def num_done(self) -> int:
        return len(self._lines)

    @property
    def num_failed(self) -> int:
        """Results with an error, those from before this process included."""
        return sum(line.is_error for line in self._lines.values())

    @property
    def missing(self) -> list[Place]:
        """Requests without a result, in order."""
        return [place for place in self._places if place.id not in self._lines]

    def append(self, request_id: str, line: bytes, *, is_error: bool) -> None:
        """Append a result. A kill of the process does not lose it. A power failure may lose results of the last second,
        or of a longer time if no result has come since.
        """
        if request_id in self._lines:
            return
        self._file.write(line + b"\n")
        self._file.flush()
        self._lines[request_id] = _Line(self._partial, self._end, len(line) + 1, is_error)
        self._end += len(line) + 1
        if time.monotonic() - self._flushed_s > _FLUSH_INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        os.fsync(self._file.fileno())
        self._flushed_s = time.monotonic()

    def finish(self) -> None:
        """Write all results to their file, in the order of the requests, and remove the partial file."""
        if self._is_written:
            remove_left_over(self.path.resolve())  # of a process that was killed after it had renamed the file
        else:
            with new_file(self.path, replace=True) as new, new.open("wb") as output:
                for line in self._in_order():
                    output.write(line)
        self._partial.unlink()

    def leave(self) -> None:
        """Remove the partial file if nothing was written to it, or else flush it."""
        if os.fstat(self._file.fileno()).st_size:  # an interrupt may have come right after a line was written
            self.flush()
        else:
            self._partial.unlink(missing_ok=True)

    def _in_order(self) -> Iterator[bytes]:
        files: dict[Path, BinaryIO] = {}
        try:
            for place in self._places:
                at = self._lines[place.id]
                if at.path not in files:
                    files[at.path] = at.path.open("rb")
                files[at.path].seek(at.start)
                yield files[at.path].read(at.num_bytes)
        finally:
            for file in files.values():
                file.close()

    def _read(self, path: Path) -> int:
        """Read the lines of a file, up to a torn line; returns the number of bytes before it."""
        start = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                result = _result_of(line)
                if result is None:
                    if number == 1 and not _is_torn(line):
                        raise _not_ours(path, "line 1 is no result of a batch")
                    break
                request_id, custom_id, is_error = result
                self._check(request_id, custom_id, f"line {number} answers {shown(custom_id)}", path)
                self._lines.setdefault(request_id, _Line(path, start, len(line), is_error))
                start += len(line)
        return start

    def _check(self, request_id: str, custom_id: str, answers: str, path: Path) -> None:
        wanted = self._ids.get(custom_id)
        if wanted is None:
            raise _not_ours(path, f"{answers}, which is not among the requests")
        if wanted != request_id:
            raise _not_ours(path, f"{answers}, asked otherwise or of another model")


@contextmanager
def open_results(path: Path, places: Sequence[Place]) -> Iterator[Results]:
    """Open the results of a batch. SpecDecError if the file has results of other requests, cannot be written, or is
    being written by another process.
    """
    partial = path.with_name(f"{path.name}.partial")
    if path.exists() and not path.is_file():
        raise SpecDecError(f"cannot write the file (not a regular file): {path}", hint="choose another path")
    with _locked(partial) as file:
        try:
            results = Results(path, partial, file, places)
        except OSError as error:
            raise_unreadable(path, error)
        except SpecDecError:
            if not partial.stat().st_size:
                partial.unlink()
            raise
        try:
            yield results
        finally:
            if partial.exists():
                results.leave()


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """The file at `path`, created if missing, with exclusive access in the block."""
    while True:
        try:
            file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        except OSError as error:
            raise SpecDecError(
                f"cannot write the file ({error.strerror}): {path}", hint="choose another path"
            ) from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SpecDecError(
                    f"another process is writing these results: {path}", hint="wait for it, or choose another file"
                ) from None
            except OSError as error:  # on a network's disk, for example: two processes could write there at once
                if not os.fstat(file.fileno()).st_size:
                    path.unlink(missing_ok=True)
                raise SpecDecError(
                    f"the file cannot be locked ({error.strerror}): {path}", hint="choose a path on another disk"
                ) from None
            # Another process may have finished and removed the file before it was locked.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    yield file
                    return


def _result_of(line: bytes) -> tuple[str, str, bool] | None:
    """The result on a complete line: its id, its `custom_id`, and True for an error. None for a torn line, or a line
    with other content.
    """
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
        request_id, custom_id, is_error = row["id"], row["custom_id"], row.get("error") is not None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return (request_id, custom_id, is_error) if isinstance(request_id, str) and isinstance(custom_id, str) else None


def _is_torn(line: bytes) -> bool:
    """True if a line may be the beginning of a result that was not written to its end. After a power failure it may be
    zeros.
    """
    beginning = line.rstrip(b"\0\n")
    return beginning.startswith(_START) or _START.startswith(beginning)


def _not_ours(path: Path, reason: str) -> SpecDecError:
    return SpecDecError(
        f"the results belong to another file of requests, or to other settings ({reason}): {path}",
        hint="choose another file for the results, or remove this one",
    )
