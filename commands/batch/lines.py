"""A file of requests: OpenAI's batch lines, or plain prompts. It is read twice, since it may be larger than the memory.

A request's id is a digest of all that its result depends on: what is asked, and the `job`, which stands for the model
and the settings. So a result tells by its id whether it is of this request, asked of this model.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.cache import digest
from runtime.errors import SpecDecError
from runtime.reading import parse_json, raise_unreadable, shown

_FORM = 'write {"custom_id", "method", "url", "body"} as OpenAI has it, or {"prompt": "..."}, one a line'
_ID_LEN = 24
_URLS = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}


@dataclass(frozen=True)
class BatchRequest:
    """One line, as it was asked."""

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
    """The requests of a file in order, looked through once, and read again as they are needed."""

    path: Path
    job: str
    places: list[Place]

    def read(self, places: Sequence[Place]) -> Iterator[BatchRequest]:
        """Requests at these places; SpecDecError if the file is no longer what it was."""
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
    """SpecDecError names the line of what is no request, or has the `custom_id` of another."""
    places: list[Place] = []
    lines: dict[str, int] = {}
    start = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                request = parse_line(line, number, path, job)
                if request is not None:
                    first = lines.setdefault(request.custom_id, number)
                    if first != number:
                        raise SpecDecError(
                            f"lines {first} and {number} have one `custom_id`, {shown(request.custom_id)}: {path}",
                            hint="give each request its own",
                        )
                    places.append(Place(request.id, request.custom_id, number, start, len(line)))
                start += len(line)
    except OSError as error:
        raise_unreadable(path, error)
    if not places:
        raise SpecDecError(f"the file has no requests: {path}", hint=_FORM)
    return RequestFile(path, job, places)


def parse_line(line: bytes, number: int, path: Path, job: str) -> BatchRequest | None:
    """None for a line of white space."""
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise SpecDecError(
            f"not UTF-8 text at line {number}, byte {error.start + 1} of it: {path}", hint="save the file as UTF-8"
        ) from None
    if not text.strip():
        return None
    row = parse_json(text, path, first_line=number)
    if not isinstance(row, dict):
        raise SpecDecError(f"line {number} is not a JSON object, {shown(row)}: {path}", hint=_FORM)
    request = _openai_request(row) if "body" in row or "url" in row else _plain_request(row, number)
    for name, value in zip(("custom_id", "method", "url"), request, strict=False):
        if not isinstance(value, str) or not value or not _is_writable(value):
            raise SpecDecError(f"`{name}` on line {number} is no text, {shown(value)}: {path}", hint=_FORM)
    if request[3] is None:
        raise SpecDecError(f"line {number} has neither a `body` nor a `prompt`: {path}", hint=_FORM)
    asked = json.dumps(request, sort_keys=True)
    return BatchRequest(f"batch_req_{digest([job, asked])[:_ID_LEN]}", *request)


def _openai_request(row: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    return row.get("custom_id"), row.get("method", "POST"), row.get("url"), row.get("body")


def _plain_request(row: dict[str, Any], number: int) -> tuple[Any, Any, Any, Any]:
    """A body without what OpenAI has around it; its name, if it has none, is its line's."""
    body = {name: value for name, value in row.items() if name != "custom_id"}
    url = next((url for name, url in _URLS.items() if name in body), None)
    return row.get("custom_id", f"line-{number}"), "POST", url or "none", None if url is None else body


def _is_writable(text: str) -> bool:
    """True if UTF-8 can encode it: JSON may contain a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
