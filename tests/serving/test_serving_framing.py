"""Requests that a proxy in front of the server may read otherwise are refused, and their connection is closed.

By RFC 9112: otherwise a second request could be smuggled past the proxy.
"""

import json
import socket
from collections.abc import Callable, Iterator

import pytest
from logged import logged
from serving_models import PROMPT, Listening
from waiting import HANG_S

BODY = json.dumps({"prompt": PROMPT, "max_tokens": 2, "temperature": 0}).encode()
SMUGGLED = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
"""A second request, which is never answered behind a request that is refused."""


@pytest.fixture(scope="module")
def port(listening: Listening) -> int:
    return listening.port


@pytest.fixture(scope="module")
def listening(make_listening_once: Callable[..., Listening]) -> Iterator[Listening]:
    yield make_listening_once()


def exchange(port: int, raw: bytes) -> bytes:
    """All that the server sends for these bytes, until it closes the connection or the second answer is there."""
    with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as connection:
        connection.sendall(raw)
        received = b""
        try:
            while b'"version"' not in received and (data := connection.recv(65536)):
                received += data
        except ConnectionResetError:
            pass
    return received


def head(*lines: bytes, path: bytes = b"/v1/completions", version: bytes = b"HTTP/1.1") -> bytes:
    return b"\r\n".join([b"POST " + path + b" " + version, b"Host: localhost", *lines, b"", b""])


LENGTH = b"Content-Length: %d" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)

FAULTY = {
    "length and chunked": head(LENGTH, CHUNKED) + CHUNKS,
    "chunked and length": head(CHUNKED, LENGTH) + CHUNKS,
    "length 0 and chunked": head(b"Content-Length: 0", CHUNKED) + CHUNKS,
    "two lengths": head(LENGTH, b"Content-Length: 0") + BODY,
    "two lengths in one line": head(LENGTH + b", 0") + BODY,
    "signed length": head(b"Content-Length: +%d" % len(BODY)) + BODY,
    "hexadecimal length": head(b"Content-Length: 0x%x" % len(BODY)) + BODY,
    "length of two numbers": head(b"Content-Length: 1 0") + BODY,
    "length that is empty": head(b"Content-Length:") + BODY,
    "length that is too long": head(b"Content-Length: " + b"9" * 40) + BODY,
    "xchunked": head(b"Transfer-Encoding: xchunked") + CHUNKS,
    "chunked, identity": head(b"Transfer-Encoding: chunked, identity") + CHUNKS,
    "identity, chunked": head(b"Transfer-Encoding: identity, chunked") + CHUNKS,
    "quoted": head(b'Transfer-Encoding: "chunked"') + CHUNKS,
    "vertical tab": head(b"Transfer-Encoding: \x0bchunked") + CHUNKS,
    "chunked twice": head(CHUNKED, CHUNKED) + CHUNKS,
    "space before the colon": head(b"Transfer-Encoding : chunked") + CHUNKS,
    "space before the length's colon": head(b"Content-Length : %d" % len(BODY)) + BODY,
    "chunked in HTTP/1.0": head(CHUNKED, version=b"HTTP/1.0") + CHUNKS,
    "HTTP/2.0": head(LENGTH, version=b"HTTP/2.0") + BODY,
    "HTTP/1.2": head(LENGTH, version=b"HTTP/1.2") + BODY,
    "folded": head(b"X-A: b\r\n c", LENGTH) + BODY,
    "folded by a tab": head(b"X-A: b\r\n\tc", LENGTH) + BODY,
    "folded length": head(b"Content-Length:\r\n %d" % len(BODY)) + BODY,
    "space before the first header": head(LENGTH).replace(b"Host", b" Host") + BODY,
    "all lines in LF": head(LENGTH).replace(b"\r\n", b"\n") + BODY,
    "request line in LF": head(LENGTH).replace(b"HTTP/1.1\r\n", b"HTTP/1.1\n") + BODY,
    "a header in LF": head(LENGTH).replace(b"localhost\r\n", b"localhost\n") + BODY,
    "last line in LF": head(LENGTH)[:-2] + b"\n" + BODY,
    "LF first": b"\n" + head(LENGTH) + BODY,
    "CR alone": head(b"X-A: b\rTransfer-Encoding: chunked", LENGTH) + BODY,
    "NUL in a value": head(b"X-A: b\x00c", LENGTH) + BODY,
    "NUL in a name": head(b"X-\x00A: b", LENGTH) + BODY,
    "no colon": head(b"X-A", LENGTH) + BODY,
    "no name": head(b": b", LENGTH) + BODY,
    "no host": b"GET /version HTTP/1.1\r\n\r\n",
    "two hosts": head(b"Host: other", LENGTH) + BODY,
    "two spaces": head(LENGTH).replace(b"POST ", b"POST  ") + BODY,
}
FAULTY_CHUNKS = {
    "size of 21 digits": b"%021x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY),
    "size beyond 64 bits": b"1%016x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY),
    "signed size": b"+%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY),
    "size with 0x": b"0x%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY),
    "size in LF": b"%x\n%s\r\n0\r\n\r\n" % (len(BODY), BODY),
    "no size": b"\r\n%s\r\n0\r\n\r\n" % BODY,
    "more than its size": b"%x\r\n%s!\r\n0\r\n\r\n" % (len(BODY), BODY),
    "end in LF": b"%x\r\n%s\n0\r\n\r\n" % (len(BODY), BODY),
    "extension in LF": b"%x;a\nb\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY),
    "trailer in LF": b"%x\r\n%s\r\n0\r\nX-A: b\n\r\n" % (len(BODY), BODY),
    "folded trailer": b"%x\r\n%s\r\n0\r\nX-A: b\r\n c\r\n\r\n" % (len(BODY), BODY),
    "last line in LF": b"%x\r\n%s\r\n0\r\n\n" % (len(BODY), BODY),
}


@pytest.mark.parametrize("raw", FAULTY.values(), ids=FAULTY)
def test_faulty_request_is_refused_and_nothing_behind_it_is_read(port: int, raw: bytes) -> None:
    first, _, rest = exchange(port, raw + SMUGGLED).partition(b"\r\n")
    assert first.startswith(b"HTTP/1.1 400 ")
    headers, _, body = rest.partition(b"\r\n\r\n")
    assert b"connection: close" in headers.lower()
    assert json.loads(body)["error"]["code"] == "invalid_http"  # the whole rest: there is no second answer


@pytest.mark.parametrize("name", FAULTY_CHUNKS)
def test_faulty_chunks_end_the_connection(port: int, name: str) -> None:
    received = exchange(port, head(CHUNKED) + FAULTY_CHUNKS[name] + SMUGGLED)
    assert received.startswith(b"HTTP/1.1 4") and received.count(b"HTTP/1.1 ") == 1
    assert (b"a line ends in LF without CR" in received) == (name.endswith("in LF") and name != "end in LF")


def test_a_size_that_ends_in_lf_is_refused_before_more_comes(port: int) -> None:
    assert b"a line ends in LF without CR" in exchange(port, head(CHUNKED) + b"5\n")


def test_faulty_chunks_after_the_answer_leave_no_traceback(port: int) -> None:
    """The path answers before the body has come: nothing more can be said, and the connection is closed."""
    with logged("asyncio") as messages:
        received = exchange(port, head(CHUNKED, path=b"/nothing") + b"3\r\nabc\r\nzz\r\n" + SMUGGLED)
        assert received.count(b"HTTP/1.1 ") <= 1
        with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as connection:
            connection.sendall(head(CHUNKED, path=b"/nothing") + b"3\r\nabc\r\n")
            assert connection.recv(15) == b"HTTP/1.1 404 No"
            connection.sendall(b"zz\r\n" + SMUGGLED)
            while data := connection.recv(65536):
                assert b"HTTP/1.1" not in data
    assert messages == []


RIGHT = {
    "length": head(LENGTH) + BODY,
    "the same length twice": head(LENGTH, LENGTH) + BODY,
    "chunked": head(CHUNKED) + CHUNKS,
    "Chunked": head(b"transfer-encoding:CHUNKED") + CHUNKS,
    "chunks with extensions and a trailer": head(CHUNKED)
    + b"1;a=b\r\n%s\r\n%x\r\n%s\r\n0\r\nX-A: b\r\n\r\n" % (BODY[:1], len(BODY) - 1, BODY[1:]),
    "spaces around a value": head(b"X-A: \t b \t", LENGTH) + BODY,
}


@pytest.mark.parametrize("raw", RIGHT.values(), ids=RIGHT)
def test_right_request_is_answered_and_the_next_one_too(port: int, raw: bytes) -> None:
    received = exchange(port, raw + SMUGGLED)
    assert received.startswith(b"HTTP/1.1 200 ") and received.count(b"HTTP/1.1 200 ") == 2
    assert b'"completion_tokens":2' in received


@pytest.mark.parametrize("size", [1, 7])
def test_request_in_pieces_is_read_as_in_one(port: int, size: int) -> None:
    """Also a faulty request: the LF that ends a line may come without the line before it."""
    for raw, status in ((RIGHT["chunked"], b"200"), (FAULTY["a header in LF"], b"400")):
        with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                for i in range(0, len(raw), size):
                    connection.sendall(raw[i : i + size])
            except ConnectionError:
                assert status == b"400"
                continue
            assert connection.recv(65536).startswith(b"HTTP/1.1 " + status)
