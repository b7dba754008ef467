"""Output of `convert` and `build`: their JSON documents, a table of the engine, and how weights are quantized."""

from pathlib import Path

from pydantic import Field
from rich.table import Table

from commands.output.documents.records import Record, absent
from commands.output.output import megabytes
from runtime.checkpoint.config import (
    CheckpointConfig,
    EngineConfig,
    InEightBits,
    LogitsCheck,
    Measure,
    Quality,
    Quantization,
    SelfDraft,
    Size,
)


class BuildDocument(Record):
    """Document of `specdec build --json`."""

    engine_dir: str
    engine: EngineConfig
    size_bytes: Size = Field(description="of all files")
    build_time_s: Measure
    phase_times_s: dict[str, Measure] = Field(description="seconds of each phase, in order")
    in_eight_bits: InEightBits | None = absent("activations of 8 bits, with --compare-activations")


class ConvertDocument(Record):
    """Document of `specdec convert --json`."""

    checkpoint_dir: str
    model_dir: str = Field(description="as given")
    checkpoint: CheckpointConfig
    size_bytes: Size = Field(description="of all files")
    convert_time_s: Measure


def described(found: Quantization) -> str:
    """Such as `W4A16 weights in groups of 64, activations int8`, or `weights of 4 bits in groups of 32 from GGUF,
    activations int8`.
    """
    pieces = []
    if found.weights is not None:
        zeros = ", with zero points" if found.has_zero_point else ""
        groups = "" if found.group_size is None else f" in groups of {found.group_size}"
        source = "" if found.source == "rounded" else f" from {found.source}"
        pieces.append(f"{found.weights}{groups}{zeros}{source}, activations {found.activations}")
    if found.kv_cache_quant_algo is not None:
        pieces.append(f"{found.kv_cache_quant_algo} K/V")
    return " and ".join(pieces)


def described_quality(quality: Quality) -> str:
    return (
        f"KL divergence {quality.mean_kl:.2g} from {quality.unrounded} unquantized, the same most probable token "
        f"at {quality.top1_agreement:.2%} of {quality.num_tokens:,} tokens of {quality.text}"
    )


def described_checkpoint(config: CheckpointConfig) -> str:
    found, tp_size = config.quantization, config.mapping.tp_size
    kind = config.dtype if found is None else f"{config.dtype} with {described(found)}"
    return kind if tp_size == 1 else f"{kind}, split over {tp_size} devices"


def _kv_cache(config: EngineConfig) -> str:
    from runtime.core.kv_cache import bytes_per_block, kv_dtype

    if not config.layers:
        return "none: no layer has keys and values"
    shape, block_size = config.step_shape, config.build_config.tokens_per_block
    num_bytes = bytes_per_block(config.layers, block_size, kv_dtype(config.dtype, shape.kv_cache)) // block_size
    return f"blocks of {block_size} tokens, {shape.kv_cache or config.dtype}, {num_bytes:,} bytes a token"


def _states(config: EngineConfig) -> str:
    import torch

    from runtime.core.states import bytes_per_slot

    dtype = getattr(torch, config.dtype)
    num_bytes = bytes_per_slot(config.states, config.build_config.max_draft_len, dtype)
    return f"{len(config.states)} layers, {num_bytes / 1e3:,.1f} KB a sequence"


def built_table(config: EngineConfig, output_dir: Path, size: int, elapsed: float, phases: dict[str, float]) -> Table:
    build, check = config.build_config, config.logits_check
    table = Table(title=f"Engine {output_dir}", title_justify="left", show_header=False)
    num_layers = len(config.layers) + len(config.states)
    table.add_row("model", f"{config.pretrained_config['model_type']}, {config.dtype}, {num_layers} layers")
    if config.quantization is not None:
        table.add_row("weights", described(config.quantization))
    if config.quality is not None:
        table.add_row("quantization", described_quality(config.quality))
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
    if build.hidden_states:
        table.add_row("hidden states", f"{', '.join(map(str, build.hidden_states))}, for a trained head")
    if (build.draft_output.qformat or build.draft_output.vocab_size) is not None:
        table.add_row("output layer of drafts", _described_output(config))
    if build.draft_output.layers is not None:
        table.add_row("layers of the head", f"in {build.draft_output.layers}, but the output layer")
    table.add_row("K/V cache", _kv_cache(config))
    if config.states:
        table.add_row("states", _states(config))
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


def _described_output(config: EngineConfig) -> str:
    """Description of the output layer that drafts, such as `32,768 of 151,936 ids in int4, 18.9 MB`. A head's own
    vocabulary may differ from the model's.
    """
    output, own = config.build_config.draft_output, config.vocab_size
    size = output.vocab_size or own
    inner = config.pretrained_config.get("text_config", config.pretrained_config)
    bits = {"int4": 4.25, "int8": 8.25, None: 32 if config.dtype == "float32" else 16}[output.qformat]
    num_bytes = size * int(inner.get("hidden_size", 0)) * bits / 8
    return f"{size:,} of {own:,} ids in {output.qformat or config.dtype}, {num_bytes / 1e6:,.1f} MB"


def _described_copy(self_draft: SelfDraft) -> str:
    size = self_draft.group_size
    return f"linear weights in {self_draft.qformat}, {'by output' if size is None else f'in groups of {size}'}"
