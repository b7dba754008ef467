"""`specdec convert`: a Hugging Face model becomes a checkpoint."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from commands.options.expand import expand_groups
from commands.options.panels import INPUT, OUTPUT, RUNTIME
from commands.options.single import Force
from commands.output import Output, check_new_directory, megabytes
from runtime.config import as_json
from runtime.errors import UsageError
from runtime.files import check_output_directory, check_output_is_not_input, directory_bytes
from runtime.models import read_model_config, resolve_model


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """What is converted, and to what. The sizes are TensorRT-LLM's, and refused."""

    model_dir: Annotated[
        str,
        typer.Option(help="Model directory, hub id, or shipped name (`demo`, `demo-draft`).", rich_help_panel=INPUT),
    ]
    output_dir: Annotated[Path, typer.Option(help="Checkpoint directory to write.", rich_help_panel=OUTPUT)]
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        typer.Option(help="Dtype of the weights; `auto` keeps the one they were saved in.", rich_help_panel=RUNTIME),
    ] = "auto"
    tp_size: Annotated[int, typer.Option(hidden=True)] = 1
    pp_size: Annotated[int, typer.Option(hidden=True)] = 1
    force: Force = False

    def check(self) -> None:
        """UsageError for a model split over devices."""
        if (self.tp_size, self.pp_size) != (1, 1):
            raise UsageError(
                f"models are not split over devices in this version: --tp-size {self.tp_size} --pp-size {self.pp_size}",
                hint="leave both flags out",
            )


@expand_groups
def convert(options: ConvertOptions, output: Output) -> None:
    """Convert a Hugging Face model into a checkpoint: config.json and rank0.safetensors.

    Weights are copied tensor by tensor, so a model larger than memory converts.
    """
    options.check()
    output_dir = options.output_dir
    check_output_directory(output_dir, replace=options.force)
    check_new_directory(output_dir)
    source = resolve_model(options.model_dir)
    read_model_config(source)
    check_output_is_not_input(output_dir, source)

    from runtime import checkpoint

    start = time.perf_counter()
    with output.byte_progress("converting") as progress:
        dtype = None if options.dtype == "auto" else options.dtype
        config = checkpoint.convert(source, output_dir, dtype, replace=options.force, progress=progress)
    elapsed, size = time.perf_counter() - start, directory_bytes(output_dir)
    output.result(
        f"Converted {config.pretrained_config['model_type']} to {config.dtype}: "
        f"{megabytes(size)} in {elapsed:.1f} s → {output_dir}"
    )
    output.document(
        {
            "checkpoint_dir": str(output_dir),
            "model_dir": options.model_dir,
            "checkpoint": as_json(config),
            "size_bytes": size,
            "convert_time_s": elapsed,
        }
    )
