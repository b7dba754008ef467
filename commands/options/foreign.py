"""Flags and commands of other programs: vLLM, llama.cpp, Ollama, SGLang and TensorRT-LLM.

A flag that means the same is taken under its own name (`commands.options.spellings`), or here if it is a short flag
such as `-m`. A flag that means nothing here is dropped, and a warning gives the reason. A flag that means something
else is an error, whose hint is the command that does the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from commands.options.spellings import normalize_name, read_arguments
from commands.output.output import warn
from runtime.util.errors import UsageError

_SHORT = {
    "-m": "--model-dir",
    "-hf": "--model-dir",
    "-hfr": "--model-dir",
    "-p": "--input-text",
    "-sys": "--system",
    "-n": "--max-output-len",
    "-c": "--max-seq-len",
    "-s": "--random-seed",
    "-np": "--max-batch-size",
    "-md": "--draft-model-dir",
    "-a": "--served-model-name",
    "-j": "--json-schema",
    "-r": "--stop-words",
    "-tp": "--tensor-parallel-size",
    "-ngl": "--n-gpu-layers",
    "-t": "--threads",
    "-tb": "--threads-batch",
    "-ctk": "--cache-type-k",
    "-ctv": "--cache-type-v",
    "-cnv": "--conversation",
}
"""Short flags such as `-m`; each is taken by the commands that have the long flag."""

_OF_TENSORRT_LLM = (
    "gemm-plugin", "gpt-attention-plugin", "nccl-plugin", "context-fmha", "remove-input-padding", "kv-cache-type",
    "reduce-fusion", "multiple-profiles", "max-num-tokens", "opt-num-tokens", "profiling-verbosity", "workers",
    "log-level", "multi-block-mode", "data-type", "hf-data-type",
)  # fmt: skip
_SWITCHES_OF_TENSORRT_LLM = (
    "load-model-on-cpu", "cuda-graph-mode", "enable-context-fmha-fp32-acc", "hf-device-map-auto",
    "use-gpu-direct-storage", "fail-fast-on-attention-window-too-large",
)  # fmt: skip
WITHOUT_EFFECT: dict[str, tuple[bool, str]] = {
    **dict.fromkeys(_OF_TENSORRT_LLM, (True, "")),
    **dict.fromkeys(_SWITCHES_OF_TENSORRT_LLM, (False, "")),
    "backend": (True, "there is one"),
    "trust-remote-code": (False, "code that comes with a model is never run"),
    "enable-chunked-prefill": (False, "prompts are always computed in chunks, of `--max-num-tokens`"),
    "enable-auto-tool-choice": (False, "tools are called wherever a request has tools"),
    "n-gpu-layers": (True, "an engine is whole on one device"),
    "gpu-layers": (True, "an engine is whole on one device"),
    "threads": (True, "the variable OMP_NUM_THREADS says how many threads compute"),
    "threads-batch": (True, "the variable OMP_NUM_THREADS says how many threads compute"),
    "enforce-eager": (False, "`--compiler none` computes without a compiled step"),
    "jinja": (False, "chat templates are always Jinja's"),
    "mlock": (False, "weights stay in memory as the system has room"),
    "no-mmap": (False, "an engine's weights are always mapped"),
    "disable-log-requests": (False, "requests are logged with `--log-requests` alone"),
    "no-enable-log-requests": (False, "requests are logged with `--log-requests` alone"),
    "swap-space": (True, "sequences without room are computed again"),
    "cpu-offload-gb": (True, "an engine is whole on one device"),
    "load-format": (True, "the format is seen from the files"),
    "tokenizer-mode": (True, "the kind of a tokenizer is seen from its files"),
}
"""Flags that mean nothing here: whether a value follows, and the reason, unless the name alone explains it."""


@dataclass(frozen=True)
class _Answer:
    """Error for a flag that means something else here; `{flag}` and `{value}` stand for what was typed."""

    problem: str
    hint: str
    takes_value: bool = True
    harmless: tuple[str, ...] = ()
    """Values for which the flag is accepted: specdec does the same anyway."""


_SPLIT = _Answer(
    "an engine is split over devices when it is converted: {flag} {value}",
    "`specdec convert MODEL --tp-size {value}`, `specdec build`, then `specdec run engine_outputs`",
    harmless=("1",),
)
_KV = _Answer(
    "keys and values have one format here: {flag} {value}",
    "`--kv-cache-dtype int8` takes half the memory of bfloat16",
    harmless=("f16", "bf16", "auto"),
)
_CHAT = _Answer(
    "conversations have a command of their own: {flag}", "`specdec chat MODEL` talks in the terminal", takes_value=False
)
_SHARE = _Answer(
    "{flag} is a share of all memory, and here the K/V cache gets a share of the free memory: {value}",
    "`--kv-cache-free-gpu-memory-fraction {value}`, on a GPU; `--max-tokens-in-paged-kv-cache` anywhere",
)
_ADAPTER = _Answer(
    "adapters are not loaded: {flag}",
    "merge the adapter into its model (PEFT's `merge_and_unload`), and give that",
    takes_value=False,
)
_DATA = _Answer(
    "there are two flags for data: {flag} {value}",
    "`--traces FILE` has recorded answers, and `--input-file FILE` prompts, which the model answers first",
)
ANSWERS = {
    "tensor-parallel-size": _SPLIT,
    "pipeline-parallel-size": _Answer(
        "layers are not spread over devices one after another: {flag} {value}",
        "`specdec convert MODEL --tp-size {value}` splits each layer",
        harmless=("1",),
    ),
    "cache-type-k": _KV,
    "cache-type-v": _KV,
    "conversation": _CHAT,
    "interactive": _CHAT,
    "gpu-memory-utilization": _SHARE,
    "mem-fraction-static": _SHARE,
    "enable-lora": _ADAPTER,
    "lora": _ADAPTER,
    "block-size": _Answer(
        "the size of K/V blocks is set when an engine is built: {flag} {value}",
        "`specdec build --tokens-per-block {value}`; 32 is the default",
    ),
    "chat-template": _Answer(
        "a chat template is a tokenizer's: {flag} {value}",
        "`--tokenizer-dir` names a directory with the tokenizer and a chat_template.jinja",
    ),
    "load-in-8bit": _Answer(
        "weights are quantized by another flag: {flag}", "`--quantization int8`", takes_value=False
    ),
    "load-in-4bit": _Answer(
        "weights are quantized by another flag: {flag}", "`--quantization int4`", takes_value=False
    ),
    "prompt-cache": _Answer(
        "keys and values of all prompts are kept in one directory: {flag} {value}",
        "`--kv-cache-dir DIR`, with `--kv-cache-disk-size 20G`",
    ),
    **dict.fromkeys(("data", "data-path", "data-file", "train-data", "training-data", "train-file"), _DATA),
    "hf-file": _Answer("a file of a repository is named with it: {flag} {value}", "`specdec run OWNER/NAME:Q4_K_M`"),
}
"""Flags that mean something else here."""

COMMANDS = {
    "ps": "`specdec list` shows the models that have engines, and which are in use",
    "ls": "`specdec list` shows the models that have engines",
    "models": "`specdec list` shows the models that have engines",
    "show": "`specdec list` shows the models that have engines",
    "generate": '`specdec run MODEL "a prompt"`',
    "complete": '`specdec run MODEL "a prompt"`',
    "server": "`specdec serve MODEL`",
    "quantize": "`specdec run MODEL --quantization int4`, or `specdec convert MODEL --quantization int4`",
    "bench": "`guidellm run` measures a server (docs/bench.md), `specdec summarize MODEL` a model",
    "benchmark": "`guidellm run` measures a server (docs/bench.md), `specdec summarize MODEL` a model",
    "eval": "`specdec summarize MODEL`",
    "help": "`specdec --help`",
    "version": "`specdec --version`",
}
"""Commands of other programs, and our command that does the same."""


@dataclass(frozen=True)
class Flags:
    """A command's own flags: normalized names without hyphens in front, and short names."""

    command: str
    names: frozenset[str]
    with_value: frozenset[str]
    short: frozenset[str]


def without_foreign(arguments: list[str], flags: Flags) -> list[str]:
    """The arguments with other programs' flags translated into the command's own. UsageError for a flag that means
    something else here.

    A value goes with its flag: `--gemm_plugin=float16` and `--gemm_plugin float16` both disappear. Arguments after `--`
    stay as they are, and so do values of the command's own flags: a prompt may be `--workers`.
    """
    kept: list[str] = []
    dropped: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            kept += [argument, *rest]
            break
        flag, equals, value = _long(argument, flags).partition("=")
        name = normalize_name(flag.removeprefix("--"), flags.command)
        if not flag.startswith("--") or name in flags.names:
            kept.append(flag + equals + value)
            if flag.startswith("--") and name in flags.with_value and not equals:
                kept.extend(islice(rest, 1))
        elif name in ANSWERS and ANSWERS[name] is _CHAT and flags.command == "chat":
            continue  # so it is anyway
        elif name in ANSWERS:
            _answer(ANSWERS[name], flag, value, rest, has_value=bool(equals))
        elif name in WITHOUT_EFFECT:
            takes_value, reason = WITHOUT_EFFECT[name]
            dropped[argument.partition("=")[0]] = reason
            if takes_value and not equals:
                next(rest, None)
        else:
            kept.append(argument)
    _tell(dropped)
    return kept


def flag_name(argument: str, command: str) -> str:
    """Our name of a command's flag, without hyphens and value: `max-seq-len` for `-c` and for
    `--max_model_len=4096`.
    """
    flag = argument.partition("=")[0]
    return normalize_name(_SHORT.get(flag, flag).lstrip("-"), command)


def typed_spellings(arguments: list[str], flags: Flags) -> dict[str, str]:
    """Flags that are typed by another name: `{"max-seq-len": "--max-model-len"}`."""
    typed = (word for word, _, _ in read_arguments(arguments, flags.with_value, flags.command) if word.startswith("-"))
    named = {flag_name(word, flags.command): word.partition("=")[0] for word in typed}
    return {name: word for name, word in named.items() if name in flags.names and word.replace("_", "-") != f"--{name}"}


def _long(argument: str, flags: Flags) -> str:
    """The argument with our long flag in place of a short one that this command lacks: `--model-dir` for `-m`."""
    short, equals, value = argument.partition("=")
    long = _SHORT.get(short)
    if long is None or short in flags.short:
        return argument
    name = normalize_name(long.removeprefix("--"), flags.command)
    known = flags.names | WITHOUT_EFFECT.keys() | ANSWERS.keys()
    return f"--{name}{equals}{value}" if name in known else argument


def _answer(answer: _Answer, flag: str, value: str, rest: Iterator[str], *, has_value: bool) -> None:
    """UsageError, unless the value asks for what specdec does anyway."""
    if answer.takes_value and not has_value:
        value = next(rest, "")
    if value not in answer.harmless:
        raise UsageError(
            answer.problem.format(flag=f"`{flag}`" if not value else flag, value=value),
            hint=answer.hint.format(value=value),
        )


def _tell(dropped: dict[str, str]) -> None:
    if dropped:
        named = (f"{flag} ({reason})" if reason else flag for flag, reason in dropped.items())
        warn(f"no effect in specdec: {', '.join(named)}")
