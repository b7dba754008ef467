"""The server's routes: a request's body is read, the loop answers it, and the answer is written in the client's
protocol.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from commands.serve.errors import FieldNames, HTTPError, fields_named, internal_error
from commands.serve.http.bodies import ClientGone, Clock, EventStream, Group, Waiting, document, submit, whole
from commands.serve.http.clients import client_of, corpus_owners, salted
from commands.serve.http.metrics import ServerMetrics
from commands.serve.http.openapi import answers, body_of, errors, openapi_schema, page_response
from commands.serve.http.other_routes import what_is_there
from commands.serve.http.request_log import note_answers, note_error, note_model
from commands.serve.protocol.anthropic_messages import MessagesReply, chat_of_messages
from commands.serve.protocol.asking import ask_chat, ask_completion
from commands.serve.protocol.completions import ChatReply, CompletionReply
from commands.serve.protocol.conversations import chat_tokens
from commands.serve.protocol.openai_responses import ResponsesReply, ResponseStore, chat_of_responses, messages_of
from commands.serve.protocol.replies import TokenTexts
from commands.serve.protocol.response_models import (
    ChatAnswer,
    CompletionAnswer,
    MessageAnswer,
    ModelAnswer,
    ModelsAnswer,
    ResponseAnswer,
)
from commands.serve.protocol.schema import (
    AddCorpusRequest,
    ChatRequest,
    CompletionRequest,
    CountRequest,
    DetokenizeRequest,
    Generation,
    Lenient,
    MessagesRequest,
    RemoveCorpusRequest,
    ResponsesRequest,
    TokenizeRequest,
    parse_body,
)
from commands.serve.served import ServedModel
from runtime.core.grammar import MOST_COMPILING
from runtime.loop.serving import ServeRequest
from runtime.text.text import encode_text
from runtime.text.token_text import whole_text
from runtime.util.errors import SpecDecError

_REFUSED = errors(401, 403)
_MAX_BODY_BYTES = 4 << 20
_READ_TIMEOUT_S = 30

T = TypeVar("T")
B = TypeVar("B", bound=Lenient)
A = TypeVar("A", CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest)
G = TypeVar("G", CompletionRequest, ChatRequest)


@dataclass(frozen=True)
class Server:
    """Shared state of the routes."""

    served: ServedModel
    clock: Clock
    metrics: ServerMetrics
    request_timeout_s: float
    texts: TokenTexts
    worker: ThreadPoolExecutor
    writer: ThreadPoolExecutor

    async def read(self, request: Request, model: type[B], work: Callable[[B], T]) -> T:
        """Read a request's body; parse it, and work on it, in a thread beside the event loop, one body at a time."""
        raw = await _read_body(request)

        def parse_and_work() -> T:
            with self.served.turn:
                return work(parse_body(raw, model))

        return await asyncio.get_running_loop().run_in_executor(self.worker, parse_and_work)

    async def ask(
        self,
        request: Request,
        model: type[A],
        ask: Callable[[ServedModel, G], list[ServeRequest]],
        translate: Callable[[A], G],
    ) -> tuple[A, G, Group]:
        """Parse the body, translate it to a completion or chat request, and submit the requests that `ask` makes from
        the translation. Returns the body, the translation and the answers.
        """

        def prepare(body: A) -> tuple[A, G, list[ServeRequest], FieldNames]:
            note_model(request.scope, body.model or self.served.name)
            self.served.check_name(body.model)
            with fields_named(FieldNames({}, body.CHAT_FIELDS)):
                generation = translate(body)
            generation._corpus_owners = corpus_owners(request.scope, generation.cache_salt)
            names = FieldNames(generation.field_names, body.CHAT_FIELDS)
            with fields_named(names):
                return body, generation, ask(self.served, generation), names

        body, generation, asked, names = await self.read(request, model, prepare)
        asked = salted(asked, request.scope, generation.cache_salt)
        group = submit(self.served.loop, asked, client_of(request.scope, generation.user), names)
        note_answers(request.scope, group.answers, generation.n or 1)
        return body, generation, group

    async def reply(self, request: Request, body: Generation, group: Group, reply: Any) -> Response:
        waiting = Waiting(self.served.loop, request.receive, self.request_timeout_s, self.writer)
        if body.stream:
            return EventStream(group, reply.streams(), reply.chunks(), waiting, is_long=body.tells_of_tokens)
        await whole(group, waiting)
        return await document(group, reply.document, waiting, is_long=body.tells_of_tokens)


def make_app(served: ServedModel, clock: Clock, request_timeout_s: float, version: str) -> FastAPI:
    """The application. The loop starts and ends with it."""
    metrics = ServerMetrics(served.loop, served.name)
    clock.on_progress.append(metrics.observe)
    worker = ThreadPoolExecutor(2 * MOST_COMPILING, "specdec-requests")
    writer = ThreadPoolExecutor(1, "specdec-answers")
    served.llm.grammars.while_compiling = served.turn.left
    server = Server(served, clock, metrics, request_timeout_s, TokenTexts(served), worker, writer)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        clock.attach(asyncio.get_running_loop())
        served.loop.start()
        yield
        await asyncio.to_thread(served.loop.stop, 0)
        for executor in (worker, writer):
            executor.shutdown()

    app = FastAPI(
        title="specdec", version=version, docs_url=None, redoc_url=None, lifespan=lifespan, openapi_url="/openapi.json"
    )
    app.include_router(_generation_routes(server))
    app.include_router(_responses_routes(server))
    app.include_router(_messages_routes(server))
    app.include_router(_model_routes(server, version))
    app.include_router(_token_routes(server))
    app.include_router(_corpus_routes(server))
    app.add_exception_handler(HTTPError, _on_error)
    app.add_exception_handler(SpecDecError, _on_error)
    app.add_exception_handler(HTTPException, _on_routing_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(Exception, _on_bug)
    schema = openapi_schema(app)
    app.openapi = lambda: schema  # type: ignore[method-assign]
    return app


def _as_it_is(body: G) -> G:
    return body


def _generation_routes(server: Server) -> APIRouter:
    router = APIRouter(responses=_REFUSED)

    @router.post("/v1/completions", **_answered(CompletionRequest, CompletionAnswer))
    async def completions(request: Request) -> Response:
        """Continue a prompt."""
        _, body, group = await server.ask(request, CompletionRequest, ask_completion, _as_it_is)
        writer = CompletionReply(server.served, body, group.answers, server.texts)
        return await server.reply(request, body, group, writer)

    @router.post("/v1/chat/completions", **_answered(ChatRequest, ChatAnswer))
    async def chat_completions(request: Request) -> Response:
        """Generate the assistant's next message."""
        _, body, group = await server.ask(request, ChatRequest, ask_chat, _as_it_is)
        return await server.reply(request, body, group, ChatReply(server.served, body, group.answers, server.texts))

    @router.post("/v1/embeddings", include_in_schema=False)
    async def embeddings(request: Request) -> Response:
        """Refuse to make embeddings, with an error that says so."""
        raise HTTPError(400, "this server generates text, and computes no embeddings", code="unsupported")

    return router


def _responses_routes(server: Server) -> APIRouter:
    router, store = APIRouter(responses=_REFUSED), ResponseStore()

    @router.post("/v1/responses", **_answered(ResponsesRequest, ResponseAnswer))
    async def responses(request: Request) -> Response:
        """Generate the next response of OpenAI's Responses."""
        before: list[dict[str, Any]] = []

        def translate(body: ResponsesRequest) -> ChatRequest:
            before.extend(messages_of(body, store))
            return chat_of_responses(server.served, body, before)

        def keep(document: dict[str, Any], said: list[dict[str, Any]]) -> None:
            store.add(document, [*before, *said])

        body, chat, group = await server.ask(request, ResponsesRequest, ask_chat, translate)
        return await server.reply(request, chat, group, ResponsesReply(server.served, body, chat, group.answers, keep))

    @router.get("/v1/responses/{response_id}", responses=errors(404), response_model=ResponseAnswer)
    async def response(response_id: str) -> Response:
        """A response that the server has kept."""
        return JSONResponse(store.document(response_id))

    @router.delete("/v1/responses/{response_id}", responses=errors(404))
    async def forget(response_id: str) -> dict[str, Any]:
        """Delete a kept response."""
        store.delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    return router


def _messages_routes(server: Server) -> APIRouter:
    router = APIRouter(responses=_REFUSED)

    @router.post("/v1/messages", **_answered(MessagesRequest, MessageAnswer))
    async def messages(request: Request) -> Response:
        """Generate the next message of Anthropic's Messages."""
        translate = partial(chat_of_messages, server.served)
        body, chat, group = await server.ask(request, MessagesRequest, ask_chat, translate)
        return await server.reply(request, chat, group, MessagesReply(server.served, body, chat, group.answers))

    @router.post("/v1/messages/count_tokens", **_body(CountRequest))
    async def count_tokens(request: Request) -> dict[str, int]:
        """The number of tokens of a conversation."""

        def work(body: CountRequest) -> dict[str, int]:
            server.served.check_name(body.model)
            with fields_named(FieldNames({}, body.CHAT_FIELDS)):
                return {"input_tokens": len(chat_tokens(server.served, chat_of_messages(server.served, body)))}

        return await server.read(request, CountRequest, work)

    return router


def _model_routes(server: Server, version: str) -> APIRouter:
    router, served, loop = APIRouter(), server.served, server.served.loop

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": served.created,
            "owned_by": "specdec",
            "root": name,
            "parent": None,
            "max_model_len": served.max_model_len,
            "specdec": served.facts,
        }

    @router.get("/v1/models", responses=_REFUSED, response_model=ModelsAnswer)
    @router.get("/models", responses=_REFUSED, response_model=ModelsAnswer)
    async def models() -> dict[str, Any]:
        """The model that is served, under each of its names. Codex reads the key `models`, which is empty here."""
        return {"object": "list", "data": [card(name) for name in served.names], "models": []}

    @router.get("/v1/models/{name:path}", responses=_REFUSED | errors(404), response_model=ModelAnswer)
    async def model(name: str) -> dict[str, Any]:
        """The model under one of its names."""
        served.check_name(name)
        return card(name)

    unready: dict[int | str, dict[str, Any]] = {503: {"description": "requests are not taken"}}

    @router.get("/health", response_class=Response, responses=errors(403) | unready)
    async def health() -> Response:
        """200 while requests are accepted, otherwise 503."""
        return Response(status_code=200 if loop.takes_requests else 503)

    @router.get("/version", responses=_REFUSED)
    async def version_of_server() -> dict[str, str]:
        return {"version": version}

    @router.get("/metrics", response_class=PlainTextResponse, responses=_REFUSED)
    async def metrics() -> Response:
        """Prometheus metrics by vLLM's names."""
        return Response(server.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/requests", responses=_REFUSED)
    async def requests() -> dict[str, Any]:
        """The sequences that are waiting or running."""
        now = time.perf_counter()
        return {"data": [_request_entry(answer, now) for answer in loop.unfinished()]}

    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        return page_response()

    return router


def _request_entry(answer: Any, now: float) -> dict[str, Any]:
    progress = answer.progress
    return {
        "id": answer.request.id,
        "prompt_tokens": len(answer.request.prompt_tokens),
        "completion_tokens": progress.num_tokens,
        "tokens_per_step": progress.num_tokens / progress.num_steps if progress.num_steps else None,
        "running_s": now - answer.sequence.stats.start_s,
    }


def _token_routes(server: Server) -> APIRouter:
    router, served = APIRouter(responses=_REFUSED), server.served

    @router.post("/tokenize", **_body(TokenizeRequest))
    async def tokenize(request: Request) -> dict[str, Any]:
        """The tokens of a text or a conversation."""

        def work(body: TokenizeRequest) -> dict[str, Any]:
            served.check_name(body.model)
            tokens = _tokens_of(served, body)
            found: dict[str, Any] = {"count": len(tokens), "max_model_len": served.max_model_len, "tokens": tokens}
            strings = [server.texts.text_of(token) for token in tokens] if body.return_token_strs else None
            return found | {"token_strs": strings}

        return await server.read(request, TokenizeRequest, work)

    @router.post("/detokenize", **_body(DetokenizeRequest))
    async def detokenize(request: Request) -> dict[str, str]:
        """The text of tokens, special tokens included."""

        def work(body: DetokenizeRequest) -> dict[str, str]:
            served.check_name(body.model)
            _check_tokens(served, body.tokens)
            return {"prompt": whole_text(served.tokenizer, body.tokens, with_special=True)}

        return await server.read(request, DetokenizeRequest, work)

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """Tokenizer information for clients that make prompts themselves."""
        return served.tokenizer_info

    return router


def _corpus_routes(server: Server) -> APIRouter:
    """Routes for corpora, under SGLang's names (`commands.serve.corpora`); errors have the form of this server's other
    errors.
    """
    router, served = APIRouter(responses=_REFUSED), server.served

    @router.post("/add_external_corpus", **_body(AddCorpusRequest))
    async def add_external_corpus(request: Request) -> dict[str, Any]:
        """Add texts in which drafts for the client's requests are looked up."""

        def work(body: AddCorpusRequest) -> dict[str, Any]:
            if body.file_path is not None:
                what = "requests name no files: send `documents`, or start the server with `--corpus NAME=FILE`"
                raise HTTPError(400, what, param="file_path", code="unsupported")
            if body.documents is None:
                raise HTTPError(400, "`documents` is missing: a list of texts", param="documents", code="invalid")
            owners = corpus_owners(request.scope, body.cache_salt)
            documents = [encode_text(served.tokenizer, text) for text in body.documents]
            with served.turn.left():
                name, num_tokens = served.corpora.add(owners, body.corpus_id, documents)
            return {"success": True, "corpus_id": name, "message": "", "loaded_token_count": num_tokens}

        return await server.read(request, AddCorpusRequest, work)

    @router.post("/remove_external_corpus", **_body(RemoveCorpusRequest))
    async def remove_external_corpus(request: Request) -> dict[str, Any]:
        """Remove a corpus that the client added."""
        body = parse_body(await _read_body(request), RemoveCorpusRequest)
        served.corpora.remove(corpus_owners(request.scope, body.cache_salt)[0], body.corpus_id)
        return {"success": True, "message": ""}

    @router.get("/list_external_corpora")
    async def list_external_corpora(request: Request, cache_salt: str | None = None) -> dict[str, Any]:
        """Numbers of tokens of the corpora that the client's requests may name."""
        counts: dict[str, int] = {}
        for owner in reversed(corpus_owners(request.scope, cache_salt)):
            counts |= served.corpora.num_tokens(owner)
        return {"success": True, "corpus_token_counts": counts, "message": ""}

    return router


def _tokens_of(served: ServedModel, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        return chat_tokens(served, body)
    if body.prompt is None:
        raise HTTPError(400, "prompt: a text, or `messages`", param="prompt")
    served.check_text_len(len(body.prompt), "prompt")
    if body.add_special_tokens is False:
        return encode_text(served.tokenizer, body.prompt)
    return served.llm.encode(body.prompt)[0]


def _check_tokens(served: ServedModel, tokens: Seq[int]) -> None:
    size = served.llm.bundle.config.vocab_size
    foreign = next((token for token in tokens if token >= size), None)
    if foreign is not None:
        raise HTTPError(400, f"a token is outside the vocabulary of {size}: {foreign}", param="tokens")


async def _read_body(request: Request) -> bytes:
    """The whole body; HTTPError if it is too long or too slow, ClientGone if the client has disconnected."""
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced) > _MAX_BODY_BYTES:
        raise _too_long()
    body = bytearray()
    try:
        async with asyncio.timeout(_READ_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > _MAX_BODY_BYTES:
                    raise _too_long()
    except TimeoutError:
        raise HTTPError(408, f"the body did not come within {_READ_TIMEOUT_S} s") from None
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(body)


def _too_long() -> HTTPError:
    return HTTPError(413, f"the body is longer than {_MAX_BODY_BYTES} bytes", code="body_too_long")


def _answered(model: type[Any], answer: type[Any]) -> dict[str, Any]:
    """OpenAPI description of a route that generates: its body and its answer."""
    described = _body(model)
    return described | {"responses": described["responses"] | errors(429, 500, 503, 504) | answers(answer)}


def _body(model: type[Any]) -> dict[str, Any]:
    """OpenAPI description of a route whose body is parsed by hand."""
    return {"openapi_extra": body_of(model), "responses": errors(400, 404, 408, 413)}


async def _on_error(request: Request, error: Any) -> Response:
    told = FieldNames().told(error)
    note_error(request.scope, told.code)
    return JSONResponse(told.body_at(request.url.path), told.status, told.headers)


async def _on_client_gone(request: Request, error: Any) -> Response:
    return Response(status_code=499)


async def _on_routing_error(request: Request, error: Any) -> Response:
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    if error.status_code == 404:
        schema = request.app.openapi()  # the routes that clients are told of
        message += what_is_there(request.url.path, {path: map(str.upper, own) for path, own in schema["paths"].items()})
    elif error.status_code == 405 and (methods := (error.headers or {}).get("Allow")):
        message += f"; it takes {methods}"
    body = HTTPError(error.status_code, message).body_at(request.url.path)
    return JSONResponse(body, error.status_code, error.headers)


async def _on_bug(request: Request, error: Exception) -> Response:
    return JSONResponse(internal_error().body_at(request.url.path), 500)
