"""Make an engine directory from a checkpoint: load, compile, compare with transformers, write.

The compiled step is opened again and compared before the engine's directory appears. So an engine that exists gave the
logits of transformers' own eager attention, within a tolerance, on the machine that built it.
"""

import dataclasses
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from runtime.builder.choosing import compiler_for, lacks_operations
from runtime.builder.compare_logits import (
    TOLERANCE_OF_8_BITS,
    Computed,
    check_logits,
    compute,
    is_batch_invariant,
    sample_for,
)
from runtime.builder.convert import check_side_files, copy_side_files
from runtime.builder.identity import BitSums
from runtime.checkpoint.bundle import COMPILER_CACHE, COPY_DIR, DRAFT_VOCAB, LIBRARY, uses_kernels, weights_files
from runtime.checkpoint.checkpoint_dir import OpenedCheckpoint, check_hidden_states, check_self_draft, open_checkpoint
from runtime.checkpoint.checksums import record_files, write_config
from runtime.checkpoint.config import (
    Arithmetic,
    BuildConfig,
    CheckpointConfig,
    EngineConfig,
    LayersActivations,
    LogitsCheck,
    StepShape,
)
from runtime.compiler.capture import NoTokenProgram
from runtime.compiler.compilation import compile_aot
from runtime.compiler.package import PackagedStep, StepFunction
from runtime.compiler.quantized_copy import DRAFT_ACTIVATIONS, copy_of, output_weight, quantize_layers, write_layers
from runtime.compiler.torch_compile import CompiledStep
from runtime.compiler.torch_internals import check_torch
from runtime.core.kv_cache import bytes_per_block, kv_dtype
from runtime.drafters.heads.head_config import HeadConfig
from runtime.drafters.heads.head_model import Head, load_head
from runtime.drafters.heads.head_output import write_quantized, write_target_output
from runtime.engine.engine import Engine
from runtime.engine.load import current_environment, leave_step, open_copy
from runtime.engine.ranks import RankedModel, RankedStep, open_ranks
from runtime.kernels.library import are_kernels_compiled, no_compiler, says_no_compiler, write_kernels
from runtime.kernels.memory import keep_freed_memory, trim, what_is_there_stays
from runtime.kernels.ops import describe_kernels, fastest_arithmetic, flush_denormals, load_kernels
from runtime.loop.step_costs import cache_for_measuring, costs_at_build
from runtime.model.attention import KERNEL, PAGED
from runtime.model.model import ModelKind, Step, load_absent, load_whole_model, probe_config, split_config
from runtime.model.pretrained import num_positions, parse_pretrained_config, why_positions_end
from runtime.model.quantized import pack_layers
from runtime.model.tp_layers import Splitting
from runtime.model.weights import present, written_meanwhile
from runtime.text.text import cache_tokenizer
from runtime.util.errors import SpecDecError, SpecDecWarning
from runtime.util.files import check_output_directory, check_output_is_not_input, new_directory, write_file
from runtime.util.locks import MODEL_INIT_LOCK
from runtime.util.processes import do_at_once
from runtime.util.temporary import own_temporary_files

# Largest norm of the difference between two rows of logits, over the norm of the row.
_TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
# Where layers quantize their inputs to 8 bits, a difference in the last bit may round a number to the next integer, and
# so on in the layers behind: logits then differ by as much as quantization itself changes them. A step that is wired
# wrongly differs by the whole norm. Each quantized layer is also checked by itself, within `_TOLERANCE`. Inputs in 16
# bits change little, but more than other differences in float32. Quantized keys and values are compared as the engine
# has stored them. Other processes hold the keys and values of other ranks, so a split engine has the tolerance of 8
# bits.
_QUANTIZED_TOLERANCE = {"int8": TOLERANCE_OF_8_BITS, "int16": 5e-2, "mixed": TOLERANCE_OF_8_BITS}


@dataclass(frozen=True)
class _Compiled:
    """Result of compiling a step. `build` names the compiler that was used, and `arithmetic` the matmul kernel."""

    build: BuildConfig
    lacks: str | None = None
    """Operations of the model that token programs lack, if another compiler than the requested `aot` was used."""
    arithmetic: Arithmetic | None = None
    why_whole: str | None = None


Phase = Callable[[str], None]
"""Function that is called with the name of each phase when it begins."""


@dataclass(frozen=True)
class DraftSource:
    """The drafted ids and the head behind `BuildConfig.draft_output`, the output layer for drafts."""

    ids: tuple[int, ...] = ()
    """Ids that may be drafted; empty for all ids."""
    head: HeadConfig | None = None
    """Trained head whose layers are quantized."""

    @property
    def tensor(self) -> Tensor | None:
        """The ids as an int64 tensor [n]."""
        return torch.tensor(self.ids) if self.ids else None


@dataclass(frozen=True)
class BuildEffort:
    """Options of a build that do not change the step."""

    measure_costs: bool = True
    """False if step costs are not needed, or will be measured later."""
    num_workers: int = 1
    """Number of processes that make ranks' steps at once; each takes the memory of a rank's weights."""
    drafts: DraftSource = DraftSource()
    takes_torch_compile: bool = False
    """True if `torch-compile` may be taken where `aot` lacks an operation: nobody asked for `aot`."""
    leaves_step: bool = False
    """True if the next opening of the engine, in this process, gets the `aot` step that the build has opened."""


_USUAL = BuildEffort()


def build_engine(
    source: Path | OpenedCheckpoint,
    output_dir: Path,
    build: BuildConfig,
    device: torch.device,
    *,
    replace: bool,
    phase: Phase,
    effort: BuildEffort = _USUAL,
) -> EngineConfig:
    """Write the engine directory of a checkpoint, with its step costs.

    Raises SpecDecError if the settings do not fit the model, or if the compiled step's logits differ from
    transformers'; then nothing is written. `compiler_note` says why another compiler was used than `build` names.
    """
    compiler_for(device, build.compiler)
    opened = _opened(source, output_dir, replace=replace)
    pretrained = _parse_fitting(opened.config, opened.directory, build)
    _tell_slow_weights(opened.config, build, device)
    weights = _Weights(opened, pretrained, device, uses_kernels(build.compiler, device.type))
    phase("loading the checkpoint")
    model = weights.whole_model(build)
    ids = effort.drafts.tensor
    quantized = quantize_layers(model, pretrained, build, ids)
    Step(model).to(device)
    with (
        MODEL_INIT_LOCK,
        what_is_there_stays(),
        own_temporary_files(),
        new_directory(output_dir, replace=replace) as directory,
        written_meanwhile() if weights.splitting is None else nullcontext(lambda: None) as finish_writing,
        ExitStack() as stack,
    ):
        copy_side_files(opened.directory, directory)
        cache_tokenizer(directory, opened.config.pretrained_config, output_dir)
        phase(_compiling(build, device))
        check = weights.check(model, build)
        compiled = _compile_all(weights, model, check, directory, effort)
        if compiled.build.compiler != "aot":  # the step is the model
            stack.enter_context(present(model))
        phase("checking the logits")
        step = _built_step(weights, model, weights.shape(compiled.build), directory)
        if isinstance(step, RankedStep):
            stack.callback(step.close)
        config = _checked(step, check, weights.checkpoint, compiled)
        _write_draft_output(model, build, effort.drafts, directory, phase)
        copied = None
        if quantized:
            phase("compiling the copy that drafts")
            config, copied = _with_copy(config, copy_of(model, quantized, ids), step, directory, ids)
        if effort.measure_costs:
            trim(sum(path.stat().st_size for path in weights.paths))
            phase("measuring steps")
            config = _with_costs(config, step, copied, device, ids)
        phase("writing the engine")
        if isinstance(step, RankedStep) and isinstance(step.own, CompiledStep):
            shutil.copytree(step.own.cache_dir, directory / COMPILER_CACHE, dirs_exist_ok=True)
        finish_writing()
        config = write_config(directory, dataclasses.replace(config, files=record_files(directory)))
    if effort.leaves_step and isinstance(step, PackagedStep):
        leave_step(output_dir, step)
    return config


def _opened(source: Path | OpenedCheckpoint, output_dir: Path, *, replace: bool) -> OpenedCheckpoint:
    """The checkpoint, opened if a directory was given; the output directory is checked first."""
    checkpoint_dir = source.directory if isinstance(source, OpenedCheckpoint) else source
    check_output_is_not_input(output_dir, checkpoint_dir)
    check_output_directory(output_dir, replace=replace)
    return source if isinstance(source, OpenedCheckpoint) else OpenedCheckpoint(source, open_checkpoint(source))


@dataclass(frozen=True)
class _Weights:
    """A checkpoint's weights, and loading them into models."""

    opened: OpenedCheckpoint
    pretrained: PreTrainedConfig
    device: torch.device
    with_kernels: bool

    @property
    def checkpoint(self) -> CheckpointConfig:
        return self.opened.config

    @cached_property
    def splitting(self) -> Splitting | None:
        return split_config(self.pretrained, self.checkpoint.mapping.tp_size)

    def check(self, model: PreTrainedModel, build: BuildConfig) -> "_Check":
        """A check for a step of the model, which sums up the bits of the weights that it reads."""
        quantization = self.checkpoint.quantization
        activations = None if quantization is None else quantization.activations
        sums = BitSums(model, getattr(torch, self.checkpoint.dtype), self.opened.unread)
        return _Check(model, self.shape(build), activations, sums)

    @property
    def paths(self) -> list[Path]:
        return [self.opened.directory / name for name in weights_files(self.checkpoint.mapping)]

    def whole_model(self, build: BuildConfig) -> PreTrainedModel:
        """The model that the step is compared with. It has the weights of all ranks."""
        if self.splitting is None and build.compiler == "aot":
            return load_absent(self._kind, self.paths[0])
        return load_whole_model(self._kind, self.paths)

    def model_of(self, rank: int) -> PreTrainedModel:
        return load_absent(self._kind, self.paths[rank])

    def shape(self, build: BuildConfig) -> StepShape:
        """Shape of a rank's step."""
        quantization = self.checkpoint.quantization
        kv_cache = None if quantization is None else quantization.kv_cache_quant_algo
        shapes, vocab_size = probe_config(self.pretrained, self.splitting), self.pretrained.vocab_size
        return StepShape(self.checkpoint.dtype, vocab_size, shapes.layers, build, kv_cache, shapes.states)

    @property
    def _kind(self) -> ModelKind:
        dtype, attention = getattr(torch, self.checkpoint.dtype), KERNEL if self.with_kernels else PAGED
        return ModelKind(self.pretrained, dtype, attention, self.checkpoint.quantization, self.splitting)


def _parse_fitting(checkpoint: CheckpointConfig, checkpoint_dir: Path, build: BuildConfig) -> PreTrainedConfig:
    """The config of the checkpoint's model; SpecDecError if no engine with these settings can be built from it."""
    check_hidden_states(checkpoint, build.hidden_states)
    check_self_draft(checkpoint, build.self_draft)
    check_side_files(checkpoint_dir)
    pretrained = parse_pretrained_config(checkpoint.pretrained_config, str(checkpoint_dir / "config.json"))
    _check_settings(build, pretrained)
    return pretrained


def _write_draft_output(
    model: PreTrainedModel, build: BuildConfig, drafts: DraftSource, directory: Path, phase: Phase
) -> None:
    """Write the files that drafts need: the drafted ids, a head's quantized layers, and the model's output layer for a
    head without one. An output layer that is tied to the embeddings is in memory already.
    """
    if drafts.ids:
        write_file(directory / DRAFT_VOCAB, "".join(f"{i}\n" for i in drafts.ids).encode())
    if drafts.head is not None and build.draft_output.is_quantized:
        phase("quantizing the head")
        write_quantized(
            drafts.head, build.draft_output, drafts.tensor, partial(_head_of, drafts.head, model), directory
        )
    if drafts.head is not None and drafts.head.reads_target_output and not model.config.tie_word_embeddings:
        write_target_output(output_weight(model), directory)


def _head_of(config: HeadConfig, model: PreTrainedModel) -> Head:
    """The model's head, with its weights."""
    embeddings: Any = model.get_input_embeddings()
    with present(embeddings):
        weight = embeddings.weight.detach() if isinstance(embeddings, nn.Embedding) else None
        output = output_weight(model) if config.reads_target_output else None
        return load_head(config, weight, next(model.parameters()).dtype, output)


def _compiling(build: BuildConfig, device: torch.device) -> str:
    """Name of the compile phase, which says why it takes long the first time."""
    if uses_kernels(build.compiler, device.type) and not are_kernels_compiled():
        return "compiling the step (first the CPU kernels: 1 to 4 minutes, once)"
    return "compiling the step"


@contextmanager
def _machine_errors() -> Iterator[None]:
    """Raise errors that are not the model's fault as they were within the block: Ctrl-C, a full disk, no memory, or no
    C++ compiler. While torch traces or compiles, it turns Ctrl-C into another kind of error, and wraps others.
    """
    try:
        yield
    except Exception as error:
        if "KeyboardInterrupt" in str(error):
            raise KeyboardInterrupt from error
        cause = getattr(error, "inner_exception", error)  # of Inductor's wrapper
        if says_no_compiler(cause):
            raise no_compiler() from error
        if isinstance(cause, OSError | MemoryError):
            raise cause  # noqa: B904  (it keeps its own cause)
        raise


def _built_step(weights: _Weights, model: PreTrainedModel, shape: StepShape, directory: Path) -> StepFunction:
    """Open the compiled step as an engine does. With `torch-compile`, compiling happens when it is first called."""
    checkpoint, compiler = weights.checkpoint, shape.build_config.compiler
    if compiler == "torch-compile" and weights.splitting is not None:
        (directory / COMPILER_CACHE).mkdir()  # an engine's cache, which rank 0 copies and fills
    if compiler == "aot" or weights.splitting is not None:
        model_of_ranks = RankedModel.of(directory, checkpoint, shape)
        return open_ranks(model_of_ranks, weights.device, range(model_of_ranks.tp_size))
    step = Step(model, shape.build_config.hidden_states)
    return _compiled_step(step, directory / COMPILER_CACHE) if compiler == "torch-compile" else step


def _compiled_step(step: Step, cache_dir: Path) -> CompiledStep:
    pack_layers(step.model)
    torch.compiler.reset()  # otherwise code compiled for another engine would be missing in this engine's cache
    return CompiledStep(step, cache_dir)


class _Check:
    """Compares steps with transformers' computation of the same model; `sums` sums up the weights' bits meanwhile."""

    def __init__(
        self,
        model: PreTrainedModel,
        shape: StepShape,
        activations: LayersActivations | None,
        sums: BitSums | None = None,
    ) -> None:
        self._model, self.shape, self._activations, self.sums = model, shape, activations, sums
        self._have = present if sums is None else sums.present
        self._sample = sample_for(model, shape)
        self._product_tolerance = _TOLERANCE[shape.dtype]

    def of(self, step: StepFunction) -> tuple[LogitsCheck, Computed]:
        tolerance = max(self._product_tolerance, _QUANTIZED_TOLERANCE.get(self._activations or "float", 0))
        if self.shape.kv_cache is not None and isinstance(step, RankedStep):
            tolerance = _QUANTIZED_TOLERANCE["int8"]
        with _machine_errors():  # `torch-compile` compiles with the first step
            computed = compute(step, self._sample)
        check = check_logits(computed, self._model, tolerance, self._product_tolerance, self._have)
        return check, computed


def _checked(step: StepFunction, check: _Check, checkpoint: CheckpointConfig, compiled: _Compiled) -> EngineConfig:
    """The engine's config, after the step's logits and the weights' numbers have been checked."""
    logits_check, computed = check.of(step)
    assert check.sums is not None
    shape = computed.sample.shape
    return EngineConfig(
        pretrained_config=checkpoint.pretrained_config,
        dtype=checkpoint.dtype,
        build_config=compiled.build,
        layers=shape.layers,
        states=shape.states,
        vocab_size=shape.vocab_size,
        environment=current_environment(computed.sample.device),
        logits_check=logits_check,
        weights_digest=check.sums.digest(),
        quantization=checkpoint.quantization,
        compiler_note=compiled.lacks and f"has operations that `aot` lacks: {compiled.lacks}",
        why_whole=compiled.why_whole,
        arithmetic=compiled.arithmetic,
        batch_invariant=bool(compiled.arithmetic) and is_batch_invariant(computed),
        mapping=checkpoint.mapping,
    )


def _with_copy(
    config: EngineConfig, copied: PreTrainedModel, step: StepFunction, directory: Path, ids: Tensor | None
) -> tuple[EngineConfig, StepFunction]:
    """Compile the self-draft copy, write its files, and check its step. SpecDecError if `aot` lacks an operation."""
    compiler, own_dir = config.build_config.compiler, directory / COPY_DIR
    own_dir.mkdir()
    if isinstance(step, PackagedStep):
        assert config.arithmetic is not None
        with _machine_errors():
            written = compile_aot(Step(copied), config.step_shape, own_dir, config.arithmetic, step.weights)
        if isinstance(written, NoTokenProgram):
            raise SpecDecError(
                f"the copy that drafts has operations that `aot` lacks: {written.reason}",
                hint="build with torch-compile, or without the copy",
            )
    else:
        write_layers(copied, own_dir)
    if compiler == "torch-compile":
        copy_step: StepFunction = _compiled_step(Step(copied), own_dir / COMPILER_CACHE)
    else:
        copy_step = open_copy(step, directory, next(copied.parameters()).device, ids)
    check, _ = _Check(copied, config.step_shape, DRAFT_ACTIVATIONS).of(copy_step)
    return dataclasses.replace(config, self_draft_check=check), copy_step


def _with_costs(
    config: EngineConfig,
    step: StepFunction,
    copy_step: StepFunction | None,
    device: torch.device,
    ids: Tensor | None,
) -> EngineConfig:
    """The config with step costs. If the engine cannot be opened to measure them, such as for lack of memory, costs
    are left out: with a smaller cache it may still run.
    """
    shape, block_size = config.step_shape, config.build_config.tokens_per_block
    block_bytes = bytes_per_block(shape.layers, block_size, kv_dtype(shape.dtype, shape.kv_cache))
    cache = cache_for_measuring(config.build_config, block_bytes)
    try:
        with Engine(config, step, device, cache, copy_step=copy_step, draft_ids=ids) as engine:
            return costs_at_build(engine, has_copy=copy_step is not None)
    except SpecDecError:
        return config


def positions_of(checkpoint: OpenedCheckpoint) -> int | None:
    """Number of positions of the checkpoint's model; None if its config names no number, like Mamba's."""
    where = str(checkpoint.directory / "config.json")
    return num_positions(parse_pretrained_config(checkpoint.config.pretrained_config, where))


def _check_settings(build: BuildConfig, config: PreTrainedConfig) -> None:
    if build.compiler != "none":
        check_torch()
    if build.max_input_len >= build.max_request_len:
        raise SpecDecError(
            f"max_input_len leaves no room for output in max_seq_len {build.max_request_len}: {build.max_input_len}",
            hint="raise `max_seq_len`, or lower `max_input_len`",
            code="no_room_for_output",
        )
    positions = num_positions(config)
    if positions is not None and build.max_request_len > positions:
        raise SpecDecError(
            f"max_seq_len exceeds the {positions} positions {why_positions_end(config)}: {build.max_request_len}",
            hint=f"`max_seq_len={positions}` is the most",
            code="positions",
            field="max_seq_len",
            max_seq_len=positions,
        )


def _tell_slow_weights(checkpoint: CheckpointConfig, build: BuildConfig, device: torch.device) -> None:
    """Warn of a build without kernels whose weights, or whose drafts' weights, are quantized."""
    quantized = checkpoint.quantization is not None and checkpoint.quantization.quant_algo is not None
    drafts_quantized = build.self_draft is not None or build.draft_output.is_quantized
    if (quantized or drafts_quantized) and not uses_kernels(build.compiler, device.type):
        warnings.warn(
            "a model that is not compiled dequantizes its weights in each step, which may take tens of times as long",
            SpecDecWarning,
            stacklevel=3,
        )


def _compile(model: PreTrainedModel, shape: StepShape, directory: Path, rank: int = 0) -> _Compiled:
    """Compile a step by `aot`, if that is asked for, and write its programs into the directory. If the model has
    operations that token programs lack, the result names them, and its config has `torch-compile`.
    """
    build = shape.build_config
    if build.compiler != "aot":
        return _Compiled(build)
    arithmetic = fastest_arithmetic(next(model.parameters()).dtype, 1 + build.max_draft_len)
    with _machine_errors():
        written = compile_aot(Step(model, build.hidden_states), shape, directory, arithmetic, rank=rank)
    if isinstance(written, NoTokenProgram):
        return _Compiled(dataclasses.replace(build, compiler="torch-compile"), written.reason)
    return _Compiled(build, None, arithmetic, written.why_whole)


def _compile_all(
    weights: _Weights, model: PreTrainedModel, check: "_Check", directory: Path, effort: BuildEffort
) -> _Compiled:
    """Write the files of all ranks' steps. SpecDecError if `aot` lacks an operation and no other may be taken."""
    if weights.with_kernels:
        write_kernels(directory / LIBRARY)
        load_kernels(directory / LIBRARY)
        describe_kernels()
    if weights.device.type == "cpu":
        flush_denormals()
        keep_freed_memory()
    if weights.splitting is None:
        compiled = _compile(model, check.shape, directory)
    else:
        compiled = _compile_ranks(weights, check.shape, directory, effort.num_workers)
    if compiled.lacks is not None and not effort.takes_torch_compile:
        raise lacks_operations(compiled.lacks)
    if compiled.build.compiler != "aot":
        for path in weights.paths:
            shutil.copyfile(path, directory / path.name)
    return compiled


def _compile_ranks(weights: _Weights, shape: StepShape, directory: Path, num_workers: int) -> _Compiled:
    """Compile the step that all ranks share, and write each rank's weights in its layout."""
    if shape.build_config.compiler != "aot":
        return _Compiled(shape.build_config)
    ranks = list(range(weights.checkpoint.mapping.tp_size))
    return do_at_once(partial(_compile_rank, weights, shape, directory), ranks, num_workers)[
        0
    ]  # rank 0 has written the step


def _compile_rank(weights: _Weights, shape: StepShape, directory: Path, rank: int) -> _Compiled:
    """Compile a rank's step, in this process or in a fresh one."""
    load_kernels(directory / LIBRARY)
    describe_kernels()
    flush_denormals()
    with own_temporary_files():
        return _compile(weights.model_of(rank), shape, directory, rank)
