"""`specdec build`: a checkpoint becomes an engine bundle."""

import time
from pathlib import Path

from rich.table import Table

from commands.inputs.paths import check_readable
from commands.options.build import DEFAULT_MAX_INPUT_LEN, BuildOptions
from commands.options.expand import expand_groups
from commands.output import Output, check_new_directory, megabytes
from commands.tables.precision import described, described_quality
from runtime.checkpoint_dir import check_self_draft, open_checkpoint
from runtime.config import EngineConfig, LogitsCheck, SelfDraft, as_json
from runtime.files import check_output_directory, check_output_is_not_input, directory_bytes


@expand_groups
def build(options: BuildOptions, output: Output) -> None:
    """Build a compiled engine from a checkpoint, and check its logits against transformers before writing it.

    Drafts need `--speculative-decoding-mode draft_tokens_external`, `--max-draft-len` and
    `--use-paged-context-fmha enable`, as in TensorRT-LLM.
    """
    options.check()
    check_output_directory(options.output_dir, replace=options.force)
    check_new_directory(options.output_dir)
    checkpoint = open_checkpoint(options.checkpoint_dir)
    check_self_draft(checkpoint, options.copy)
    if options.quality_text is not None:
        check_readable([options.quality_text])
    check_output_is_not_input(options.output_dir, options.checkpoint_dir)

    from commands.documents.build import BuildDocument
    from runtime.compiler.build import Effort, build_engine, default_max_seq_len
    from runtime.compiler.choosing import compiler_for
    from runtime.compiler.quality import measure_quality, quality_text, record_quality
    from runtime.engine import resolve_device

    checkpoint_dir, output_dir = options.checkpoint_dir, options.output_dir
    text = quality_text(checkpoint, options.quality_text)
    target = resolve_device(options.device, 0)
    max_seq_len = default_max_seq_len(checkpoint_dir) if options.max_seq_len is None else options.max_seq_len
    settings = options.config(max_seq_len, compiler_for(target, options.compiler))
    if options.max_input_len is None and settings.max_input_len < DEFAULT_MAX_INPUT_LEN:
        output.warning(
            f"`--max-input-len` is {settings.max_input_len}, because a request has room for {max_seq_len} tokens"
        )
    start, phase_times = time.perf_counter(), _PhaseTimes()
    with output.phases() as show:

        def phase(name: str) -> None:
            phase_times.begin(name)
            show(name)

        effort = Effort(num_workers=options.workers)
        config = build_engine(
            checkpoint_dir, output_dir, settings, target, replace=options.force, phase=phase, effort=effort
        )
        if text is not None:
            phase("comparing with the unrounded model")
            config = record_quality(output_dir, config, measure_quality(checkpoint_dir, *text))
    phase_times.end()
    elapsed, size = time.perf_counter() - start, directory_bytes(output_dir)
    if config.compiler_note:
        output.warning(f"built with `--compiler torch-compile`: the model {config.compiler_note}")
    output.result(_summary(config, output_dir, size, elapsed, phase_times.seconds))
    document = BuildDocument(
        engine_dir=str(output_dir),
        engine=config,
        size_bytes=size,
        build_time_s=elapsed,
        phase_times_s=phase_times.seconds,
    )
    output.document(document.as_json())


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


def _kv_cache(config: EngineConfig) -> str:
    from runtime.kv_cache import bytes_per_block, kv_dtype

    shape, block_size = config.step_shape, config.build_config.tokens_per_block
    num_bytes = bytes_per_block(config.layers, block_size, kv_dtype(config.dtype, shape.kv_cache)) // block_size
    return f"blocks of {block_size} tokens, {shape.kv_cache or config.dtype}, {num_bytes:,} bytes a token"


def _summary(config: EngineConfig, output_dir: Path, size: int, elapsed: float, phases: dict[str, float]) -> Table:
    build, check = config.build_config, config.logits_check
    table = Table(title=f"Engine {output_dir}", title_justify="left", show_header=False)
    table.add_row("model", f"{config.pretrained_config['model_type']}, {config.dtype}, {len(config.layers)} layers")
    if config.quantization is not None:
        table.add_row("weights", described(config.quantization))
    if config.quality is not None:
        table.add_row("rounding", described_quality(as_json(config.quality)))
    table.add_row(
        "runs on", f"{config.environment.device} ({config.environment.capability}), torch {config.environment.torch}"
    )
    if config.mapping.tp_size > 1:
        table.add_row("split", f"over {config.mapping.tp_size} devices")
    table.add_row("compiler", build.compiler)
    table.add_row(
        "limits",
        f"batch {build.max_batch_size}, input {build.max_input_len}, input + output {build.max_request_len} tokens",
    )
    table.add_row("drafts", f"up to {build.max_draft_len} tokens" if build.max_draft_len else "none")
    if build.self_draft is not None:
        table.add_row("copy that drafts", _described_copy(build.self_draft))
    table.add_row("K/V cache", _kv_cache(config))
    table.add_row("logits check", _described_check(check))
    table.add_row("size", megabytes(size))
    table.add_row("time", f"{elapsed:.1f} s (" + ", ".join(f"{name} {s:.1f} s" for name, s in phases.items()) + ")")
    return table


def _described_check(check: LogitsCheck) -> str:
    said = f"{check.relative_difference:.1e} from transformers' eager attention, relative (allowed {check.tolerance:g})"
    for bits, ours, theirs in (
        ("float32", check.from_float32, check.transformers_from_float32),
        ("float64", check.from_float64, check.transformers_from_float64),
    ):
        if ours is not None and theirs is not None:
            said += f"; {ours:.1e} from {bits}, transformers' {theirs:.1e}"
    return said


def _described_copy(self_draft: SelfDraft) -> str:
    size = self_draft.group_size
    return f"linear weights in {self_draft.qformat}, {'by output' if size is None else f'in groups of {size}'}"
