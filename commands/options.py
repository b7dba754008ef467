"""What commands share on the command line: annotated options, configuration strings, flags without effect."""

import ast
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from runtime.errors import UsageError

INPUT, OUTPUT, SPECULATION = "Input", "Output", "Speculation"
KV_CACHE, RUNTIME = "KV cache", "Runtime"

EngineDir = Annotated[Path, typer.Option(help="Engine directory made by `build`.", rich_help_panel=INPUT)]
TokenizerDir = Annotated[
    Path | None,
    typer.Option(help="Tokenizer to use instead of the engine's own.", rich_help_panel=INPUT, show_default="engine's"),
]
NgramConfig = Annotated[
    str | None,
    typer.Option(
        metavar="[INT,INT,[INT]]",
        help="Draft by n-gram lookup: [max_draft_len, max_matching_ngram_size, device_list], such as [10,2,[0]].",
        rich_help_panel=SPECULATION,
        show_default="no drafter",
    ),
]
DraftTargetModelConfig = Annotated[
    str | None,
    typer.Option(help="Draft-Target-Model speculation; not in this version.", hidden=True, rich_help_panel=SPECULATION),
]
DraftEngineDir = Annotated[Path | None, typer.Option(hidden=True, rich_help_panel=SPECULATION)]
BlockReuse = Annotated[
    bool,
    typer.Option(help="Find K/V computed before. Orchestrator mode needs it.", rich_help_panel=KV_CACHE),
]
FreeGpuMemoryFraction = Annotated[
    float,
    typer.Option(help="Share of free GPU memory for the K/V cache.", min=0.0, max=1.0, rich_help_panel=KV_CACHE),
]
MaxTokensInCache = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Size of the K/V cache in tokens.",
        rich_help_panel=KV_CACHE,
        show_default="CPU: max_batch_size x max_seq_len",
    ),
]
EndId = Annotated[
    int | None,
    typer.Option(min=0, help="Token id that ends an output.", rich_help_panel=RUNTIME, show_default="the model's own"),
]
StopWords = Annotated[
    list[str] | None,
    typer.Option(help="Text that ends an output; repeatable.", rich_help_panel=RUNTIME, show_default="none"),
]
NumBeams = Annotated[int, typer.Option(hidden=True)]
UsePySession = Annotated[bool, typer.Option("--use-py-session", hidden=True)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.", rich_help_panel=OUTPUT)]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print the result only.", rich_help_panel=OUTPUT)]
Force = Annotated[
    bool, typer.Option("--force", help="Replace the output directory if specdec wrote it.", rich_help_panel=OUTPUT)
]

# TensorRT-LLM's name -> ours, after underscores have become hyphens.
_ALIASES = {
    "test-trt-llm": "test-engine",
    "prompt-lookup-config": "ngram-config",
    "tensorrt-llm-rouge1-threshold": "rouge1-threshold",
    "spec-decode-nextn": "spec-decode-max-draft-len",
}

# Flags of TensorRT-LLM's commands that mean nothing here, and whether a value follows.
_WITHOUT_EFFECT = {
    "gemm-plugin": True,
    "gpt-attention-plugin": True,
    "nccl-plugin": True,
    "context-fmha": True,
    "remove-input-padding": True,
    "kv-cache-type": True,
    "reduce-fusion": True,
    "multiple-profiles": True,
    "max-num-tokens": True,
    "opt-num-tokens": True,
    "profiling-verbosity": True,
    "workers": True,
    "load-model-on-cpu": False,
    "log-level": True,
    "cuda-graph-mode": False,
    "multi-block-mode": True,
    "enable-context-fmha-fp32-acc": False,
    "data-type": True,
    "hf-data-type": True,
    "hf-device-map-auto": False,
    "use-gpu-direct-storage": False,
    "fail-fast-on-attention-window-too-large": False,
}


def normalize_name(name: str) -> str:
    """One spelling for every option: hyphens, and our name where TensorRT-LLM has another."""
    name = name.replace("_", "-")
    return _ALIASES.get(name, name)


def split_flags_without_effect(arguments: list[str], options_with_value: frozenset[str]) -> tuple[list[str], list[str]]:
    """The arguments that mean something, and the names of the flags that do not.

    A value is taken along: `--gemm_plugin=float16` and `--gemm_plugin float16` both disappear. Nothing after `--` is
    touched, and neither is the value of one of `options_with_value` (normalized names): a prompt may be `--workers`.
    """
    kept: list[str] = []
    dropped: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            return [*kept, argument, *rest], dropped
        flag, equals, _ = argument.partition("=")
        name = normalize_name(flag.removeprefix("--"))
        if not flag.startswith("--") or name not in _WITHOUT_EFFECT:
            kept.append(argument)
            if flag.startswith("--") and name in options_with_value and not equals:
                kept.extend(islice(rest, 1))
            continue
        dropped.append(flag)
        if _WITHOUT_EFFECT[name] and not equals:
            next(rest, None)
    return kept, dropped


_EXAMPLE = "[10,2,[0]]"
_FIRST_DEVICE = "[0] is the first device"


@dataclass(frozen=True)
class NgramSettings:
    """`--ngram-config`, parsed."""

    max_draft_len: int
    max_matching_ngram_size: int
    device_id: int


def parse_ngram_config(text: str) -> NgramSettings:
    """Parse `[max_draft_len, max_matching_ngram_size, device_list]`; UsageError says which part is wrong."""
    flag = "--ngram-config"
    values = _parse_list(flag, text, 3, "[max_draft_len, max_matching_ngram_size, device_list], such as [10,2,[0]]")
    return NgramSettings(
        max_draft_len=_positive(flag, "max_draft_len", values[0]),
        max_matching_ngram_size=_positive(flag, "max_matching_ngram_size", values[1]),
        device_id=_single_device(flag, values[2]),
    )


def _parse_list(flag: str, text: str, length: int, form: str) -> list[Any]:
    try:
        values = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise UsageError(f"`{flag}` is not a list: {text}", hint=f"its form is {form}") from None
    if not isinstance(values, list | tuple) or len(values) != length:
        raise UsageError(f"`{flag}` does not have {length} entries: {text}", hint=f"its form is {form}")
    return list(values)


def _positive(flag: str, name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(
            f"{name} in `{flag}` must be a whole number of at least 1: {value!r}", hint=f"`{_EXAMPLE}` is an example"
        )
    return value


def _single_device(flag: str, value: Any) -> int:
    if not isinstance(value, list | tuple) or not value:
        raise UsageError(f"device_list in `{flag}` must name a device: {value!r}", hint=_FIRST_DEVICE)
    if not all(isinstance(device, int) and not isinstance(device, bool) and device >= 0 for device in value):
        raise UsageError(f"device_list in `{flag}` must hold device numbers: {value!r}", hint=_FIRST_DEVICE)
    if len(value) > 1:
        raise UsageError(
            f"device_list in `{flag}` names more than one device, and engines have one rank: {value!r}",
            hint=_FIRST_DEVICE,
        )
    return int(value[0])


def parse_drafter(
    ngram_config: str | None, draft_target_model_config: str | None, draft_engine_dir: Path | None
) -> NgramSettings | None:
    """The drafter the flags ask for, None for none; UsageError for two of them, or one that there is not yet."""
    if ngram_config is not None and draft_target_model_config is not None:
        raise UsageError(
            "`--ngram-config` and `--draft-target-model-config` cannot be given together", hint="choose one drafter"
        )
    for flag, value in (
        ("--draft-target-model-config", draft_target_model_config),
        ("--draft-engine-dir", draft_engine_dir),
    ):
        if value is not None:
            raise UsageError(
                f"Draft-Target-Model speculation is not in this version: {flag} {value}",
                hint="`--ngram-config [10,2,[0]]` speculates without a draft model",
            )
    return parse_ngram_config(ngram_config) if ngram_config is not None else None


def check_orchestrator_flags(*, block_reuse: bool, num_beams: int, py_session: bool) -> None:
    """UsageError for what orchestrator mode cannot do, whatever the files hold."""
    if not block_reuse:
        raise UsageError(
            "orchestrator mode needs block reuse: `--no-kv-cache-enable-block-reuse`", hint="leave the flag out"
        )
    if num_beams != 1:
        raise UsageError(f"beam search is not supported: `--num-beams {num_beams}`", hint="leave the flag out")
    if py_session:
        raise UsageError("there is no Python session to choose: `--use-py-session`", hint="leave the flag out")
