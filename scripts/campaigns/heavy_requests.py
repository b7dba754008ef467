"""Time that heavy requests make a polite client of the same server wait.

While each kind of request is answered, one client asks for `/health` again and again, and another reads a stream.
Prints a Markdown table with the longest wait of either, beside that of the second before.

    specdec serve --model-dir demo --port 8000
    python -m scripts.campaigns.heavy_requests [--port 8000] [--n 100]
"""

import argparse
import json
import time
from contextlib import closing
from http.client import HTTPConnection
from threading import Thread
from typing import Any

HOST, TIMEOUT_S = "127.0.0.1", 300
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def heavy_requests(n: int) -> dict[str, tuple[str, dict[str, Any]]]:
    text = "def function(x):\n    return x + 1\n\n" * 100
    echo = {"prompt": text, "echo": True, "logprobs": 20, "n": n, "max_tokens": 1}
    properties = {f"k{i}": {"enum": [f"v{i}{j}" for j in range(20)]} for i in range(900)}
    texts = {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 9}
    biases = {str(token): -1 for token in range(1000)}
    return {
        f"echo with log-probabilities, {n} outputs": (COMPLETIONS, echo),
        "the same, streamed": (COMPLETIONS, echo | {"stream": True}),
        f"{n} outputs of 200 tokens with log-probabilities": (
            COMPLETIONS,
            {"prompt": "a", "logprobs": 20, "n": n, "max_tokens": 200, "ignore_eos": True},
        ),
        f"{n} outputs with 1,000 biases": (
            COMPLETIONS,
            {"prompt": "a", "n": n, "max_tokens": 100, "logit_bias": biases},
        ),
        "a schema of 230 KB": (COMPLETIONS, {"prompt": "a", "json_schema": {"properties": properties}}),
        "an expression without an end": (COMPLETIONS, {"prompt": "a", "regex": "(a{1000}){1000}"}),
        "an expression whose end is far": (COMPLETIONS, {"prompt": "a", "regex": "[xy](a{1000}){1000}"}),
        "an expression of many states": (
            COMPLETIONS,
            {"prompt": "a", "regex": "(.*a.{30}b)*", "max_tokens": 200, "ignore_eos": True},
        ),
        f"{n} outputs by a schema": (COMPLETIONS, {"prompt": "a", "json_schema": texts, "n": n, "max_tokens": 100}),
        "a chat of 4,096 messages": (CHAT, {"messages": [{"role": "user", "content": "a"}] * 4096}),
        "160 KB to tokenize": ("/tokenize", {"prompt": "a b c d " * 20000, "return_token_strs": True}),
    }


class PoliteClient:
    """Two connections in threads, and the longest wait of each since `forget`."""

    def __init__(self, port: int) -> None:
        self._port, self._is_over = port, False
        self.health_s = self.stream_s = 0.0
        self._threads = [Thread(target=self._ask_for_health), Thread(target=self._read_streams)]

    def __enter__(self) -> "PoliteClient":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join()

    def forget(self) -> None:
        self.health_s = self.stream_s = 0.0

    def _ask_for_health(self) -> None:
        with closing(HTTPConnection(HOST, self._port, timeout=TIMEOUT_S)) as connection:
            while not self._is_over:
                start = time.perf_counter()
                connection.request("GET", "/health")
                connection.getresponse().read()
                self.health_s = max(self.health_s, time.perf_counter() - start)
                time.sleep(0.01)

    def _read_streams(self) -> None:
        body = {"prompt": "How does it work?", "max_tokens": 200, "ignore_eos": True, "stream": True}
        while not self._is_over:
            with closing(HTTPConnection(HOST, self._port, timeout=TIMEOUT_S)) as connection:
                connection.request("POST", COMPLETIONS, json.dumps(body))
                response, last = connection.getresponse(), None
                while (line := response.readline()) and not self._is_over:
                    if line.startswith(b"data"):
                        now = time.perf_counter()
                        self.stream_s = max(self.stream_s, now - last if last is not None else 0.0)
                        last = now


def ask(port: int, path: str, body: dict[str, Any]) -> tuple[int, int, float]:
    """Status, bytes and seconds of an answer."""
    start = time.perf_counter()
    with closing(HTTPConnection(HOST, port, timeout=TIMEOUT_S)) as connection:
        connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        num_bytes = len(response.read())
    return response.status, num_bytes, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--n", type=int, default=100)
    arguments = parser.parse_args()
    print("| request | answer | `/health`, before and beside it | a stream's next piece |\n|---|---|---|---|")
    for name, (path, body) in heavy_requests(arguments.n).items():
        with PoliteClient(arguments.port) as client:
            time.sleep(1)
            health_s, stream_s = client.health_s, client.stream_s
            client.forget()
            status, num_bytes, seconds = ask(arguments.port, path, body)
            time.sleep(0.3)
            waits = [(health_s, client.health_s), (stream_s, client.stream_s)]
        cells = [f"{before * 1e3:.0f}, {beside * 1e3:.0f} ms" for before, beside in waits]
        print(f"| {name} | {status}, {num_bytes:,} bytes, {seconds:.1f} s | {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
