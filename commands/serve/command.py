"""`specdec serve`: its flags, and the checks that need no torch."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

from commands.options.engine_choice import EngineChoice, EngineOptions, KVDiskOptions
from commands.options.expand import expand_groups
from commands.options.shared import MaxNumTokens
from commands.output.output import Output
from commands.serve.flags import ServerOptions
from runtime.core.params import SamplingParams
from runtime.util.errors import SpecDecError


@dataclass(frozen=True)
class ServeInputs:
    """Settings of the served model and its answers."""

    max_num_tokens: MaxNumTokens = None


_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


@expand_groups
def serve(engine: EngineOptions, disk: KVDiskOptions, inputs: ServeInputs, server: ServerOptions) -> None:
    """Serve a model over HTTP, as OpenAI's clients expect it, with speculation in a running batch.

    Only this machine can reach the server unless `--host` opens it. `/` is a page to try the model, `/metrics` has
    metrics.
    """
    with _kept_for_good():
        choice = choose(engine, disk, inputs, server)

        from commands.options.sessions import open_setup_of_models
        from commands.serve.http.server import Address, listen
        from commands.serve.work import serve_setup

        with listen(Address(server.host, server.port)) as bound, open_setup_of_models(choice, Output()) as setup:
            address = Address(server.host, bound.getsockname()[1], has_tls=server.ssl_certfile is not None)
            names = tuple(server.served_model_name or [choice.model_name])
            serve_setup(setup, bound, address, names, server)


def choose(engine: EngineOptions, disk: KVDiskOptions, inputs: ServeInputs, server: ServerOptions) -> EngineChoice:
    """Check all flags, without torch; returns the engine to open. SpecDecError for flags that do not fit together, a
    package that is not installed, or a model, an engine or another file that cannot be opened.
    """
    engine = engine.named()
    server.check()
    _check_packages()
    engine.check_is_leader("a server")
    choice = engine.choose(SamplingParams(), inputs.max_num_tokens, "leader", requests_draft=True, answers_many=True)
    choice = choice.with_disk(disk).with_pools(engine.speculation)
    choice.check_tokenizer()
    return choice


@contextmanager
def _kept_for_good() -> Iterator[None]:
    """Turn Python's garbage collector off while the model is opened: it would take 0.6 s to find that every object made
    so far is still needed. `serve_setup` turns it on again before the first request.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _check_packages() -> None:
    """SpecDecError if a package of the extra `serve` is not installed; it runs before a model is opened."""
    for name in _PACKAGES:
        try:
            import_module(name)
        except ImportError:
            raise SpecDecError(
                f"`specdec serve` needs a package that is not installed: {name}",
                hint="pip install 'specdec-cli[serve]'",
            ) from None
