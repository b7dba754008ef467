"""An opened model served at an address, from the first connection to the last."""

import gc
import socket
import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from commands.documents.settings import Setup
from commands.output import stderr, warn
from commands.serve.command import ServerOptions
from commands.serve.group import Clock
from commands.serve.guard import Guard
from commands.serve.routes import make_app
from commands.serve.served import ServedModel, check_can_serve, prepare_chat
from commands.serve.server import Address, errors_logged, serve
from runtime.llm import LLM
from runtime.serving.loop import ServingLoop
from runtime.session import Session


@dataclass(frozen=True)
class Serving:
    """Settings of serving."""

    address: Address
    names: tuple[str, ...]
    options: ServerOptions


def serve_setup(setup: Setup, bound: socket.socket, serving: Serving) -> None:
    """Serve until a signal comes."""
    options, address = serving.options, serving.address
    clock = Clock()
    served = open_served(setup.llm, setup.session, clock, serving.names, options.max_queue_len)
    app = guarded_app(served, clock, options, is_of_this_machine=address.is_of_this_machine)
    reach = "only this machine reaches it" if address.is_of_this_machine else "other machines reach it"

    def say_where() -> None:
        stderr().print(f"{served.name} at {address.url} ({reach}); Ctrl-C ends", soft_wrap=True)

    if not address.is_of_this_machine and options.api_key is None:
        warn("anyone who can reach this address may send requests: `--api-key` or SPECDEC_API_KEY restricts access")
    # What is there now stays. Looked through for garbage, its 400,000 objects hold up every thread for 0.3 s; and as
    # that is put off until a quarter as many are new, those of requests would pile up.
    gc.freeze()
    gc.enable()
    try:
        with errors_logged():
            serve(app, served.loop, bound, options.shutdown_timeout, say_where)
    finally:
        served.loop.stop(0)  # before the engine is closed, also where uvicorn did not wait for it


def open_served(llm: LLM, session: Session, clock: Clock, names: tuple[str, ...], max_queue_len: int) -> ServedModel:
    """The model behind a loop that has not been started; SpecDecError if it cannot be served."""
    check_can_serve(llm)
    has_chat_template = prepare_chat(llm)
    loop = ServingLoop(session, max_queue_len, clock)
    return ServedModel(llm, loop, names, int(time.time()), has_chat_template, llm.model_defaults.sampling)


def guarded_app(served: ServedModel, clock: Clock, options: ServerOptions, *, is_of_this_machine: bool = False) -> Any:
    """The application behind its access control."""
    origins = options.allowed_origins or []
    inner = make_app(served, clock, options.request_timeout, version("specdec-cli"))
    app = Guard(inner, options.api_key, origins, is_of_this_machine=is_of_this_machine)
    if not origins:
        return app
    return CORSMiddleware(app, origins, allow_methods=["*"], allow_headers=["*"])
