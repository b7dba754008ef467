"""Servers of a tiny model: in this process behind a test client, and behind a real socket."""

import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import uvicorn
from serving_models import TEMPLATE, TOOL_TEMPLATE, Listening, MakeServed, Served, opened
from starlette.testclient import TestClient

from commands.serve.http import routes
from commands.serve.http.server import BoundedProtocol
from runtime.drafters.specs import AnySpec, NgramDrafter


@pytest.fixture(scope="session", autouse=True)
def openapi_made_once() -> Iterator[None]:
    """Every server's document is the same, and takes a fifth of a second: a process makes it once."""
    made: list[dict[str, Any]] = []
    make = routes.openapi_schema
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "openapi_schema", lambda app: made[0] if made else (made.append(make(app)), made[0])[1])
        yield


@pytest.fixture(scope="session")
def chat_tokenizer_dir(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of `llama_dir` with a chat template."""
    directory = tmp_path_factory.mktemp("chat") / "tokenizer"
    shutil.copytree(llama_dir, directory, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="session")
def make_served(llama_engine_dir: Path, chat_tokenizer_dir: Path) -> Iterator[MakeServed]:
    """`make_served(drafter, **options)`: a server of fixture `llama`'s model behind a test client."""
    with ExitStack() as stack:

        def make(
            drafter: AnySpec | None = None, tokenizer_dir: Path | None = chat_tokenizer_dir, **options: Any
        ) -> Served:
            served, app = stack.enter_context(opened(llama_engine_dir, tokenizer_dir, drafter, **options))
            return Served(stack.enter_context(TestClient(app, raise_server_exceptions=False)), served)

        yield make


@pytest.fixture(scope="session")
def served(make_served: MakeServed) -> Served:
    """Server with n-gram lookup, for all tests that leave it as it is."""
    return make_served(NgramDrafter(4, 2))


@pytest.fixture(scope="session")
def tooled(make_served: MakeServed, chat_tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A server whose template knows tools, in the format `hermes`, and reasoning."""
    directory = tmp_path_factory.mktemp("tools") / "tokenizer"
    shutil.copytree(chat_tokenizer_dir, directory)
    (directory / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return make_served(NgramDrafter(4, 2), tokenizer_dir=directory)


@pytest.fixture
def make_listening(llama_engine_dir: Path, chat_tokenizer_dir: Path) -> Iterator[Callable[..., Listening]]:
    """`make_listening(drafter, **options)`: the same in a thread of uvicorn's, where clients can go away."""
    yield from _listening(llama_engine_dir, chat_tokenizer_dir)


@pytest.fixture(scope="module")
def make_listening_once(llama_engine_dir: Path, chat_tokenizer_dir: Path) -> Iterator[Callable[..., Listening]]:
    """The same for all tests of a module."""
    yield from _listening(llama_engine_dir, chat_tokenizer_dir)


def _listening(llama_engine_dir: Path, chat_tokenizer_dir: Path) -> Iterator[Callable[..., Listening]]:
    with ExitStack() as stack:

        def make(drafter: AnySpec | None = None, **options: Any) -> Listening:
            served, app = stack.enter_context(opened(llama_engine_dir, chat_tokenizer_dir, drafter, **options))
            bound = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)  # a long answer soon waits for its reader
            server = uvicorn.Server(
                uvicorn.Config(app, http=BoundedProtocol, log_config=None, timeout_graceful_shutdown=1)
            )
            thread = Thread(target=server.run, kwargs={"sockets": [bound]})
            thread.start()

            def stop() -> None:
                server.should_exit = True
                thread.join()

            stack.callback(stop)
            port = bound.getsockname()[1]
            return Listening(f"http://127.0.0.1:{port}", port, served, server.server_state.connections)

        yield make
