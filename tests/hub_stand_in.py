"""A stand-in of the Hugging Face hub on loopback: repositories of a few files, and what can go wrong with one."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Its repositories, and the requests that came. `breaks` has the bytes after which a file's next download ends."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    refuses: dict[str, int] = field(default_factory=dict)
    """Status by which a repository is refused, without the hub's own word for why."""
    breaks: dict[str, list[int]] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """(method, path, range) of each."""
    url: str = ""

    @property
    def ranges(self) -> list[str]:
        return [asked for _, _, asked in self.requests if asked is not None]


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that answers at its `url` within the block."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *given: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path, self.headers.get("Range")))
            repo = next((one for one in [*hub.repos, *hub.refuses] if f"{one}/" in f"{path.lstrip('/')}/"), None)
            if repo is None:
                self._answer(404, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            elif repo in hub.refuses:
                self._answer(hub.refuses[repo], b"")
            elif repo in hub.gated:
                self._answer(403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
            elif "/tree/" in path:
                self._json([_entry(name, data) for name, data in hub.repos[repo].items()])
            elif path.startswith("/api/models/"):
                siblings = [{"rfilename": name} for name in hub.repos[repo]]
                self._json({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings})
            else:
                self._file(path.partition(f"{repo}/resolve/")[2].partition("/")[2], hub.repos[repo])

        def _file(self, name: str, files: dict[str, bytes]) -> None:
            if name not in files:
                self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            data, asked = files[name], self.headers.get("Range")
            first = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
            headers = {"ETag": f'"{_digest(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            headers["X-Linked-Size"] = str(len(data))
            if asked:
                headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
            cut = hub.breaks[name].pop(0) if self.command == "GET" and hub.breaks.get(name) else None
            self._answer(206 if asked else 200, data[first:], headers, cut)

        def _json(self, value: Any) -> None:
            self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _answer(
            self, status: int, data: bytes, headers: dict[str, str] | None = None, cut: int | None = None
        ) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data[:cut])
            self.close_connection = cut is not None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _entry(name: str, data: bytes) -> dict[str, object]:
    lfs = {"oid": _digest(data), "size": len(data), "pointerSize": 100}
    return {"type": "file", "path": name, "size": len(data), "oid": _digest(data)[:40], "lfs": lfs}
