"""Routes of other servers, and misspelt routes of ours: a 404 names the route that does the same here."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

_CHAT, _COMPLETIONS, _MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
_SAME_HERE = {
    # Ollama's
    "/api/chat": _CHAT,
    "/api/generate": _COMPLETIONS,
    "/api/tags": _MODELS,
    "/api/show": _MODELS,
    "/api/ps": "/requests",
    "/api/version": "/version",
    # llama.cpp's
    "/completion": _COMPLETIONS,
    "/infill": _COMPLETIONS,
    "/apply-template": "/tokenize",
    "/props": _MODELS,
    "/slots": "/requests",
    # Text Generation Inference's and SGLang's
    "/generate": _COMPLETIONS,
    "/generate_stream": _COMPLETIONS,
    "/info": _MODELS,
    "/get_model_info": _MODELS,
    # vLLM's and SageMaker's
    "/invocations": _CHAT,
    "/ping": "/health",
    # what people type
    "/v1": _MODELS,
    "/api": _MODELS,
    "/v1/chat": _CHAT,
    "/chat": _CHAT,
}
_EMBEDDINGS = ("/api/embed", "/api/embeddings", "/embed", "/embedding", "/embeddings", "/v1/embedding")


def what_is_there(path: str, methods: Mapping[str, Iterable[str]]) -> str:
    """The end of the error for an unknown path; empty if no route here is similar. `methods` has the methods of each
    route of this server: `{"/v1/models": {"GET"}}`.
    """
    path = "/" + path.strip("/")
    if path in _EMBEDDINGS:
        return "; this server generates text, and computes no embeddings"
    route = _SAME_HERE.get(path) or _with_other_beginning(path, methods) or _misspelt(path, methods)
    if route is None:
        return ""
    return f"; this server has {' and '.join(sorted(methods[route]))} {route}"


def _with_other_beginning(path: str, routes: Iterable[str]) -> str | None:
    """The route that a path with a wrong beginning means: `/v1/v1/models` and `/openai/models` stand for `/v1/models`,
    when a client's base URL is wrong.
    """
    same = [route for route in routes if "{" not in route and path.endswith(route.removeprefix("/v1"))]
    return max(same, key=len, default=None)


def _misspelt(path: str, routes: Iterable[str]) -> str | None:
    return next(iter(get_close_matches(path, [route for route in routes if "{" not in route], 1, 0.85)), None)
