"""Clients that come together, go away at any moment and send nonsense: what is left of a server afterwards.

python -m scripts.campaigns.serve_storm                       a server of the demo, 1,000 requests on 32 connections
python -m scripts.campaigns.serve_storm --num-requests 200    the same, shorter
python -m scripts.campaigns.serve_storm --every-failure       say every failure, not the first ten

Of the requests a tenth is malformed; half of the others are cancelled at a random moment. What was not cancelled must
be what the same request was answered with when it was alone, nothing may be a 500, `/health` must answer in 50 ms, and
at the end no K/V block is held and memory is what it was.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from typing import Any

import psutil

WORDS = ["the", "a", "red", "dog", "ball", "def", "return", "area", "of", "width", "class", "import"]
MALFORMED = [b"", b"{", b'{"prompt": 7}', b'{"prompt": "a", "n": 0}', b'{"prompt": "a", "stop": [""]}', b"\xff" * 40]
MALFORMED += [b'{"prompt": "a", "max_tokens": 99999999}', b'{"prompt": "a", "speculative": {"drafter": "os:system"}}']


@dataclass
class Outcome:
    """Result of a storm."""

    num_by_status: dict[int, int] = field(default_factory=dict)
    num_cancelled: int = 0
    num_right: int = 0
    failures: list[str] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)

    def count(self, status: int) -> None:
        self.num_by_status[status] = self.num_by_status.get(status, 0) + 1


def make_bodies(num: int, max_tokens: int, seed: int) -> list[dict[str, Any]]:
    """Different requests, each with one right answer: greedy and seeded, whole and streamed, drafted or not."""
    rng = random.Random(seed)
    return [
        {
            "prompt": " ".join(rng.choices(WORDS, k=rng.randint(1, 20))),
            "max_tokens": rng.randint(1, max_tokens),
            "temperature": rng.choice([0, 0, 0.8]),
            "seed": i,
            "ignore_eos": True,
            "stream": rng.random() < 0.5,
            "n": rng.choice([1, 1, 1, 2]),
            "speculative": rng.choice([None, None, False, {"ngram_config": [3, 2]}]),
        }
        for i in range(num)
    ]


async def leave(port: int, raw: bytes) -> None:
    """Post, and go away at once."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    )
    writer.write(raw)
    await writer.drain()
    writer.close()


async def exchange(port: int, raw: bytes, path: str = "/v1/completions") -> tuple[int, bytes]:
    """Post and read to the end: the status, and what followed the headers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
        )
        writer.write(head.encode() + raw)
        await writer.drain()
        answer = await reader.read(-1)
        headers, _, body = answer.partition(b"\r\n\r\n")
        return int(headers.split(b" ", 2)[1]), body
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def get(port: int, path: str) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read(-1)
    writer.close()
    headers, _, body = answer.partition(b"\r\n\r\n")
    return int(headers.split(b" ", 2)[1]), body


def texts_of(body: bytes) -> list[str]:
    """The text of each choice, joined over the chunks of a stream."""
    if not body.lstrip().startswith(b"{") and b"data: " in body:
        texts: dict[int, str] = {}
        for event in re.findall(rb"data: (\{.*?\})\r?\n", body):
            for choice in json.loads(event)["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        return [texts[i] for i in sorted(texts)]
    return [choice["text"] for choice in json.loads(body)["choices"]]


async def expected_of(port: int, bodies: list[dict[str, Any]]) -> list[list[str]]:
    """Answer of each when asked alone."""
    return [texts_of((await exchange(port, json.dumps(body).encode()))[1]) for body in bodies]


async def storm(port: int, bodies: list[dict[str, Any]], num_requests: int, num_connections: int, seed: int) -> Outcome:
    """Send `num_requests` of them, wrong ones among them, so many at a time."""
    rng, outcome = random.Random(seed), Outcome()
    expected = await expected_of(port, bodies)
    waiting = iter(range(num_requests))

    async def client() -> None:
        for _ in waiting:
            if rng.random() < 0.1:
                await _malformed(port, rng.choice(MALFORMED), outcome)
            else:
                i, patience = rng.randrange(len(bodies)), rng.random()
                if patience < 0.15:
                    await leave(port, json.dumps(bodies[i]).encode())
                    outcome.num_cancelled += 1
                else:
                    await _asked(port, bodies[i], expected[i], patience if patience < 0.5 else None, outcome)

    with _health_watched(port, outcome):
        await asyncio.gather(*(client() for _ in range(num_connections)))
    return outcome


async def _malformed(port: int, raw: bytes, outcome: Outcome) -> None:
    status, _ = await exchange(port, raw)
    outcome.count(status)
    if status != 400:
        outcome.failures.append(f"{raw!r}: {status}")


async def _asked(
    port: int, body: dict[str, Any], expected: list[str], patience_s: float | None, outcome: Outcome
) -> None:
    try:
        async with asyncio.timeout(patience_s):
            status, answer = await exchange(port, json.dumps(body).encode())
    except TimeoutError:
        outcome.num_cancelled += 1
        return
    outcome.count(status)
    if status == 200:
        found = texts_of(answer)
        outcome.num_right += found == expected
        if found != expected:
            outcome.failures.append(f"{body}: {found} instead of {expected}")
    elif status != 503:
        outcome.failures.append(f"{body}: {status} {answer[:200]!r}")


@contextlib.contextmanager
def _health_watched(port: int, outcome: Outcome) -> Iterator[None]:
    """Watch `/health` from another process: in this one it would wait while answers of other clients are read."""
    context = multiprocessing.get_context("spawn")
    is_over, answers = context.Event(), context.Queue()
    watcher = context.Process(target=_watch_health, args=(port, is_over, answers))
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        while answers.empty() and watcher.is_alive():
            time.sleep(0.02)
        for status, seconds in answers.get(timeout=1) if not watcher.exitcode else []:
            outcome.health_s.append(seconds)
            if status != 200:
                outcome.failures.append(f"/health: {status}")
        watcher.join()
        if watcher.exitcode:
            outcome.failures.append("/health was not answered")


def _watch_health(port: int, is_over: Event, answers: "Queue[list[tuple[int, float]]]") -> None:
    found = []
    try:
        while not is_over.wait(0.02):
            started = time.perf_counter()
            connection = HTTPConnection("127.0.0.1", port)
            connection.request("GET", "/health")
            status = connection.getresponse().status
            connection.close()
            found.append((status, time.perf_counter() - started))
    finally:
        answers.put(found)


async def wait_until_idle(port: int) -> None:
    while json.loads((await get(port, "/requests"))[1])["data"]:
        await asyncio.sleep(0.05)


async def cache_usage(port: int) -> float:
    """Share of the K/V cache that is held."""
    (found,) = re.findall(rb"^vllm:kv_cache_usage_perc\{.*\} (.*)$", (await get(port, "/metrics"))[1], re.MULTILINE)
    return float(found)


async def run(port: int, process: psutil.Process, num_requests: int, num_connections: int) -> tuple[Outcome, float]:
    """A storm, after a smaller one that fills what is filled once; and by how much memory grew between them."""
    bodies = make_bodies(40, 60, 1)
    await storm(port, bodies, max(num_requests // 3, 100), num_connections, 2)
    await wait_until_idle(port)
    before = process.memory_info().rss
    outcome = await storm(port, bodies, num_requests, num_connections, 3)
    await wait_until_idle(port)
    if usage := await cache_usage(port):
        outcome.failures.append(f"of the K/V cache is held: {usage}")
    return outcome, process.memory_info().rss / before - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-requests", type=int, default=1000)
    parser.add_argument("--num-connections", type=int, default=32)
    parser.add_argument("--every-failure", action="store_true")
    args = parser.parse_args()
    command = [sys.executable, "-m", "specdec_cli", "serve", "--model-dir", "demo", "--spec-decode-algo", "NGRAM"]
    # A small cache: all of its memory is in use after the first storm, and sequences have to be put back.
    command += ["--max-tokens-in-paged-kv-cache", "512", "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    port = next(int(found[1]) for line in server.stderr if (found := re.search(r"http://127.0.0.1:(\d+) ", line)))
    try:
        outcome, growth = asyncio.run(run(port, psutil.Process(server.pid), args.num_requests, args.num_connections))
    finally:
        server.send_signal(signal.SIGTERM)
    if server.wait(60):
        outcome.failures.append(f"the server ended with {server.returncode}")
    slowest = max(outcome.health_s)
    print(f"by status: {dict(sorted(outcome.num_by_status.items()))}; cancelled {outcome.num_cancelled}")
    print(
        f"right: {outcome.num_right}; memory {growth:+.2%}; "
        f"/health {len(outcome.health_s)} x, at most {slowest * 1e3:.1f} ms"
    )
    shown = outcome.failures if args.every_failure else outcome.failures[:10]
    print("\n".join(shown) or "no failures")
    sys.exit(bool(outcome.failures) or slowest > 0.05 or abs(growth) > 0.02)


if __name__ == "__main__":
    main()
