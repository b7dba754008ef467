"""Requests whose end is beyond doubt: a request that two readers of HTTP/1.1 may understand differently is refused.

A proxy and a server that disagree on where a request ends let a client smuggle a second request past the proxy. h11
follows RFC 9112 but allows a few forms of older RFCs. They are refused here: lines that end in LF alone (section 2.2),
folded header lines (section 5.2), Content-Length beside Transfer-Encoding (section 6.3), Transfer-Encoding in HTTP/1.0
(section 6.1), and versions that are neither 1.0 nor 1.1.
"""

from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer

_MAX_SIZE_DIGITS = 15


class StrictConnection(h11.Connection):
    """The server's side of a connection, which raises h11.RemoteProtocolError for requests whose end is in doubt."""

    refused_because = "the request is no valid HTTP/1.1"
    """Message for the client after an error was raised."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER)
        self._receive_buffer = _StrictLines()

    def next_event(self) -> Any:
        try:
            return super().next_event()
        except h11.RemoteProtocolError as error:
            reason = str(error).partition(": bytearray")[0]  # h11 shows the line; the client has it
            self.refused_because = f"the request is no valid HTTP/1.1: {reason}"
            raise

    def _extract_next_receive_event(self) -> Any:
        event = super()._extract_next_receive_event()
        if isinstance(event, h11.Request):
            _check_framing(event)
        return event


class _StrictLines(ReceiveBuffer):
    """Reader of header lines, before a body and after the last chunk, which must end in CRLF and must not continue the
    line before.
    """

    _extracted = bytearray()

    def _extract(self, count: int) -> bytearray:
        self._extracted = super()._extract(count)
        return self._extracted

    def maybe_extract_lines(self) -> list[bytearray] | None:
        lines = super().maybe_extract_lines()
        if lines is None:
            return None
        if self._extracted.count(b"\n") != self._extracted.count(b"\r\n"):
            raise h11.LocalProtocolError("a line ends in LF without CR")
        if any(line.startswith((b" ", b"\t")) for line in lines):
            raise h11.LocalProtocolError("a header line is folded, or begins with a space")
        return lines

    def maybe_extract_next_line(self) -> bytearray | None:
        """The next line, such as the line with a chunk's size. A size of more than 15 digits is refused:
        another reader may see a small number there.
        """
        end = self._data.find(b"\n")
        if end >= 0 and self._data[max(end - 1, 0) : end] != b"\r":
            raise h11.LocalProtocolError("a line ends in LF without CR")
        line = super().maybe_extract_next_line()
        if line is not None and len(line.partition(b";")[0].strip()) > _MAX_SIZE_DIGITS:
            raise h11.LocalProtocolError("the size of a chunk has too many digits")
        return line


def _check_framing(request: h11.Request) -> None:
    """Raise h11.LocalProtocolError for a request whose end readers may see differently."""
    names = {name for name, _ in request.headers}
    if request.http_version not in (b"1.0", b"1.1"):
        raise h11.LocalProtocolError("the versions are 1.0 and 1.1")
    if b"transfer-encoding" in names and b"content-length" in names:
        raise h11.LocalProtocolError("Content-Length and Transfer-Encoding together")
    if b"transfer-encoding" in names and request.http_version == b"1.0":
        raise h11.LocalProtocolError("Transfer-Encoding in HTTP/1.0")
