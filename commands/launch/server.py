"""The server of a launch: found at its address, or started as a process of its own and ended."""

import json
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from commands.output.output import stderr
from runtime.util.errors import SpecDecError

_ASKED_S = 5.0
"""Seconds that a server has to answer with the names of its model, and that its last lines have to arrive."""
_END_S = 40.0
"""Seconds that a server has to end before it is killed. By default its own `--shutdown-timeout` is 30 s."""
_NUM_LINES = 200
_READY = re.compile(r" at (https?://\S+) \((?:only this|other) machines? reach(?:es)? it\)")


@dataclass(frozen=True)
class Served:
    """A server that answered: its URL, its model's names, and its context in tokens. Answers carry the first name."""

    url: str
    names: tuple[str, ...]
    context: int


def ask_server(url: str, key: str) -> Served | None:
    """The specdec server at an address; None if nothing, or another program, answers there. SpecDecError if the server
    refuses the key.
    """
    try:
        document = json.loads(_get(f"{url}/v1/models", key))
        cards = document["data"]
        if cards and all(card["owned_by"] == "specdec" for card in cards):
            return Served(url, tuple(card["id"] for card in cards), int(cards[0]["max_model_len"]))
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise SpecDecError(
                f"the server asks for another key: {url}", hint="`--api-key`, or SPECDEC_API_KEY in the environment"
            ) from None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _get(url: str, key: str) -> bytes:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # none to this machine
    with opener.open(request, timeout=_ASKED_S) as response:
        return bytes(response.read())


@dataclass
class _Messages:
    """Lines that a server writes to stderr: shown while it starts, and kept back while the agent has the terminal."""

    is_kept: bool = False
    error: list[str] = field(default_factory=list)
    kept: deque[str] = field(default_factory=lambda: deque(maxlen=_NUM_LINES))

    def add(self, line: str) -> None:
        if self.is_kept:
            self.kept.append(line)
        elif line.startswith(("error: ", "hint: ")):
            self.error.append(line.partition(": ")[2])
        else:
            stderr().print(line, soft_wrap=True)

    def raise_failed(self) -> NoReturn:
        """Raise a SpecDecError with the server's own message and hint."""
        said, hint = [*self.error, "", ""][:2]
        raise SpecDecError(f"the server did not start: {said or 'it does not say why'}", hint=hint or None)


@contextmanager
def started(arguments: Sequence[str], environment: Mapping[str, str], key: str) -> Iterator[Served]:
    """Run `specdec serve` with these arguments until the end of the block. SpecDecError if it ends before it listens,
    or does not answer then. It has a process session of its own, so that Ctrl-C in the terminal reaches the agent
    alone.
    """
    command = [sys.executable, "-m", "specdec_cli", "serve", *arguments]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=dict(environment),
        start_new_session=True,
    )
    messages = _Messages()
    try:
        url = _wait_until_ready(process, messages)
        if url is None:
            messages.raise_failed()
        reader = threading.Thread(target=_keep, args=(process, messages), daemon=True)
        reader.start()
        served = ask_server(url, key)
        if served is None:
            raise SpecDecError(f"the server started, and does not answer: {url}", hint="start it by `specdec serve`")
        yield served
        has_ended = process.poll()
        if has_ended is not None:
            messages.kept.append(f"it ended by itself, with the exit status {has_ended}")
    finally:
        _end(process)
    reader.join(_ASKED_S)
    if messages.kept:
        stderr().print("the server said meanwhile:", *messages.kept, sep="\n", soft_wrap=True)


def _wait_until_ready(process: "subprocess.Popen[str]", messages: _Messages) -> str | None:
    """The address once the server listens; None if it has ended."""
    assert process.stderr is not None
    for line in process.stderr:
        messages.add(line.rstrip("\n"))
        if found := _READY.search(line):
            messages.is_kept = True
            return found[1].replace("//0.0.0.0:", "//127.0.0.1:")
    return None


def _keep(process: "subprocess.Popen[str]", messages: _Messages) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        messages.add(line.rstrip("\n"))


def _end(process: "subprocess.Popen[Any]") -> None:
    """End the server. Ctrl-C during this does not leave it running."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
