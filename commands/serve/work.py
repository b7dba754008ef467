"""An opened model served at an address, from the first connection to the last, to clients that have access."""

import gc
import socket
import time
from contextlib import suppress
from importlib.metadata import version
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from commands.options.sampling_flags import given_params
from commands.output.documents.settings import Setup
from commands.output.output import note, stderr, warn
from commands.serve.flags import ServerOptions
from commands.serve.greeting import greeting
from commands.serve.http.access import Guard, split_keys
from commands.serve.http.bodies import Clock
from commands.serve.http.request_log import RequestLog
from commands.serve.http.routes import make_app
from commands.serve.http.server import Address, errors_logged, serve
from commands.serve.http.unread import ReadsBodies
from commands.serve.receipts import OnProgress, logging_receipts
from commands.serve.served import ServedModel, check_can_serve, prepare_chat
from commands.serve.warm import warm
from runtime.core.params import SamplingParams
from runtime.llm import LLM
from runtime.loop.serving import LoopLimits, ServingLoop
from runtime.loop.session import Session
from runtime.util.errors import SpecDecError


def serve_setup(
    setup: Setup, bound: socket.socket, address: Address, names: tuple[str, ...], options: ServerOptions
) -> None:
    """Serve until a signal ends the server. SpecDecError if the model cannot be served, or if its engine ends."""
    clock = Clock()
    served = open_served(setup.llm, setup.session, clock, names, options)
    if options.warm is not None:
        note(warm(served, options.warm, [] if options.api_key is None else split_keys(options.api_key)))
    app = guarded_app(served, clock, options, is_of_this_machine=address.is_of_this_machine)

    def say_where() -> None:
        for line in greeting(served, address):
            console = stderr()
            console.print(line, soft_wrap=not console.is_terminal)  # a terminal wraps; a program reads whole lines

    if not address.is_of_this_machine and options.api_key is None:
        warn("anyone who can reach this address may send requests: `--api-key` or SPECDEC_API_KEY restricts access")
    # The 400,000 objects that exist now stay. To look through them for garbage stops every thread for 0.3 s, and Python
    # does it only when there are a quarter as many new objects: until then the garbage of requests would pile up.
    gc.freeze()
    gc.enable()
    try:
        with errors_logged():
            serve(app, served.loop, bound, options, say_where)
    finally:
        served.loop.stop(0)  # before the engine is closed, also if uvicorn did not wait for the loop


def open_served(
    llm: LLM, session: Session, clock: Clock, names: tuple[str, ...], options: ServerOptions
) -> ServedModel:
    """The model with a loop that is not started yet; SpecDecError if it cannot be served."""
    check_can_serve(llm)
    has_chat_template = prepare_chat(llm)
    llm.reasoning_parser = options.reasoning_parser
    sampling = given_params(options)
    llm.request_of(SamplingParams(**sampling))  # an error for defaults that the model cannot have
    with suppress(SpecDecError):  # a request with a grammar gets the error
        llm.grammars.prepare()
    llm.fingerprint  # noqa: B018  # it is kept: every answer has it
    limits = LoopLimits(options.max_queue_len, options.max_requests_per_client, options.max_gap_ms / 1000)
    on_progress: OnProgress = clock
    if options.receipts is not None:
        on_progress = logging_receipts(options.receipts, llm.fingerprint, options.receipt_ids or "ids", clock)
    loop = ServingLoop(session, limits, on_progress)
    served = ServedModel(
        llm,
        loop,
        names,
        int(time.time()),
        has_chat_template,
        llm.model_defaults.sampling | sampling,
        options.tool_call_parser,
        options.reasoning_parser,
        options.refuse_special_tokens,
        options.any_model,
        session.speculation.in_words,
    )
    for name, path in options.corpora.items():
        served.corpora.open(name, path, served.tokenizer)
    return served


def guarded_app(served: ServedModel, clock: Clock, options: ServerOptions, *, is_of_this_machine: bool = False) -> Any:
    """The application behind its access control."""
    origins = options.allowed_origins or []
    inner = make_app(served, clock, options.request_timeout, version("specdec-cli"))
    app: Any = Guard(inner, options.api_key, origins, is_of_this_machine=is_of_this_machine)
    if origins:
        app = CORSMiddleware(app, origins, allow_methods=["*"], allow_headers=["*"])
    return ReadsBodies(RequestLog(app) if options.log_requests else app)
