"""The panels of `--help`, in the order of all commands; flags that several groups or commands have in common."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from commands.options.expand import CURRENT_COMMAND
from commands.output.help import CLUSTER, INPUT, OUTPUT, RUNTIME, option
from runtime.checkpoint.config import Quantization
from runtime.util.errors import SpecDecError, UsageError

COMMON = frozenset(
    {
        "help_all", "model", "named", "prompt", "hf_model_dir", "input_file", "apply_chat_template", "system",
        "quantization", "kv_cache_dtype", "max_seq_len", "spec_decode_algo", "draft_model_dir", "ngram_config",
        "dataset",
        "max_output_len", "output_len", "test_engine", "test_hf", "batch_size", "max_ite", "stop_words",
        "profile", "save",
        "temperature", "top_k", "top_p", "random_seed",
        "streaming",
        "check_accuracy", "check_lossless", "stats", "show_tokens", "report",
        "json", "quiet",
        "host", "port", "api_key", "served_model_name", "max_queue_len",
        "output_file", "ray", "num_workers", "traces", "output",
    }
)  # fmt: skip
"""Arguments and flags that the short `--help` of a command with many flags shows; `--help-all` shows all."""


InputFile = Annotated[Path | None, option(INPUT, "Prompts in a file, as `run` takes it.")]
DatasetDir = Annotated[Path | None, option(INPUT, "Local directory that holds the dataset.")]
OutputLen = Annotated[int, option(RUNTIME, "Tokens to generate.", min=1)]
TokenizerDir = Annotated[
    Path | None,
    option(INPUT, "Tokenizer to use instead of the engine's own: a directory or GGUF file.", shown="engine's"),
]
EndId = Annotated[int | None, option(RUNTIME, "Token id that ends an output.", shown="the model's own", min=0)]
MaxNumTokens = Annotated[
    int | None,
    option(
        RUNTIME,
        "Prompt tokens per step (chunked prefill), so that a long prompt does not stall others.",
        shown="512",
        min=1,
    ),
]
OutputTraces = Annotated[
    Path | None, option(OUTPUT, "Write prompt and output ids as JSON lines, which `corpus create` reads.")
]
Receipts = Annotated[
    Path | None,
    option(
        OUTPUT,
        "Write a receipt for each answer as a JSON line: all that its tokens follow from, for `specdec check`.",
        metavar="FILE.jsonl",
    ),
]
ReceiptIds = Annotated[
    Literal["ids", "digests"] | None,
    option(
        OUTPUT,
        "Token ids in receipts as `ids`, or only their `digests`: then `specdec check` needs `--answers`.",
        shown="ids",
        metavar="[ids|digests]",
    ),
]
CheckLossless = Annotated[
    bool,
    option(
        OUTPUT,
        "Compare with the same engine without a drafter; exit 1 if speculation changed the output.",
        "--check-lossless",
    ),
]
Stats = Annotated[
    Literal["summary", "detailed", "none"],
    option(
        OUTPUT,
        "`summary` prints tables; `detailed` adds acceptance by draft length and position and tokens per step "
        "over time, and to `--json` the counts of each step; `none` prints outputs and checks only.",
    ),
]
Report = Annotated[
    Path | None,
    option(OUTPUT, "Write a self-contained page for a browser: charts, tables and settings.", metavar="FILE.html"),
]
CompareActivations = Annotated[
    bool,
    option(
        RUNTIME,
        "Measure what `--activations int8` would save in time and change in probabilities.",
        "--compare-activations",
    ),
]
Force = Annotated[bool, option(OUTPUT, "Replace the output directory if specdec wrote it.", "--force")]


USUAL_CHECKPOINT, USUAL_ENGINE = "checkpoint", "engine_outputs"
"""Directories that `convert` and `build` write, and that `build` and `run` read, where no flag names another."""


def check_has_more_bits(quantization: Quantization | None) -> None:
    """UsageError for `--compare-activations`, unless the weights are integers and their inputs have more
    than 8 bits.
    """
    command = CURRENT_COMMAND.get()
    takes_model = command is not None and "quantization" in command.flags
    if quantization is None or quantization.quant_algo is None or quantization.quant_algo.startswith("FP8"):
        raise UsageError(
            "`--compare-activations` is for a model with weights in int8 or int4, and this model has others",
            hint="`--quantization int8` quantizes a model; or leave the flag out",
        )
    if quantization.activations == "int8":
        raise UsageError(
            "`--compare-activations` compares activations of 16 bits or more with 8 bits, and these have 8 already: "
            "int8",
            hint=f"`{'' if takes_model else 'specdec convert '}--activations int16` has more; or leave the flag out",
        )


@dataclass(frozen=True)
class ClusterOptions:
    """Flags for Ray's workers."""

    ray: Annotated[
        str | None,
        option(CLUSTER, "Use Ray workers: `local` starts Ray here; or an address, or `auto`.", metavar="ADDRESS"),
    ] = None
    num_workers: Annotated[
        int | None, option(CLUSTER, "Workers, each with an engine of its own.", shown="2", min=1)
    ] = None
    cpus_per_worker: Annotated[
        int | None, option(CLUSTER, "Cores of a worker.", shown="an equal share of what there is", min=1)
    ] = None
    checkpoint_dir: Annotated[
        Path | None,
        option(
            CLUSTER,
            "Checkpoint of the engine's model, from which machines that cannot open the engine build their own.",
        ),
    ] = None

    allow_mixed: Annotated[
        bool,
        option(
            CLUSTER,
            "Go on with workers whose engines give different bits (their fingerprints differ): results then depend on "
            "which worker made them.",
            "--allow-mixed",
        ),
    ] = False

    def check(self) -> None:
        """UsageError for a flag of Ray's workers without Ray; SpecDecError if Ray is not installed."""
        if self.ray is None:
            flags = {
                "--num-workers": self.num_workers,
                "--cpus-per-worker": self.cpus_per_worker,
                "--checkpoint-dir": self.checkpoint_dir,
            }
            if self.allow_mixed:
                raise UsageError("`--allow-mixed` is for Ray's workers", hint="`--ray local` starts Ray here")
            for flag, value in flags.items():
                if value is not None:
                    raise UsageError(f"`{flag}` is for Ray's workers: {value}", hint="`--ray local` starts Ray here")
            return
        try:
            import ray  # noqa: F401
        except ImportError:
            raise SpecDecError(
                "`--ray` needs a package that is not installed: ray", hint="pip install 'specdec-cli[ray]'"
            ) from None


def end_id_params(end_id: int | None) -> dict[str, Any]:
    """`SamplingParams` for `--end-id`: only this id ends an output. Without the flag the model's own end ids do."""
    return {} if end_id is None else {"stop_token_ids": [end_id], "ignore_eos": True}
