"""Make an engine directory from a checkpoint: load, compile, compare with transformers, write.

The compiled step is opened again and compared before anything is written, so an engine that exists gave the same
logits as transformers' own eager attention on the machine that built it.
"""

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from runtime.batch import Row, pack
from runtime.bundle import LIBRARY, config_digest, record_files, uses_kernels
from runtime.checkpoint import copy_tokenizer_files
from runtime.checkpoint_dir import open_checkpoint
from runtime.compiler.attention import KERNEL, PAGED
from runtime.compiler.compilation import StepFunction, compile_aot, torch_compile
from runtime.compiler.identity import weights_digest
from runtime.compiler.kernels import compile_kernels, describe_kernels, load_kernels
from runtime.compiler.measuring import cache_for_measuring, measure_host, measure_steps
from runtime.compiler.model import (
    Step,
    load_model,
    num_positions,
    parse_pretrained_config,
    probe_config,
    why_positions_end,
)
from runtime.compiler.opening import current_environment, open_step
from runtime.config import BuildConfig, CheckpointConfig, Compiler, EngineConfig, LayerShape, LogitsCheck, as_json
from runtime.engine import Engine
from runtime.errors import SpecDecError
from runtime.files import check_output_directory, check_output_is_not_input, new_directory, write_json
from runtime.kv_cache import KVPool
from runtime.text import keep_tokenizer

# Largest norm of the difference between two rows of logits, over the norm of the row.
_TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}

Phase = Callable[[str], None]
"""Called with the name of the phase that begins."""


def build_engine(
    checkpoint_dir: Path,
    output_dir: Path,
    build: BuildConfig,
    device: torch.device,
    *,
    replace: bool,
    phase: Phase,
    measure_costs: bool = True,
) -> EngineConfig:
    """Write the engine directory of a checkpoint, with what its steps cost unless nobody will ask.

    Raises SpecDecError if the settings do not fit the model, or the compiled step's logits differ from transformers';
    then nothing is written. A model that cannot be exported is compiled with `torch-compile` instead, and
    `compiler_note` says why.
    """
    check_output_is_not_input(output_dir, checkpoint_dir)
    check_output_directory(output_dir, replace=replace)
    checkpoint = open_checkpoint(checkpoint_dir)
    pretrained = parse_pretrained_config(checkpoint.pretrained_config, str(checkpoint_dir / "config.json"))
    _check_lengths(build, pretrained)
    layers = probe_config(pretrained)
    phase("loading the checkpoint")
    weights = checkpoint_dir / "rank0.safetensors"
    with_kernels = uses_kernels(build.compiler, device.type)
    model = load_model(pretrained, weights, getattr(torch, checkpoint.dtype), KERNEL if with_kernels else PAGED)
    Step(model).to(device)
    if device.type == "cpu":
        torch.set_flush_denormal(True)
    with new_directory(output_dir, replace=replace) as directory:
        phase("compiling the step")
        if with_kernels:
            compile_kernels(directory / LIBRARY)
            load_kernels(directory / LIBRARY)
            describe_kernels()
        build, note = _compile(model, layers, build, directory)
        if build.compiler != "aot":
            shutil.copyfile(weights, directory / "rank0.safetensors")
        phase("checking the logits")
        step = _built_step(build.compiler, checkpoint, model, directory)
        with _machine_errors():  # `torch-compile` compiles with the first step
            logits_check = check_logits(step, model, layers, build, _TOLERANCE[checkpoint.dtype])
        config = EngineConfig(
            pretrained_config=checkpoint.pretrained_config,
            dtype=checkpoint.dtype,
            build_config=build,
            layers=layers,
            vocab_size=pretrained.vocab_size,
            environment=current_environment(device),
            logits_check=logits_check,
            weights_digest=weights_digest(model, getattr(torch, checkpoint.dtype)),
            compiler_note=note,
        )
        if measure_costs:
            phase("measuring steps")
            config = _with_costs(config, step, device)
        phase("writing the engine")
        copy_tokenizer_files(checkpoint_dir, directory)
        config = _finish(config, directory)
    return config


def _finish(config: EngineConfig, directory: Path) -> EngineConfig:
    """Write `config.json`, with a record of all that is there."""
    keep_tokenizer(directory, config.pretrained_config)
    config = dataclasses.replace(config, files=record_files(directory))
    config = dataclasses.replace(config, config_digest=config_digest(as_json(config)))
    write_json(directory / "config.json", as_json(config))
    return config


@contextmanager
def _machine_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        _raise_machine_error(error)
        raise


def _built_step(
    compiler: Compiler, checkpoint: CheckpointConfig, model: PreTrainedModel, directory: Path
) -> StepFunction:
    """What was compiled, opened as an engine does; `torch-compile` compiles when it is called."""
    if compiler == "aot":
        device = next(model.parameters()).device
        return open_step("aot", checkpoint.pretrained_config, checkpoint.dtype, directory, device)
    return torch_compile(Step(model), directory / "rank0.cache") if compiler == "torch-compile" else Step(model)


def _with_costs(config: EngineConfig, step: StepFunction, device: torch.device) -> EngineConfig:
    """The config with what steps cost, or without where there is no memory to measure them: it may still run."""
    try:
        engine = Engine(config, step, device, cache_for_measuring(config.build_config))
    except SpecDecError:
        return config
    with engine:
        return dataclasses.replace(config, step_costs=measure_steps(engine), host_s=measure_host(engine))


def default_max_seq_len(checkpoint_dir: Path) -> int:
    """The number of positions the checkpoint's model has."""
    checkpoint = open_checkpoint(checkpoint_dir)
    pretrained = parse_pretrained_config(checkpoint.pretrained_config, str(checkpoint_dir / "config.json"))
    positions = num_positions(pretrained)
    if positions is None:
        raise SpecDecError(
            "the model's config does not say how many positions it has", hint="give max_seq_len", fact="no_positions"
        )
    return positions


def _check_lengths(build: BuildConfig, config: PreTrainedConfig) -> None:
    if build.max_input_len >= build.max_request_len:
        raise SpecDecError(
            f"max_input_len leaves no room for output in max_seq_len {build.max_request_len}: {build.max_input_len}",
            hint="raise max_seq_len or lower max_input_len",
            fact="no_room_for_output",
        )
    positions = num_positions(config)
    if positions is not None and build.max_request_len > positions:
        raise SpecDecError(
            f"max_seq_len exceeds the {positions} positions {why_positions_end(config)}: {build.max_request_len}",
            hint=f"max_seq_len {positions} is the most",
            fact="positions",
            max_seq_len=positions,
        )


def _compile(
    model: PreTrainedModel, layers: tuple[LayerShape, ...], build: BuildConfig, directory: Path
) -> tuple[BuildConfig, str | None]:
    """Compile ahead of time if asked; returns the settings as they came out, and why if not as asked."""
    if build.compiler != "aot":
        return build, None
    try:
        compile_aot(Step(model), layers, build, directory / "rank0.pt2", directory / "rank0.safetensors")
    except Exception as error:  # export and Inductor raise many kinds; each means: not this model
        _raise_machine_error(error)
        (directory / "rank0.pt2").unlink(missing_ok=True)
        message = next(iter(str(error).strip().splitlines()), "")
        note = f"cannot be compiled ahead of time: {type(error).__name__}: {message}"
        return dataclasses.replace(build, compiler="torch-compile"), note
    return build, None


def _raise_machine_error(error: Exception) -> None:
    """Raise what is the machine's fault and not the model's: a full disk, or no C++ compiler."""
    cause = getattr(error, "inner_exception", error)  # of Inductor's wrapper
    if isinstance(cause, OSError):
        raise cause
    if type(cause).__name__ == "InvalidCxxCompiler":
        raise SpecDecError(
            f"no working C++ compiler to build with: {os.environ.get('CXX', 'g++')}",
            hint="install one (the package `g++`) or name it in the variable CXX",
            fact="no_compiler",
        ) from error


def check_logits(
    step: StepFunction, model: PreTrainedModel, layers: tuple[LayerShape, ...], build: BuildConfig, tolerance: float
) -> LogitsCheck:
    """Compare a ragged batch's context step and draft-length step with eager attention over the whole sequences.

    Raises SpecDecError if the largest relative difference of a row of logits exceeds `tolerance`.
    """
    num_context = _check_context_len(layers, build)
    num_generation = min(1 + build.max_draft_len, build.max_request_len - num_context)
    lengths = [(num_context, num_generation), (-(-num_context // 2), -(-num_generation // 2))]
    lengths = lengths[: build.max_batch_size]
    generator = torch.Generator().manual_seed(0)
    rows_tokens = [
        torch.randint(0, model.config.vocab_size, (context + draft,), generator=generator).tolist()
        for context, draft in lengths
    ]
    parameter = next(model.parameters())
    block_size = build.tokens_per_block
    num_blocks = -(-(num_context + num_generation) // block_size)
    tables = [list(range(1 + i * num_blocks, 1 + (i + 1) * num_blocks)) for i in range(len(lengths))]
    pool = KVPool(layers, 1 + len(lengths) * num_blocks, block_size, parameter.dtype, parameter.device)

    def run(rows: list[Row]) -> Tensor:
        batch = pack(rows, block_size, parameter.device)
        return step(*batch.tensors(), pool.keys, pool.values).float()

    with torch.inference_mode():  # as an engine does: a compiled step is found again only under the same mode
        zipped = list(zip(rows_tokens, tables, lengths, strict=True))
        ours = [
            run([Row(tokens[:context], 0, table, 1) for tokens, table, (context, _) in zipped]),
            run([Row(tokens[context:], context, table, draft) for tokens, table, (context, draft) in zipped]),
        ]
        with _eager_attention(model):
            reference = [
                model(input_ids=torch.tensor([tokens], device=parameter.device), use_cache=False).logits[0].float()
                for tokens in rows_tokens
            ]
    theirs = [
        torch.stack([logits[context - 1] for logits, (context, _) in zip(reference, lengths, strict=True)]),
        torch.cat([logits[context:] for logits, (context, _) in zip(reference, lengths, strict=True)]),
    ]
    difference, scale = torch.cat(ours) - torch.cat(theirs), torch.cat(theirs)
    check = LogitsCheck(
        max_abs_difference=difference.abs().max().item(),
        relative_difference=(difference.norm(dim=-1) / scale.norm(dim=-1)).max().item(),
        tolerance=tolerance,
    )
    if not check.relative_difference <= tolerance:
        raise SpecDecError(
            f"the engine's logits differ from transformers' by more than {tolerance:g} of their norm: "
            f"{check.relative_difference:.2e} (largest difference {check.max_abs_difference:.2e})",
            hint="the model is not computed correctly and no engine was written; please report it",
        )
    return check


def _check_context_len(layers: tuple[LayerShape, ...], build: BuildConfig) -> int:
    """Long enough for several blocks, and to pass a sliding window where that is affordable; a draft fits after it."""
    windows = [layer.sliding_window for layer in layers if layer.sliding_window is not None]
    wanted = max([2 * build.tokens_per_block + 7] + [window + 9 for window in windows if window <= 1024])
    return max(1, min(wanted, build.max_input_len, build.max_request_len - 1 - build.max_draft_len))


@contextmanager
def _eager_attention(model: PreTrainedModel) -> Iterator[None]:
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(ours)
