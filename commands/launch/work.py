"""A launch: finds or starts the server, writes the agent's settings, runs the agent, and ends a server of its own."""

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from commands.launch.files import configured, shown
from commands.launch.fitting import engine_context, fitting_flags, flags_given, is_engine
from commands.launch.server import Served, ask_server, started
from commands.launch.tools import KEY_VARIABLE, NO_KEY, Connection, Tool
from commands.output.output import stderr, visible, warn
from runtime.util.errors import SpecDecError, UsageError


@dataclass(frozen=True)
class Launch:
    """A launch as the user asked for it. `flags` are a model, perhaps, and flags of `serve`. `arguments` are the
    agent's. `settings` has the values that variables and files give for flags of `serve`: `{"max-seq-len": "8192"}`.
    """

    host: str
    port: int
    keys: Sequence[str]
    flags: Sequence[str]
    arguments: Sequence[str]
    settings: Mapping[str, str]
    check: Callable[[list[str]], object]
    """Raises for arguments that `specdec serve` refuses."""

    @property
    def key(self) -> str:
        return self.keys[0] if self.keys else NO_KEY

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def model(self) -> str | None:
        """The model or engine of the launch: the first word, the value of its flag, or the value in a file of
        settings. None for an engine that is not there, which `serve` will tell.
        """
        if self.flags and not self.flags[0].startswith("-"):
            return self.flags[0]
        engine = self.value("engine-dir")
        return self.value("model-dir") or (engine if engine is not None and is_engine(engine) else None)

    def value(self, name: str) -> str | None:
        """Value of a flag of `serve`, from the command line or a file of settings."""
        return next(_values(self.flags, name), None) or self.settings.get(name)

    @property
    def serve_arguments(self) -> list[str]:
        """Arguments for `specdec serve`, which takes them. UsageError where no model is named."""
        if not self.flags and self.model is None and self.value("engine-dir") is None:
            raise UsageError(
                f"no server listens at {self.url}, and no model is named to start one",
                hint="name a model: `specdec launch TOOL MODEL`",
            )
        is_word = bool(self.flags) and not self.flags[0].startswith("-")
        first = ["--engine-dir" if is_engine(self.flags[0]) else "--model-dir"] if is_word else []
        fitting = (
            [] if self.model is None else fitting_flags(self.model, flags_given(self.flags) | self.settings.keys())
        )
        address = ["--host", self.host, "--port", str(self.port)]
        arguments = [*first, *self.flags, *fitting, *address]
        self.check(arguments)
        return arguments

    def names(self) -> set[str]:
        """Names that a server of this model may report; empty if no model is named."""
        if self.model is None:
            return set()
        own = Path(self.model).expanduser()
        served = self.value("served-model-name")
        return {self.model, own.name, own.resolve().name, *([] if served is None else [served])}


def _values(flags: Sequence[str], name: str) -> Iterator[str]:
    """Values that a flag has on the command line: `--model-dir demo` and `--model-dir=demo`."""
    for i, flag in enumerate(flags):
        if flag.startswith("-") and flags_given([flag]) == {name}:
            value = flag.partition("=")[2] or next(iter(flags[i + 1 : i + 2]), "")
            if value:
                yield value


def run(tool: Tool, launch: Launch, print_only: bool) -> int:
    """Run the agent; returns its exit status. SpecDecError if the agent or the model is missing, or if either does not
    start.
    """
    if print_only:
        _print(tool, launch)
        return 0
    executable = shutil.which(tool.executable)
    if executable is None:
        raise SpecDecError(f"{tool.title} is not installed: {tool.executable}", hint=tool.install)
    with ExitStack() as stack:
        stack.enter_context(_cleans_up_on_hangup())
        served = _running(launch)
        if served is None:
            arguments = launch.serve_arguments
            stderr().print(f"specdec serve {visible(shlex.join(arguments))}", soft_wrap=True)
            environment = os.environ | ({KEY_VARIABLE: ",".join(launch.keys)} if launch.keys else {})
            served = stack.enter_context(started(arguments, environment, launch.key))
        connection = Connection(served.url, served.names[0], launch.key, served.context)
        _warn_of_short_context(tool, served)
        for line in _settings(tool, connection):
            stderr().print(visible(line), soft_wrap=True)
        if tool.file is not None:
            stack.enter_context(configured(tool.file, connection))
        environment = os.environ | tool.environment(connection)
        return _run_agent([executable, *launch.arguments], environment)


def _running(launch: Launch) -> Served | None:
    """The server at the address; None if a server is to be started. SpecDecError if the server has another model, or
    refuses the key.
    """
    served = ask_server(launch.url, launch.key) if launch.port else None
    if served is None:
        return None
    names = launch.names()
    if names and not names & set(served.names):
        raise SpecDecError(
            f"the server at {launch.url} has `{served.names[0]}`, and not: {launch.model}",
            hint="leave the model out, or start another server: `--port 8001`",
        )
    stderr().print(f"takes the server at {launch.url}, which has {served.names[0]}", soft_wrap=True)
    if ignored := [flag for flag in launch.flags if flag.startswith("--")]:
        warn(f"the server runs already, and flags do not change it: {' '.join(ignored)}")
    return served


def _warn_of_short_context(tool: Tool, served: Served) -> None:
    if served.context < tool.prompt_len:
        warn(
            f"{tool.title} begins with about {tool.prompt_len:,} tokens, and the server takes {served.context:,}: "
            "a model with more positions, or a higher `--max-seq-len`"
        )


def _settings(tool: Tool, connection: Connection) -> Iterator[str]:
    """The agent's settings in a form to type: lines for a shell, and lines for its config file."""
    for name, value in tool.environment(connection).items():
        is_secret = connection.has_key and value == connection.key
        yield f"export {name}={f'${KEY_VARIABLE}' if is_secret else shlex.quote(value)}"
    if tool.file is not None:
        yield f"# in {tool.file.path()}:"
        for line in shown(tool.file, connection).rstrip("\n").splitlines():
            yield line.replace(connection.key, f"${KEY_VARIABLE}") if connection.has_key else line


def _print(tool: Tool, launch: Launch) -> None:
    """Print the commands that would be run, and the settings that the agent would get. If no server answers, its
    settings are those of the server that would be started.
    """
    served = ask_server(launch.url, launch.key) if launch.port else None
    if served is None:
        arguments = launch.serve_arguments
        print(f"specdec serve {shlex.join(arguments)}")
        model = launch.model or "engine_outputs"
        name = launch.value("served-model-name") or Path(model).resolve().name
        asked = next(_values(arguments, "max-seq-len"), None) or launch.settings.get("max-seq-len", "4096")
        served = Served(launch.url, (name,), engine_context(model) or int(asked))
    _warn_of_short_context(tool, served)
    for line in _settings(tool, Connection(served.url, served.names[0], launch.key, served.context)):
        print(visible(line))
    print(shlex.join([tool.executable, *launch.arguments]))


def _run_agent(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the agent; returns its exit status, or 128 + N if signal N ended it. Ctrl-C ends only the agent meanwhile.
    SpecDecError if it cannot be run.
    """
    before = signal.signal(signal.SIGINT, lambda *_: None)  # not SIG_IGN, which the agent would inherit
    try:
        with subprocess.Popen(command, env=dict(environment)) as process:
            try:
                code = process.wait()
            except BaseException:  # SIGTERM: end the agent that was started
                process.terminate()
                raise
    except OSError as error:
        raise SpecDecError(f"cannot be run ({error.strerror}): {command[0]}", hint="install it again") from None
    finally:
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code


@contextmanager
def _cleans_up_on_hangup() -> Iterator[None]:
    """Have the end of the terminal (SIGHUP) end the block as SIGTERM does, so that the blocks around it clean up."""
    before = signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
