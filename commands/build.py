"""`specdec build`: a checkpoint becomes an engine bundle."""

import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from commands.options.shared import INPUT, KV_CACHE, OUTPUT, RUNTIME, SPECULATION, Force, Json, Quiet
from commands.output import Output, megabytes
from runtime.config import BuildConfig, Compiler, EngineConfig, SpeculativeDecodingMode, as_json
from runtime.errors import UsageError


def build(
    checkpoint_dir: Annotated[Path, typer.Option(help="Checkpoint made by `convert`.", rich_help_panel=INPUT)],
    output_dir: Annotated[Path, typer.Option(help="Engine directory to write.", rich_help_panel=OUTPUT)],
    max_batch_size: Annotated[int, typer.Option(min=1, help="Sequences per step.", rich_help_panel=RUNTIME)] = 4,
    max_input_len: Annotated[int, typer.Option(min=1, help="Tokens in a prompt.", rich_help_panel=RUNTIME)] = 1024,
    max_seq_len: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens in prompt and output together; max_draft_len is added to it.",
            rich_help_panel=RUNTIME,
            show_default="the model's positions",
        ),
    ] = None,
    max_draft_len: Annotated[
        int, typer.Option(min=0, help="Tokens in a draft; 0 for none.", rich_help_panel=SPECULATION)
    ] = 0,
    speculative_decoding_mode: Annotated[
        SpeculativeDecodingMode,
        typer.Option(
            help="How drafts reach the engine: none or draft_tokens_external.",
            rich_help_panel=SPECULATION,
            metavar="NAME",
        ),
    ] = "none",
    use_paged_context_fmha: Annotated[
        Literal["enable", "disable"],
        typer.Option(help="Attention over the paged K/V cache; drafts need it.", rich_help_panel=KV_CACHE),
    ] = "enable",
    tokens_per_block: Annotated[
        int, typer.Option(min=1, help="Tokens in a K/V block; a power of two.", rich_help_panel=KV_CACHE)
    ] = 32,
    compiler: Annotated[
        Compiler,
        typer.Option(
            help="`aot` compiles ahead of time; `torch-compile` serves models that cannot be exported; "
            "`none` is for debugging.",
            rich_help_panel=RUNTIME,
        ),
    ] = "aot",
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option(help="What the engine runs on; `auto` is a GPU where there is one.", rich_help_panel=RUNTIME),
    ] = "auto",
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Build a compiled engine from a checkpoint, and check its logits against transformers before writing it.

    Drafts need `--speculative-decoding-mode draft_tokens_external`, `--max-draft-len` and
    `--use-paged-context-fmha enable`, as in TensorRT-LLM.
    """
    _check(max_draft_len, speculative_decoding_mode, use_paged_context_fmha, tokens_per_block)
    from runtime.compiler.build import build_engine, default_max_seq_len
    from runtime.engine import resolve_device
    from runtime.files import directory_bytes

    output = Output(json, quiet)
    target = resolve_device(device, 0)
    if max_seq_len is None:
        max_seq_len = default_max_seq_len(checkpoint_dir)
    settings = BuildConfig(
        compiler=compiler,
        max_batch_size=max_batch_size,
        max_input_len=max_input_len,
        max_seq_len=max_seq_len + max_draft_len,
        max_draft_len=max_draft_len,
        tokens_per_block=tokens_per_block,
        speculative_decoding_mode=speculative_decoding_mode,
    )
    start, phase_times = time.perf_counter(), _PhaseTimes()
    with output.phases() as show:

        def phase(name: str) -> None:
            phase_times.begin(name)
            show(name)

        config = build_engine(checkpoint_dir, output_dir, settings, target, replace=force, phase=phase)
    phase_times.end()
    elapsed, size = time.perf_counter() - start, directory_bytes(output_dir)
    if config.compiler_note:
        output.warning(f"built with `--compiler torch-compile`: the model {config.compiler_note}")
    output.result(_summary(config, output_dir, size, elapsed, phase_times.seconds))
    output.document(
        {
            "engine_dir": str(output_dir),
            "engine": as_json(config),
            "size_bytes": size,
            "build_time_s": elapsed,
            "phase_times_s": phase_times.seconds,
        }
    )


def _check(max_draft_len: int, mode: SpeculativeDecodingMode, paged_fmha: str, tokens_per_block: int) -> None:
    if mode == "draft_tokens_external" and max_draft_len == 0:
        raise UsageError(
            "`--speculative-decoding-mode draft_tokens_external` needs a draft length: --max-draft-len 0",
            hint="`--max-draft-len 10` allows drafts of up to 10 tokens",
        )
    if max_draft_len > 0 and mode == "none":
        raise UsageError(
            f"`--max-draft-len {max_draft_len}` needs a mode",
            hint="`--speculative-decoding-mode draft_tokens_external`",
        )
    if max_draft_len > 0 and paged_fmha == "disable":
        raise UsageError(
            "drafts need attention over the paged K/V cache: --use-paged-context-fmha disable",
            hint="`--use-paged-context-fmha enable`",
        )
    if tokens_per_block & (tokens_per_block - 1):
        raise UsageError(
            f"`--tokens-per-block` must be a power of two: {tokens_per_block}",
            hint="`--tokens-per-block 32` is the default",
        )


class _PhaseTimes:
    """Seconds per phase, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._name, self._start = "", 0.0

    def begin(self, name: str) -> None:
        self.end()
        self._name, self._start = name, time.perf_counter()

    def end(self) -> None:
        if self._name:
            self.seconds[self._name] = time.perf_counter() - self._start


def _summary(config: EngineConfig, output_dir: Path, size: int, elapsed: float, phases: dict[str, float]) -> Table:
    build, check = config.build_config, config.logits_check
    table = Table(title=f"Engine {output_dir}", title_justify="left", show_header=False)
    table.add_row("model", f"{config.pretrained_config['model_type']}, {config.dtype}, {len(config.layers)} layers")
    table.add_row(
        "runs on", f"{config.environment.device} ({config.environment.capability}), torch {config.environment.torch}"
    )
    table.add_row("compiler", build.compiler)
    table.add_row(
        "limits",
        f"batch {build.max_batch_size}, input {build.max_input_len}, input + output {build.max_request_len} tokens",
    )
    table.add_row("drafts", f"up to {build.max_draft_len} tokens" if build.max_draft_len else "none")
    table.add_row("K/V cache", f"blocks of {build.tokens_per_block} tokens")
    table.add_row(
        "logits check",
        f"{check.relative_difference:.1e} from transformers' eager attention, relative (allowed {check.tolerance:g})",
    )
    table.add_row("size", megabytes(size))
    table.add_row("time", f"{elapsed:.1f} s (" + ", ".join(f"{name} {s:.1f} s" for name, s in phases.items()) + ")")
    return table
