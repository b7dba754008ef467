"""Flags of `specdec summarize`."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from commands.inputs.dataset import DEMO, EvalTask
from commands.options.sampling_flags import GenerationOptions
from commands.options.shared import CheckLossless, ClusterOptions, DatasetDir, OutputLen, OutputTraces, Report, Stats
from commands.output.help import INPUT, OUTPUT, RUNTIME, SAMPLING, as_flag, option
from commands.output.output import check_output_files, check_report, warn
from runtime.checkpoint.config import BuildConfig
from runtime.core.params import Mode
from runtime.util.errors import SpecDecError, UsageError

_DEFAULT_THRESHOLD = 15.0
OUTPUT_DIR_FILES = ("engine.out", "hf.out", "summary.json")


@dataclass(frozen=True)
class SummarizeInputs:
    """The dataset, and the model that Hugging Face runs."""

    hf_model_dir: Annotated[
        str | None, option(INPUT, "Model that `--test-hf` runs: directory, GGUF file, hub id or shipped name.")
    ] = None
    dataset: Annotated[
        str, option(INPUT, "`demo`, a hub id such as ccdv/cnn_dailymail, or a .jsonl, .csv or .parquet file.")
    ] = DEMO
    dataset_dir: DatasetDir = None
    eval_task: Annotated[
        EvalTask,
        option(
            INPUT,
            "Task of the dataset, which decides how a text becomes a prompt.",
            metavar="[summarize|code_completion|question]",
        ),
    ] = "summarize"
    text_column: Annotated[
        str | None, option(INPUT, "Dataset column with the texts to summarize.", shown="article, prompt, …")
    ] = None
    reference_column: Annotated[
        str | None,
        option(
            INPUT,
            "Dataset column with the references, which outputs are scored against.",
            shown="highlights, reference, …",
        ),
    ] = None
    max_input_length: Annotated[
        int, option(INPUT, "Cut longer prompts at the beginning, to this many tokens.", min=1)
    ] = 923

    @property
    def paths(self) -> list[Path]:
        """Paths to read."""
        given = (self.dataset_dir, self.dataset, self.hf_model_dir)
        return [Path(path) for path in given if path is not None]

    def check(self) -> None:
        """UsageError if the column of texts is also the column of references."""
        if self.text_column is not None and self.text_column == self.reference_column:
            raise UsageError(
                f"`--text-column` and `--reference-column` name the same column: {self.text_column}",
                hint="name two different columns",
            )


@dataclass(frozen=True)
class EvaluationOptions:
    """Systems, samples and outputs of an evaluation.

    The seed stands before the other flags of sampling in `--help`.
    """

    test_engine: Annotated[
        bool, option(RUNTIME, "Run the engine.", "--test-engine", shown="unless `--test-hf` is given alone")
    ] = False
    test_hf: Annotated[bool, option(RUNTIME, "Run Hugging Face.", "--test-hf")] = False
    batch_size: Annotated[int, option(RUNTIME, "Samples answered together; in leader mode some may wait.", min=1)] = 1
    max_ite: Annotated[int, option(RUNTIME, "Batches to run.", min=1)] = 20
    output_len: OutputLen = 100
    random_seed: Annotated[int, option(SAMPLING, "Order of the dataset, and seed of sampling.", min=0)] = 0

    common: GenerationOptions = field(default_factory=GenerationOptions)
    cluster: ClusterOptions = field(default_factory=ClusterOptions)

    def with_test(self) -> "EvaluationOptions":
        """The same options; if no system is to be tested, with the engine."""
        return self if self.test_engine or self.test_hf else replace(self, test_engine=True)

    def check(self, hf_model_dir: str | None) -> None:
        """UsageError for `--test-hf` without a model or with a form, and for `--ray` without the engine."""
        self.common.check()
        self.cluster.check()
        if self.test_hf and hf_model_dir is None:
            raise UsageError(
                "`--test-hf` needs `--hf-model-dir`", hint="`--hf-model-dir` names the model the engine was made from"
            )
        if self.test_hf and (form := [name for name, value in vars(self.common.sampling.form).items() if value]):
            raise UsageError(
                f"`{as_flag(form[0])}` works with the engine only: Hugging Face's model cannot hold its outputs to a "
                "form",
                hint="leave `--test-hf` out",
            )
        if self.cluster.ray is not None and not self.test_engine:
            raise UsageError("`--ray` needs `--test-engine`", hint="add `--test-engine`, which runs the engine")

    def check_fits(self, build: BuildConfig, loop: Mode) -> None:
        """SpecDecError for larger batches than the loop takes."""
        if self.batch_size > build.max_batch_size and loop == "orchestrator":
            raise SpecDecError(
                f"`--batch-size` exceeds the engine's max_batch_size {build.max_batch_size}: {self.batch_size}",
                hint="lower it, build with a larger `specdec build --max-batch-size`, or let samples wait: "
                "`--mode leader`",
            )

    def record(self, inputs: SummarizeInputs, num_samples: int) -> dict[str, Any]:
        """Settings of the dataset and of generation for the document."""
        return {
            "dataset": inputs.dataset,
            "eval_task": inputs.eval_task,
            "batch_size": self.batch_size,
            "output_len": self.output_len,
            "max_input_length": inputs.max_input_length,
            "num_samples": num_samples,
            "random_seed": self.random_seed,
            "hf_model_dir": inputs.hf_model_dir,
        }


@dataclass(frozen=True)
class SummarizeResults:
    """Checks and outputs of `summarize`."""

    check_accuracy: Annotated[bool, option(OUTPUT, "Exit 1 if ROUGE-1 is below the threshold.", "--check-accuracy")] = (
        False
    )
    rouge1_threshold: Annotated[
        float | None,
        option(OUTPUT, "With `--check-accuracy`: lowest ROUGE-1 x 100 that passes.", shown="15.0", min=0.0, max=100.0),
    ] = None
    rouge1_max_loss: Annotated[
        float | None,
        option(
            OUTPUT,
            "With `--check-accuracy` and `--test-hf`: largest loss of ROUGE-1 x 100 against Hugging Face that passes.",
            shown="no limit",
            min=0.0,
            max=100.0,
        ),
    ] = None
    check_lossless: CheckLossless = False
    stats: Stats = "summary"
    report: Report = None
    output_dir: Annotated[Path | None, option(OUTPUT, "Write outputs (engine.out, hf.out) and summary.json here.")] = (
        None
    )
    output_traces: OutputTraces = None

    @property
    def threshold(self) -> float:
        return _DEFAULT_THRESHOLD if self.rouge1_threshold is None else self.rouge1_threshold

    def check(self, *, test_engine: bool, test_hf: bool) -> None:
        """UsageError for `--rouge1-max-loss` without the two flags that it needs, and for flags about the engine if the
        engine is not run.
        """
        if self.rouge1_max_loss is not None:
            max_loss = f"`--rouge1-max-loss {self.rouge1_max_loss:g}`"
            if not self.check_accuracy:
                raise UsageError(f"{max_loss} needs `--check-accuracy`", hint="`--check-accuracy`")
            if not test_hf:
                raise UsageError(
                    f"{max_loss} needs `--test-hf`, to compare with Hugging Face",
                    hint="add `--test-hf --hf-model-dir MODEL`",
                )
        if self.rouge1_threshold is not None and not self.check_accuracy:
            warn(f"`--rouge1-threshold` has no effect without `--check-accuracy`: {self.rouge1_threshold:g}")
        about_engine = {
            "--check-accuracy": self.check_accuracy,
            "--check-lossless": self.check_lossless,
            "--output-traces": self.output_traces,
        }
        given = [flag for flag, value in about_engine.items() if value]
        if given and not test_engine:
            raise UsageError(f"`{given[0]}` needs `--test-engine`", hint="add `--test-engine`, which runs the engine")

    def check_files(self, inputs: list[Path]) -> None:
        """SpecDecError unless each file can be written. `--output-dir` has files of its own, and need not exist yet."""
        check_report(self.report)
        outputs = [path for path in (self.output_traces, self.report) if path is not None]
        new_dir = None
        if self.output_dir is not None:
            place = self.output_dir.resolve()
            if any(source.is_dir() and source.resolve() in (place, *place.parents) for source in inputs):
                raise UsageError(
                    f"`--output-dir` is inside an input directory: {self.output_dir}", hint="choose another"
                )
            taken = [(self.output_dir / name).resolve() for name in OUTPUT_DIR_FILES]
            for path in outputs:
                if path.resolve() in taken:
                    raise UsageError(f"two outputs have the same file: {path}", hint="give each a name of its own")
            new_dir = None if self.output_dir.exists() else self.output_dir
        check_output_files(outputs, inputs, new_dir=new_dir)
