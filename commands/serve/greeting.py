"""The lines that `serve` prints when it begins to listen: model, limits, drafter, routes, page, address."""

from collections.abc import Iterator

from commands.serve.http.server import Address
from commands.serve.served import ServedModel
from runtime.checkpoint.config import EngineConfig

_ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/models",
    "/metrics",
)


def greeting(served: ServedModel, address: Address) -> Iterator[str]:
    """The lines; the last has the address, since a program that starts a server waits for that line."""
    yield (
        f"{served.name}: {_formats(served.llm.bundle.config)}, {served.max_model_len:,} tokens of context, "
        f"{served.llm.engine.max_batch_size} at once; {served.drafter}"
    )
    yield f"routes: {', '.join(_ROUTES)}; {address.url}/ is a page to try it"
    reach = "only this machine reaches it" if address.is_of_this_machine else "other machines reach it"
    yield f"{served.name} at {address.url} ({reach}); Ctrl-C ends"


def _formats(config: EngineConfig) -> str:
    """Number formats: `bfloat16`, or `W4A16 weights, bfloat16, INT8 K/V`."""
    found = config.quantization
    weights = [] if found is None or found.weights is None else [found.weights]
    kv_cache = [] if found is None or found.kv_cache_quant_algo is None else [f"{found.kv_cache_quant_algo} K/V"]
    return ", ".join([*weights, config.dtype, *kv_cache])
