"""`specdec convert`: a Hugging Face model becomes a checkpoint."""

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer

from commands.options.engine_flags import ConvertEngineOptions, engine_flag
from commands.options.expand import expand_groups
from commands.options.model_word import named_by
from commands.options.shared import USUAL_CHECKPOINT, Force
from commands.output.help import INPUT, OUTPUT, QUANTIZATION, RUNTIME, option
from commands.output.output import Output, check_new_directory, megabytes
from runtime.builder.engine_options import EngineOptions, precision_of
from runtime.checkpoint.config import IntFormat, QuantConfig
from runtime.checkpoint.resolve import check_is_model, resolve_model
from runtime.util.errors import UsageError
from runtime.util.files import check_output_directory, check_output_is_not_input, directory_bytes


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Source and format of a conversion. `pp_size` is a flag of TensorRT-LLM's, and refused."""

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Model directory, GGUF file, hub id, or shipped name (`demo`, `demo-draft`, `demo-hybrid`).",
            show_default=False,
        ),
    ] = None
    model_dir: Annotated[str | None, option(INPUT, "The same as `MODEL`, by a flag.")] = None
    output_dir: Annotated[Path, option(OUTPUT, "Checkpoint directory to write.")] = Path(USUAL_CHECKPOINT)
    engine: ConvertEngineOptions = field(default_factory=ConvertEngineOptions)
    group_size: Annotated[
        int | None,
        option(
            QUANTIZATION,
            "Inputs that share a scale: 32, 64 or 128; -1 for one scale per output.",
            shown="64, for fp8 -1",
        ),
    ] = None
    quantize_lm_head: Annotated[bool, option(QUANTIZATION, "Quantize the output layer too.", "--quantize-lm-head")] = (
        False
    )
    use_weight_only: Annotated[
        bool,
        option(QUANTIZATION, "TensorRT-LLM's `--quantization` with `--weight-only-precision`.", "--use-weight-only"),
    ] = False
    weight_only_precision: Annotated[
        IntFormat | None, option(QUANTIZATION, "Format for `--use-weight-only`.", shown="int8")
    ] = None
    tp_size: Annotated[int, engine_flag("tensor_parallel_size", RUNTIME, max=64)] = 1
    pp_size: Annotated[int, typer.Option(hidden=True)] = 1
    force: Force = False

    @property
    def source(self) -> str:
        """The model to convert. UsageError if no model is named, or two models are."""
        named_by(self.model, self.model_dir, None)
        source = self.model or self.model_dir
        if source is None:
            raise UsageError(
                "no model to convert is given", hint="name it first, as in `specdec convert demo`, or by `--model-dir`"
            )
        return source

    def check(self) -> None:
        """UsageError for two flags that say the same, for a flag without effect, or for a group size that there is
        not.
        """
        self.engine.check()
        if self.pp_size != 1:
            raise UsageError(
                f"layers are not spread over devices one after another: --pp-size {self.pp_size}",
                hint="`--tp-size` splits each layer",
            )
        if self.weight_only_precision is not None and not self.use_weight_only:
            raise UsageError(
                f"`--weight-only-precision {self.weight_only_precision}` needs `--use-weight-only`",
                hint=f"`--quantization {self.weight_only_precision}` says the same",
            )
        quantization = self.engine.options.get("quantization")
        if self.use_weight_only and quantization is not None:
            raise UsageError(
                f"`--use-weight-only` and `--quantization {quantization}` say the same twice",
                hint="leave one of them out",
            )
        if self.options.get("quantization") is None:
            self._check_unquantized()
        elif self.group_size not in (None, *_GROUP_SIZES):
            raise UsageError(
                f"`--group-size` is 32, 64, 128 or -1: {self.group_size}", hint="`--group-size 64` is int4's default"
            )

    def _check_unquantized(self) -> None:
        """UsageError for a setting of quantization if nothing is quantized."""
        flags = {
            "--group-size": self.group_size is not None,
            "--quantize-lm-head": self.quantize_lm_head,
        }
        if given := next((flag for flag, is_given in flags.items() if is_given), None):
            raise UsageError(f"`{given}` needs weights to quantize", hint="`--quantization int4` quantizes them")

    @property
    def options(self) -> EngineOptions:
        """The options that are given, by whichever of their flags."""
        if not self.use_weight_only:
            return self.engine.options
        return self.engine.options | {"quantization": self.weight_only_precision or "int8"}

    @property
    def precision(self) -> QuantConfig:
        """Quantization chosen by the flags."""
        precision = replace(precision_of(self.options), quantize_lm_head=self.quantize_lm_head)
        if self.group_size is None:
            return precision
        return replace(precision, group_size=None if self.group_size == -1 else self.group_size)


_GROUP_SIZES = (32, 64, 128, -1)


@expand_groups
def convert(options: ConvertOptions, output: Output) -> None:
    """Convert a Hugging Face model into a checkpoint: config.json, and a file rankN.safetensors for each device.

    Weights are copied tensor by tensor, so the model may be larger than memory.
    """
    options.check()
    model, output_dir = options.source, options.output_dir
    check_output_directory(output_dir, replace=options.force)
    check_new_directory(output_dir)
    source = resolve_model(model)
    check_is_model(source)
    check_output_is_not_input(output_dir, source)

    from commands.build.document import ConvertDocument, described_checkpoint
    from runtime.builder import convert

    start = time.perf_counter()
    with output.byte_progress("converting") as progress:
        dtype = options.options.get("dtype", "auto")
        config = convert.convert(
            source,
            output_dir,
            None if dtype == "auto" else dtype,
            replace=options.force,
            progress=progress,
            precision=options.precision,
            tp_size=options.tp_size,
        )
    elapsed, size = time.perf_counter() - start, directory_bytes(output_dir)
    output.result(
        f"Converted {config.pretrained_config['model_type']} to {described_checkpoint(config)}: "
        f"{megabytes(size)} in {elapsed:.1f} s → {output_dir}"
    )
    document = ConvertDocument(
        checkpoint_dir=str(output_dir),
        model_dir=model,
        checkpoint=config,
        size_bytes=size,
        convert_time_s=elapsed,
    )
    output.document(document.as_json())
