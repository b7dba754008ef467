"""`specdec serve`: an HTTP server that OpenAI's clients know."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from commands.inputs.paths import check_models
from commands.options.expand import expand_groups
from commands.options.kv_cache import KVCacheOptions
from commands.options.leader import LeaderOptions
from commands.options.serve import ServeInputs, ServerOptions
from commands.options.speculation import SpeculationOptions
from commands.output import Output
from runtime.errors import SpecDecError, UsageError
from runtime.params import SamplingParams

_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


@expand_groups
def serve(
    inputs: ServeInputs,
    server: ServerOptions,
    speculation: SpeculationOptions,
    kv_cache: KVCacheOptions,
    leader: LeaderOptions,
) -> None:
    """Serve a model over HTTP, as OpenAI's clients expect it, with speculation in a running batch.

    Only this machine can reach it unless `--host` says otherwise. A page to try it is at `/`, metrics at `/metrics`.
    """
    with _kept_for_good():
        _serve(inputs, server, speculation, kv_cache, leader)


def _serve(
    inputs: ServeInputs,
    server: ServerOptions,
    speculation: SpeculationOptions,
    kv_cache: KVCacheOptions,
    leader: LeaderOptions,
) -> None:
    server.check()
    _check_packages()
    if leader.mode == "orchestrator":
        raise UsageError("a server runs in leader mode: `--mode orchestrator`", hint="leave the flag out")
    chosen = leader.chosen(inputs.engine_dir, speculation, is_either=False)
    kv_cache.check(is_leader=True, disable_reuse=leader.disable_kv_cache_reuse)
    chosen = chosen.or_profile(speculation.profile, inputs.engine).check()
    check_models(inputs.engine, leader.model_dir, inputs.tokenizer_dir, chosen.speculation)

    from commands.serving.running import Serving, serve_setup
    from commands.serving.server import Address, listen
    from commands.sessions import SessionOptions, open_setup_of_models
    from runtime.engine import DEFAULT_MAX_NUM_TOKENS

    output = Output()
    cache = kv_cache.config(disable_reuse=leader.disable_kv_cache_reuse)
    num_tokens = inputs.max_num_tokens or DEFAULT_MAX_NUM_TOKENS
    options = SessionOptions(inputs.engine, inputs.tokenizer_dir, chosen, SamplingParams(), cache, "leader", num_tokens)
    with listen(Address(server.host, server.port)) as bound:
        address = Address(server.host, bound.getsockname()[1])
        with open_setup_of_models(leader.models(), options, output) as setup:
            names = server.names(inputs.engine, leader.model_dir)
            serve_setup(setup, bound, Serving(address, names, server))


@contextmanager
def _kept_for_good() -> Iterator[None]:
    """Nothing is looked through for garbage until the server has been opened: it takes 0.6 s, and all of it stays."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _check_packages() -> None:
    """SpecDecError, before a model is opened, if the extra is not installed."""
    for name in _PACKAGES:
        try:
            import_module(name)
        except ImportError:
            raise SpecDecError(
                f"`specdec serve` needs a package that is not installed: {name}",
                hint="pip install 'specdec-cli[serve]'",
            ) from None
