"""Clients that go away, read slowly or say nothing; and what the process does when it is told to end."""

import gc
import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from forked import Forks, Process
from gate import Gate
from sentences import Said
from serving_models import PROMPT, WAITS, Listening
from waiting import HANG_S, wait_until

from commands.serve.http.server import BoundedProtocol

LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 120, "ignore_eos": True, "temperature": 0}


def send(
    port: int, body: dict[str, Any], path: str = "/v1/completions", *, receive_buffer: int | None = None
) -> socket.socket:
    """A connection on which the request was sent, and nothing was read."""
    connection = socket.socket()
    connection.settimeout(HANG_S)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect(("127.0.0.1", port))
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(raw)}\r\nConnection: close\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


def read_all(connection: socket.socket) -> tuple[int, str]:
    """The status and the rest, as it came."""
    raw = b""
    while chunk := connection.recv(65536):
        raw += chunk
    connection.close()
    return int(raw.split(b" ", 2)[1]), raw.decode()


def texts(raw: str) -> str:
    """The texts of a response in one, whether it was streamed or not."""
    return "".join(re.findall(r'"text":"((?:[^"\\]|\\.)*)"', raw))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_sequences(
    make_listening: Callable[..., Listening], gate: Gate, stream: bool
) -> None:
    listening = make_listening(WAITS)
    loop, engine = listening.model.loop, listening.model.llm.engine
    connection = send(listening.port, LONG | {"stream": stream, "n": 16})
    wait_until(lambda: gate.is_reached)
    connection.close()
    wait_until(lambda: all(answer.is_cancelled for answer in loop.unfinished()))
    gate.open()
    wait_until(lambda: not loop.unfinished())
    assert loop.totals.num_finished == {"abort": 16}
    assert loop.totals.num_generated_tokens <= 4 * 4  # of four that ran, in their fourth step
    assert engine._blocks.num_free_blocks == engine._blocks.num_blocks - 1


def test_a_client_that_reads_slowly_holds_up_nobody(
    make_listening: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer, 480 tokens with 20 log-probabilities each, has half a megabyte, which the buffers cannot hold."""
    monkeypatch.setattr("commands.serve.http.server.READING_S", HANG_S)
    listening = make_listening()
    body = LONG | {"stream": True, "n": 4, "logprobs": 20}
    expected = texts_by_choice(read_all(send(listening.port, body))[1])
    slow = send(listening.port, body, receive_buffer=4096)
    first = slow.recv(1)
    wait_until(lambda: any(connection.flow.write_paused for connection in listening.connections))
    for _ in range(3):
        status, _ = read_all(send(listening.port, LONG | {"max_tokens": 20}))
        assert status == 200
    wait_until(lambda: not listening.model.loop.unfinished())
    assert any(connection.flow.write_paused for connection in listening.connections)
    rest = first
    while chunk := slow.recv(4096):
        rest += chunk
    slow.close()
    assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and texts_by_choice(rest.decode()) == expected


def texts_by_choice(raw: str) -> dict[str, str]:
    """The text of each choice of a stream."""
    found: dict[str, str] = {}
    for index, text in re.findall(r'"index":(\d+),"text":"((?:[^"\\]|\\.)*)"', raw):
        found[index] = found.get(index, "") + text
    assert len(found) > 1
    return found


def test_connections_beyond_the_bound_are_refused_politely(
    make_listening: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commands.serve.http.server.MAX_CONNECTIONS", 5)
    listening = make_listening()
    held = [socket.create_connection(("127.0.0.1", listening.port), timeout=HANG_S) for _ in range(5)]
    wait_until(lambda: read_all(get(listening.port, "/health"))[0] == 503)
    status, raw = read_all(get(listening.port, "/health"))
    assert status == 503 and "retry-after" in raw.lower() and '"too_many_connections"' in raw
    for connection in held:
        connection.close()
    wait_until(lambda: read_all(get(listening.port, "/health"))[0] == 200)


def test_a_connection_that_says_nothing_is_ended(
    make_listening: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commands.serve.http.server.REQUEST_S", 0.2)
    listening = make_listening()
    silent = socket.create_connection(("127.0.0.1", listening.port), timeout=HANG_S)
    halting = socket.create_connection(("127.0.0.1", listening.port), timeout=HANG_S)
    with suppress(ConnectionError):  # it may have been ended by now
        halting.sendall(b"GET /health HT")
    assert is_ended(silent) and is_ended(halting)


SLOW_BODY = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n{"


@pytest.mark.parametrize("begun", [b"GET /health HT", SLOW_BODY.replace(b"/v1/completions", b"/health")])
def test_a_request_that_trickles_is_ended(
    begun: bytes, make_listening: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after another one, whether it is answered before all of it has come or not."""
    monkeypatch.setattr("commands.serve.http.server.REQUEST_S", 0.5)
    listening = make_listening()
    with socket.create_connection(("127.0.0.1", listening.port), timeout=HANG_S) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
        connection.settimeout(0.05)
        connection.sendall(begun)
        wait_until(lambda: is_ended_by(connection, b" "))


def is_ended_by(connection: socket.socket, byte: bytes) -> bool:
    """Send a byte, and see whether there is still somebody who takes it."""
    try:
        connection.sendall(byte)
        return connection.recv(65536) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_answer_that_nobody_reads_is_given_up(
    stream: bool, make_listening: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commands.serve.http.server.READING_S", 0.2)
    listening = make_listening()
    body = LONG | {
        "prompt": "the dog " * 10, "max_tokens": 90, "n": 12, "echo": True, "logprobs": 20, "stream": stream,
    }  # fmt: skip
    connection = send(listening.port, body, receive_buffer=4096)  # half a megabyte, of which the sockets hold less
    wait_until(lambda: not listening.model.loop.unfinished() and listening.model.loop.totals.num_finished)
    wait_until(lambda: not listening.connections)
    with pytest.raises(ConnectionError):
        read_all(connection)


def is_ended(connection: socket.socket) -> bool:
    """Waits for it; also where something was sent that nobody had read."""
    try:
        return connection.recv(10) == b""
    except ConnectionError:
        return True


def test_a_refusal_reaches_a_client_that_is_still_sending(make_listening: Callable[..., Listening]) -> None:
    """A connection that is closed over bytes that nobody read is reset, and its answer lost."""
    listening, long = make_listening(api_key="secret"), {"prompt": "x" * (6 << 20)}
    for path, key, status in (
        ("/v1/completions", "secret", 413),
        ("/v1/nothing", "secret", 404),
        ("/v1/completions", "no", 401),
    ):
        with socket.create_connection(("127.0.0.1", listening.port), HANG_S) as connection:
            raw = json.dumps(long).encode()
            connection.sendall(
                f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
                f"Content-Length: {len(raw)}\r\nConnection: close\r\n\r\n".encode()
            )
            for start in range(0, len(raw), 1 << 18):
                connection.sendall(raw[start : start + (1 << 18)])
            assert read_all(connection)[0] == status


def test_nothing_is_left_of_a_connection_that_ended(
    make_listening: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch
) -> None:
    listening, made, begin = make_listening(), list[weakref.ref[BoundedProtocol]](), BoundedProtocol.connection_made

    def noted(protocol: BoundedProtocol, transport: Any) -> None:
        made.append(weakref.ref(protocol))
        begin(protocol, transport)

    monkeypatch.setattr(BoundedProtocol, "connection_made", noted)
    for _ in range(5):
        assert read_all(get(listening.port, "/health"))[0] == 200

    def are_gone() -> bool:
        gc.collect()
        return not any(one() for one in made)

    assert len(made) == 5
    wait_until(are_gone)


@contextmanager
def process(forks: Forks, engine_dir: Path, *arguments: str, gate: Gate | None = None) -> Iterator[tuple[Process, int]]:
    """`specdec serve` of an engine, perhaps with a gate, and the port that it listens at."""
    command = ["serve", "--engine-dir", str(engine_dir), "--port", "0", *arguments]
    command += ["--drafter", "gate:Waits", "--draft-len-mode", "fixed"] if gate else []
    started = forks.start(*command, environment=os.environ | (gate.environment if gate else {}))
    try:
        for line in started.stderr:
            if found := re.search(r"https?://127\.0\.0\.1:(\d+) \(only this machine", line):
                yield started, int(found[1])
                break
        else:
            raise AssertionError("it did not listen")
    finally:
        started.kill()
        started.wait()
        started.close()


def test_sigterm_refuses_what_is_new_and_finishes_what_runs(forks: Forks, llama_engine_dir: Path, gate: Gate) -> None:
    with process(forks, llama_engine_dir, gate=gate) as (server, port):
        running = send(port, LONG | {"n": 24})
        wait_until(lambda: gate.is_reached)
        server.send_signal(signal.SIGTERM)
        wait_until(lambda: read_all(get(port, "/health"))[0] == 503)
        refused, raw = read_all(send(port, LONG))
        assert refused == 503 and "retry-after: 1" in raw.lower() and "shutting down" in raw
        gate.open()
        status, raw = read_all(running)
        assert status == 200 and raw.count('"finish_reason":"length"') == 24
        assert server.wait(HANG_S) == 0
        assert "Traceback" not in server.stderr.read()


def test_what_is_unfinished_at_the_end_is_told_so(forks: Forks, llama_engine_dir: Path, gate: Gate, said: Said) -> None:
    with process(forks, llama_engine_dir, "--shutdown-timeout", "0.2", gate=gate) as (server, port):
        connections = [send(port, LONG | {"n": 30, "stream": stream}) for stream in (True, True, False, False)]
        wait_until(lambda: len(json.loads(read_all(get(port, "/requests"))[1].split("\r\n\r\n")[1])["data"]) == 120)
        wait_until(lambda: gate.is_reached)
        server.send_signal(signal.SIGTERM)
        answers = [read_all(connection) for connection in connections]  # while the engine stands still
        gate.open()
        assert [status for status, _ in answers] == [200, 200, 503, 503]
        for _, raw in answers:
            assert raw.count('"code":"shutting_down"') == 1 and '"finish_reason":"abort"' not in raw
        assert all(raw.endswith("data: [DONE]\n\n\r\n0\r\n\r\n") for _, raw in answers[:2])
        assert all("retry-after: 1" in raw.lower() for _, raw in answers[2:])
        assert server.wait(HANG_S) == 0
        said(server.stderr.read(), "4")


def test_second_signal_ends_what_is_unfinished(forks: Forks, llama_engine_dir: Path, gate: Gate, said: Said) -> None:
    """The first one says what is waited for. Between the second and the third nothing may be lost."""
    with process(forks, llama_engine_dir, gate=gate) as (server, port):
        connections = [send(port, LONG | {"stream": stream}) for stream in (True, True, False)]
        halting = socket.create_connection(("127.0.0.1", port), timeout=HANG_S)
        halting.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{")
        wait_until(lambda: len(json.loads(read_all(get(port, "/requests"))[1].split("\r\n\r\n")[1])["data"]) == 3)
        wait_until(lambda: gate.is_reached)
        server.send_signal(signal.SIGTERM)
        waits = server.stderr.readline()
        for _ in range(2):
            server.send_signal(signal.SIGINT)
        answers = [read_all(connection) for connection in (*connections, halting)]  # while the engine stands still
        gate.open()
        assert server.wait(HANG_S) == 0
        rest = server.stderr.read()
    said(waits, "3 requests", "30 s")
    assert [status for status, _ in answers] == [200, 200, 503, 503]
    for _, raw in answers:
        assert raw.count('"code":"shutting_down"') == 1 and "Internal Server Error" not in raw
    assert all(raw.endswith("data: [DONE]\n\n\r\n0\r\n\r\n") for _, raw in answers[:2])
    assert "Traceback" not in rest and "interrupted" not in rest
    said(next(line for line in rest.splitlines() if "not finished" in line), "3")


def test_a_client_that_reads_nothing_leaves_no_traceback_at_the_end(forks: Forks, llama_engine_dir: Path) -> None:
    with process(forks, llama_engine_dir, "--shutdown-timeout", "0.2") as (server, port):
        connection = send(port, LONG | {"n": 32, "stream": True, "logprobs": 20}, receive_buffer=4096)
        wait_until(lambda: generated(read_all(get(port, "/metrics"))[1]) > 500)  # half a megabyte
        server.send_signal(signal.SIGTERM)
        assert server.wait(HANG_S) == 0
        connection.close()
        assert "Traceback" not in server.stderr.read()


def generated(metrics: str) -> float:
    found = re.search(r"^vllm:generation_tokens_total\S* (\S+)", metrics, re.MULTILINE)
    assert found is not None
    return float(found[1])


def get(port: int, path: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=HANG_S)
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost:{port}\r\nConnection: close\r\n\r\n".encode())
    return connection


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_over_tls_an_answer_comes_and_nothing_in_the_clear(
    forks: Forks, llama_engine_dir: Path, tmp_path: Path
) -> None:
    certificate, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    names = "subjectAltName=IP:127.0.0.1"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=localhost", "-addext", names, "-out", certificate, "-keyout", key]
    subprocess.run(command, check=True, capture_output=True)
    with process(forks, llama_engine_dir, "--ssl-certfile", certificate, "--ssl-keyfile", key) as (_, port):
        trusted = ssl.create_default_context(cafile=certificate)
        client = http.client.HTTPSConnection("127.0.0.1", port, timeout=HANG_S, context=trusted)
        client.request("POST", "/v1/completions", json.dumps({"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True}))
        answer = client.getresponse()
        assert (answer.status, json.load(answer)["usage"]["completion_tokens"]) == (200, 3)
        client.close()
        with get(port, "/health") as plain:
            assert b"200 OK" not in plain.recv(1000)
        with pytest.raises(ssl.SSLCertVerificationError):
            strict = http.client.HTTPSConnection(
                "127.0.0.1", port, timeout=HANG_S, context=ssl.create_default_context()
            )
            strict.request("GET", "/health")
