"""The Typer application: registers the commands and turns errors into exit codes.

0 success; 1 a failed check or an error of files, machine or settings; 2 wrong usage; 3 a check that had too little to
tell; 130 interrupted.
"""

from specdec_cli.signals import restore  # before the modules that take time to import

# isort: split

import codecs
import errno
import inspect
import io
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial, wraps
from inspect import Parameter
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from commands.batch.command import batch
from commands.build.command import build
from commands.cache.command import list_engines, list_models, prune, pull, rm
from commands.chat.command import chat
from commands.check.command import check
from commands.compare.command import compare
from commands.config.command import show
from commands.convert.command import convert
from commands.corpus.command import create, merge, stats
from commands.doctor.command import doctor
from commands.drafters.command import drafters
from commands.fingerprint.command import fingerprint
from commands.integrity.command import verify
from commands.launch.command import ARGUMENTS_OF_TOOL, launch
from commands.options.foreign import Flags, typed_spellings, without_foreign
from commands.options.hints import help_hint, hint_of, message_of, usage_message
from commands.options.parameters import PREFIX, SECRET
from commands.options.settings import begin, settle, told_origin, trace
from commands.options.shared import COMMON
from commands.options.spellings import TYPED, as_typed, empty_value, normalize_name, read_arguments, with_usual_values
from commands.output.help import INPUT, option, sort_by_panel
from commands.output.output import Output, fail, say_interrupted, warn
from commands.output.short_help import (
    LEAST_WIDTH,
    WIDTH,
    full_help,
    needs_plain_help,
    overview,
    short_help,
    terminal_width,
)
from commands.predict.command import predict
from commands.regress.command import regress
from commands.run.command import run
from commands.schema.command import schema
from commands.serve.command import serve
from commands.summarize.command import summarize
from commands.train.command import train
from commands.tune.command import tune
from runtime.checkpoint.hub import PROGRESS
from runtime.drafters.plugins import tell_problems
from runtime.util.collector import collect_rarely
from runtime.util.errors import SpecDecError, SpecDecWarning, UsageError
from runtime.util.out_of_memory import check_address_space, is_out_of_memory, out_of_memory
from runtime.util.panics import hold_panics
from runtime.util.temporary import temporary_dir

_EXAMPLES = {
    convert: (
        "specdec convert demo",
        "specdec convert ./Llama-3.2-1B --output-dir ckpt --quantization int4",
    ),
    build: (
        "specdec build --max-draft-len 10",
        "specdec build --checkpoint-dir ckpt --output-dir engine --max-batch-size 1 --max-seq-len 512",
    ),
    run: (
        'specdec run demo "def area(w, h):" --spec-decode-algo AUTO --check-lossless',
        "specdec run ./Llama-3.2-1B --quantization int4 - < README.md",
    ),
    chat: (
        "specdec chat ./Llama-3.2-1B-Instruct --spec-decode-algo AUTO",
        'specdec chat ./model.gguf --system "You are brief." --show-tokens',
    ),
    serve: (
        "specdec serve demo --spec-decode-algo AUTO",
        "specdec serve ./Llama-3.2-1B-Instruct --kv-cache-dtype int8 --max-seq-len 16384 --port 8000",
    ),
    launch: (
        "specdec launch claude ./Qwen3-4B",
        "specdec launch codex ./Qwen3-4B --max-seq-len 65536 -- exec 'fix the failing test'",
    ),
    batch: (
        "specdec batch demo -i requests.jsonl -o results.jsonl --spec-decode-algo AUTO",
        "specdec batch engine -i requests.jsonl -o results.jsonl --ray local --num-workers 2",
    ),
    summarize: (
        "specdec summarize demo --spec-decode-algo AUTO --check-lossless --check-accuracy",
        "specdec summarize engine --test-engine --test-hf --hf-model-dir demo --dataset my.jsonl",
    ),
    create: (
        "specdec corpus create --output code.corpus --tokenizer-dir engine --text manual.txt --text snippets.jsonl",
        "specdec corpus create --output answers.corpus --tokenizer-dir engine --traces traces.jsonl",
    ),
    merge: (
        "specdec corpus merge --output all.corpus code.corpus answers.corpus",
        "specdec corpus merge --output answers.corpus --force monday.corpus tuesday.corpus",
    ),
    stats: ("specdec corpus stats all.corpus", "specdec corpus stats all.corpus --json"),
    list_models: ("specdec list", "specdec list --json"),
    pull: ("specdec pull Qwen/Qwen3-0.6B", "specdec pull unsloth/Qwen3-0.6B-GGUF:Q4_K_M"),
    rm: ("specdec rm unsloth/Qwen3-0.6B-GGUF:Q4_K_M", "specdec rm demo"),
    list_engines: ("specdec cache list", "specdec cache list --json"),
    prune: ("specdec cache prune --max-size 20G --dry-run", "specdec cache prune --max-size 0"),
    compare: (
        "specdec compare before.json after.json",
        "specdec compare ngram.json draft-model.json --json",
    ),
    tune: (
        "specdec tune demo --input-file prompts.jsonl --save",
        "specdec tune --traces traces.jsonl --ngram-pool public",
    ),
    train: (
        "specdec train ./Llama-3.2-1B-Instruct --draft-model-dir ./EAGLE3-head --traces traces.jsonl --output-dir head",
        "specdec train demo --input-file prompts.jsonl --output-dir head --num-epochs 6",
    ),
    doctor: (
        "specdec doctor demo --spec-decode-algo AUTO --input-file prompts.jsonl",
        "specdec doctor engine --profile tuned.json",
    ),
    drafters: (
        "specdec drafters demo",
        "specdec drafters ./Qwen3-4B --traces traces.jsonl --draft-model-dir ./PARD-Qwen3-0.6B --measure",
    ),
    check: (
        "specdec check receipts.jsonl --model-dir demo",
        "specdec check receipts.jsonl --engine-dir engine --report check.html",
    ),
    regress: (
        "specdec regress --traces old.jsonl --engine-dir engine-int4 --against engine --report int4.html",
        "specdec regress --traces receipts.jsonl --model-dir demo --max-diverged 2%",
    ),
    fingerprint: (
        "specdec fingerprint --model-dir demo --json > here.json",
        "specdec fingerprint --engine-dir engine --expect there.json",
    ),
    predict: (
        "specdec predict --traces traces.jsonl --costs other-engine/config.json",
        "specdec predict --traces traces.jsonl --costs other-engine/config.json --batch-size 4 --json",
    ),
    show: ("specdec config show", "specdec config show serve --config prod.yaml"),
    verify: ("specdec verify engine", "specdec verify ~/.cache/specdec --json"),
    schema: ("specdec schema", "specdec schema run > run.schema.json"),
}


_EXAMPLES_OF = {command.__name__: examples for command, examples in _EXAMPLES.items()}
_START = (
    'specdec run demo "def area(w, h):" --spec-decode-algo AUTO',
    "specdec chat HuggingFaceTB/SmolLM2-135M-Instruct --quantization int8",
    "specdec serve ./model.gguf --spec-decode-algo AUTO",
)
"""Commands that `specdec --help` begins with."""
_LONG = (run, chat, serve, batch, doctor, tune, summarize)
"""Commands with many flags, of which `--help` shows the common ones."""
_COMPUTING = (*_LONG, convert, build, train, check, regress, fingerprint, drafters)
"""Commands that compute by a model."""
_CONFIGURED = (*(command for command in _COMPUTING if command is not drafters), show)
"""Commands with `--config`."""


_METAVARS = {"int": "N", "float": "X", "path": "PATH", "str": "TEXT", "bool": "", "list[str]": "TEXT"}


def _metavar(shown: str) -> str:
    """Typer's `<int> [1<=x<=8]` is N, a switch has none, and choices are in brackets: [none|summary]."""
    kind = shown.partition(" ")[0].strip("<>")
    return _METAVARS.get(kind, f"[{kind}]" if "|" in kind else kind.upper())


def _name_types(params: Iterable[Any], ctx: Any) -> None:
    for param in params:
        if isinstance(param, TyperOption) and param.metavar is None:
            param.metavar = _metavar(param.display_type_rich(ctx) or "")
            bounds = param._get_number_range_help_str() or ""
            if "<=x<=" in bounds:  # Typer's `1<=x<=1024` leaves no room for long flags
                least, _, most = bounds.partition("<=x<=")
                short = f"{least}–{most}" if len(most) < 7 else f"x>={least}"
                param._get_number_range_help_str = lambda short=short: short  # type: ignore[method-assign, misc]


class _Group(TyperGroup):
    """Several commands."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if ctx.parent is None:
            formatter.write(_overview(terminal_width()))
            return
        _name_types(self.get_params(ctx), ctx)
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args or ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        if text := ctx.get_help():  # Typer has printed the help of a group below `specdec`
            typer.echo(text)
        raise typer.Exit(2)


class _Command(TyperCommand):
    """A command that takes other programs' flags, and warns once of those that mean nothing here."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The short help of a command with many flags; for other commands, Typer's panels in the order of all commands.
        Types are shown narrow (`N`): beside wide types Typer cuts the names of flags.
        """
        if any(param.name == "help_all" for param in self.params) and not ctx.meta.get(_SHOWS_ALL):
            formatter.write(_short_help(self, ctx, terminal_width()))
            return
        all_params, self.params = self.params, sort_by_panel(self.params)
        _name_types(self.get_params(ctx), ctx)
        if needs_plain_help(self, columns := shutil.get_terminal_size().columns):
            letters = sys.stdout.encoding or "utf-8"  # Typer would write others in UTF-8
            text = full_help(self, ctx.command_path, max(columns, LEAST_WIDTH))
            formatter.write(text.encode(letters, "specdec").decode(letters))
            self.params = all_params
            return
        if self.name not in {command.__name__ for command in _LONG}:  # all flags have one, and there is one help
            for param in (one for one in self.params if isinstance(one, TyperOption)):
                param.show_envvar = param.envvar is not None
        super().format_help(ctx, formatter)
        self.params = all_params

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = self._own_flags()
        TYPED.set(typed_spellings(args, own))
        kept = with_usual_values(without_foreign(args, own), self.name or "")
        if not ctx.resilient_parsing:
            begin(ctx)
        empty = empty_value(kept, own.with_value, self.name or "")
        if empty is not None:
            what = f"`{empty}`" if empty else "an argument"
            raise UsageError(f"{what} has an empty value: ''", hint=help_hint(ctx, [empty]))
        self._tell_overruled(kept, own)
        try:
            rest = super().parse_args(ctx, kept)
            if not ctx.resilient_parsing:
                settle(ctx)
            return rest
        except UsageError:
            trace(ctx)
            raise
        except typer.TyperException as error:
            if getattr(error, "ctx", None) is None:
                error.ctx = ctx  # type: ignore[attr-defined]  # so that the hint names the command
            raise

    def make_parser(self, ctx: Any) -> Any:
        """Make a parser that also knows the opposite of a switch: `--no-streaming` for `--streaming`, and `--cache` for
        `--no-cache`. With it the command line overrules a variable or a file of settings. `--help` does not list these
        opposites.
        """
        parser = super().make_parser(ctx)
        switches = [param for param in self.params if isinstance(param, TyperOption) and param.is_bool_flag]
        taken = {normalize_name(name.lstrip("-"), self.name or "") for param in self.params for name in param.opts}
        for switch in (one for one in switches if not one.is_eager):
            names = {_opposite(name.removeprefix("--")) for name in switch.opts if name.startswith("--")}
            for name in sorted(names - taken):
                parser.add_option(switch, [f"--{name}"], switch.name, action="store_const", const=False)
        return parser

    def _tell_overruled(self, arguments: list[str], own: Flags) -> None:
        """Warn of a flag that is given twice with different values, perhaps in two spellings, or of a switch that is
        turned on and off. The last value holds: scripts that append a flag to a command line rely on it.
        """
        options = {name.removeprefix("--"): one for one in self.params for name in one.opts}
        switches = {name: one for name, one in options.items() if isinstance(one, TyperOption) and one.is_bool_flag}
        options = {_opposite(name): one for name, one in switches.items()} | options
        given: dict[str, tuple[str, str]] = {}
        for word, name, value in read_arguments(arguments, own.with_value, self.name or ""):
            option = options.get(name)
            if option is None or option.param_type_name != "option" or option.multiple or not option.name:
                continue
            now = (word, name if value is None else value)
            before, given[option.name] = given.get(option.name, now), now
            if before[1] != now[1]:
                _tell_one(option.name, before, now, has_value=value is not None)

    def _own_flags(self) -> Flags:
        options = [option for option in self.params if isinstance(option, TyperOption)]
        long, with_value = (
            frozenset(name.removeprefix("--") for option in some for name in option.opts)
            for some in (options, [option for option in options if not option.is_flag])
        )
        short = frozenset(name for option in options for name in option.opts if not name.startswith("--"))
        return Flags(self.name or "", long | {"help", "help-all"}, with_value, short)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. After Ctrl-C, say that the command was interrupted, unless it has shown its results so far
        and leaves by `typer.Exit`.
        """
        _invoked.append(self.name or "")
        output = Output(*(bool(ctx.params.get(name)) for name in ("json", "quiet")))
        PROGRESS.set(output.byte_progress)
        if self.name in {command.__name__ for command in _COMPUTING}:
            check_address_space()
        try:
            return super().invoke(ctx)
        except BaseException as error:
            if signal.SIGINT in _stopped_by and not isinstance(error, typer.Exit):
                say_interrupted()
            raise


def _tell_one(name: str, before: tuple[str, str], now: tuple[str, str], *, has_value: bool) -> None:
    """Warn that the flag `before` gives way to the flag `now`; each is a pair of the flag's word and its value. Values
    are shown if the flag has any.
    """
    shown = [" ".join(one) if has_value and name != SECRET else one[0] for one in (before, now)]
    other = "" if before[0] == now[0] or not has_value else "the same flag, "
    warn(f"`{shown[0]}` is overruled by `{shown[1]}`, {other}given later")


def _opposite(name: str) -> str:
    return name.removeprefix("no-") if name.startswith("no-") else f"no-{name}"


def _overview(width: int = WIDTH) -> str:
    group: Any = typer.main.get_command(app)
    return overview(group.commands.keys(), _START, width)


def _short_help(command: TyperCommand, ctx: Any, width: int = WIDTH) -> str:
    _name_types(command.params, ctx)
    return short_help(command, COMMON, _EXAMPLES_OF[command.name or ""], width)


def help_texts() -> dict[str, str]:
    """The help of `specdec`, "", and of each command with many flags, for 80 columns."""
    group: Any = typer.main.get_command(app)
    commands = {command.__name__: group.commands[command.__name__] for command in _LONG}
    return {"": _overview()} | {
        name: _short_help(command, typer.Context(command, info_name=name)) for name, command in commands.items()
    }


class _CommandWithRest(_Command):
    """A command that passes on the flags that it does not know, and passes to another program everything that stands
    after `--`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = args[: args.index("--")] if "--" in args else args
        ctx.meta[ARGUMENTS_OF_TOOL] = args[len(own) + 1 :]
        begin(ctx)
        self._tell_overruled(own, self._own_flags())
        rest = TyperCommand.parse_args(self, ctx, own)
        settle(ctx)
        return rest


_SHOWS_ALL = "specdec.shows_all_flags"


def _show_all_flags(ctx: typer.Context, is_asked: bool) -> None:
    if is_asked:
        ctx.meta[_SHOWS_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


_HELP_ALL = Parameter(
    "help_all",
    Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option(
            "--help-all",
            help="Show all flags, also the seldom used ones, and exit.",
            is_eager=True,
            callback=_show_all_flags,
            allow_from_autoenv=False,
        ),
    ],
)
_CONFIG = Parameter(
    "config",
    Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        option(
            INPUT,
            "Settings: flags in a YAML file, for what the command line and variables do not say.",
            shown="~/.config/specdec/config.yaml",
            metavar="FILE.yaml",
            is_eager=True,
        ),
    ],
)


def _with_flags(command: Callable[..., None], flags: list[Parameter]) -> Callable[..., None]:
    """The command with flags that are accepted and never handed to it."""
    signature = inspect.signature(command)
    names = {flag.name for flag in flags}

    @wraps(command)
    def with_flags(**given: Any) -> None:
        command(**{name: value for name, value in given.items() if name not in names})

    with_flags.__signature__ = signature.replace(parameters=[*flags, *signature.parameters.values()])  # type: ignore[attr-defined]
    return with_flags


app = typer.Typer(
    name="specdec",
    cls=_Group,
    help="Speculative decoding for Hugging Face models: convert, build, run, chat, serve, launch, batch, summarize, "
    "compare, tune, train, doctor, drafters, check, regress, fingerprint, predict; corpora; the cache; verify; schema.",
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"token_normalize_func": normalize_name, "help_option_names": ["-h", "--help"]},
)


corpus_app = typer.Typer(
    cls=_Group,
    help="Make, merge and describe corpora: files of text in which n-gram lookup searches.",
)
app.add_typer(corpus_app, name="corpus")
cache_app = typer.Typer(cls=_Group, help="Show the engines that models were built into, and remove the oldest.")
app.add_typer(cache_app, name="cache")
config_app = typer.Typer(cls=_Group, help="Show the settings of variables and files.")
app.add_typer(config_app, name="config")


def _register(command: Callable[..., None], group: typer.Typer = app, name: str | None = None) -> None:
    epilog = "Examples:\n\n" + "\n\n".join(f"`{example}`" for example in _EXAMPLES[command])
    names: dict[str, Any] = {"token_normalize_func": partial(normalize_name, command=command.__name__)}
    names["auto_envvar_prefix"] = PREFIX
    flags = [_HELP_ALL] * (command in _LONG) + [_CONFIG] * (command in _CONFIGURED)
    shown = _with_flags(command, flags) if flags else command
    if command is launch:
        names["ignore_unknown_options"] = True
    kind = _CommandWithRest if command is launch else _Command
    group.command(name, cls=kind, epilog=epilog, context_settings=names)(shown)


_IN_GROUPS = {
    **dict.fromkeys((create, merge, stats), corpus_app),
    **dict.fromkeys((list_engines, prune), cache_app),
    show: config_app,
}
for _command in _EXAMPLES:
    _register(_command, _IN_GROUPS.get(_command, app), "list" if _command in (list_models, list_engines) else None)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"specdec {version('specdec-cli')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks (also SPECDEC_DEBUG=1).")] = False,
) -> None:
    if debug:
        os.environ["SPECDEC_DEBUG"] = "1"


def main() -> None:
    """The `specdec` command."""
    try:
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signal_number, _stop)
        collect_rarely()
        hold_panics()
        _open_closed_streams()
        _replace_what_cannot_be_written()
        _have_waiting_threads_sleep()
        _keep_out_of_the_common_directory()
        warnings.simplefilter("always", SpecDecWarning)
        warnings.showwarning = _show_warning
        if "_SPECDEC_COMPLETE" not in os.environ:
            tell_problems()
        exit_code = 0 if is_spare() else app(prog_name="specdec", standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:
        if _stopped_by:
            # Compiled code may have turned the signal's exception into another error.
            sys.exit(128 + _stopped_by[-1])
        if os.environ.get("SPECDEC_DEBUG") or not isinstance(error, Exception):
            raise
        sys.exit(_report(error))
    finally:
        if signal.SIGINT in _stopped_by and not _invoked:
            say_interrupted()
        # The command has ended. Python's and torch's own end takes a while: Ctrl-C would change nothing, and SIGTERM
        # ends it without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.exit(exit_code)


def is_spare() -> bool:
    """True if this process is any of torchrun's processes but the first. SpecDecError if they span several machines. An
    engine that is split starts its other ranks itself, and pins each to its device, so the other processes have nothing
    to do.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    num_processes, num_here = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if num_processes > num_here:
        raise SpecDecError(
            f"all ranks of an engine run on one machine, and torchrun's machines are {num_processes // num_here}",
            hint="use `torchrun --nnodes 1`; `specdec batch --ray` answers on many machines",
        )
    if num_processes > 1 and os.environ.get("OMP_NUM_THREADS") == "1":
        del os.environ["OMP_NUM_THREADS"]  # torchrun's, for processes that all compute
    return os.environ["RANK"] != "0"


def _open_closed_streams() -> None:
    """Replace streams closed by the shell (`>&-`) by the null device, or the next file would get their number."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def _replace_what_cannot_be_written() -> None:
    r"""Write `?` for a character that the encoding of standard output lacks: `日` where a locale has ISO-8859-1.
    Characters of tables get another replacement: `#` for a bar, `-` for a dash. Python would raise, after the work is
    done. Standard error shows such a character as `\u65e5` already.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error("specdec", _in_plain_letters)
        sys.stdout.reconfigure(errors="specdec")


_PLAIN = str.maketrans(dict(zip("–—−÷×’“”…µ█·→", '---/x\'"".u#.>', strict=True)) | dict.fromkeys("▏▎▍▌▋▊▉", ""))


def _in_plain_letters(error: UnicodeError) -> tuple[str, int]:
    """ASCII letters for the characters that an encoding lacks, and the position behind these characters, as
    `codecs.register_error` asks.
    """
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end].translate(_PLAIN)
    return "".join(letter if letter.isascii() else "?" for letter in lacking), error.end


def _have_waiting_threads_sleep() -> None:
    """Set the variable that GNU's OpenMP reads when torch is loaded, so that waiting threads sleep. Threads that wait
    busily keep cores from the threads that compute: beside a busy process a build took three times as long. The threads
    of an engine's steps are our own, and are not affected.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "0"


def _keep_out_of_the_common_directory() -> None:
    """Tell torch to use a directory of ours for its compiler. By default it makes a directory of a known name in the
    common temporary directory as soon as it is imported. If ours cannot be made, the code that needs it reports why.
    """
    with suppress(SpecDecError):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(temporary_dir() / "inductor"))


def _report(error: Exception) -> int:
    """Print the error; returns the exit code. An error that is no fault of the user's is raised again. If memory ran
    out, the message says so, whatever exception that led to.
    """
    match error:
        case _ if is_out_of_memory(error):
            return _report(out_of_memory(error).with_traceback(None))
        case SpecDecError():
            _fail(told_origin(message_of(error)), hint_of(error))
            return 2 if isinstance(error, UsageError) else 1
        case typer.TyperException():
            _fail(*usage_message(error))
            return 2
        case OSError():
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            hint = "free space, or write to another disk" if is_full else "check the path and its permissions"
            problem = error.strerror or str(error)
            named = None if is_full and error.filename2 else error.filename  # of a copy the original is not full
            fail(f"{problem}: {named}" if named else problem, hint)
            return 1
        case _:
            raise error


def _fail(message: str, hint: str | None) -> None:
    """Say an error by the flags' names as they were typed."""
    fail(as_typed(message), None if hint is None else as_typed(hint))


_show_foreign_warning = warnings.showwarning


def _show_warning(message: Warning | str, category: type[Warning], *others: Any, **named: Any) -> None:
    """Show a warning of specdec's in one line, and a warning of a library as Python shows it."""
    if issubclass(category, SpecDecWarning):
        warn(str(message))
    else:
        _show_foreign_warning(message, category, *others, **named)


_stopped_by: list[int] = []
_invoked: list[str] = []
"""Names of the commands that have begun: each of these says itself that it was interrupted."""


def _stop(signal_number: int, frame: FrameType | None) -> None:
    """Leave through the blocks that clean up."""
    _stopped_by.append(signal_number)
    if signal_number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + signal_number)


restore()
