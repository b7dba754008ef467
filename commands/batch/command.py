"""`specdec batch`, its flags: a file of requests becomes a file of results, however often it is interrupted."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from commands.options.engine_choice import EngineOptions
from commands.options.expand import expand_groups
from commands.options.sampling_flags import FormOptions
from commands.options.shared import INPUT, OUTPUT, RUNTIME, SAMPLING, ClusterOptions, option
from commands.output import Output, check_output_files, check_readable
from runtime.errors import SpecDecError, UsageError
from runtime.params import SamplingConfig, SamplingParams


@dataclass(frozen=True, kw_only=True)
class BatchFiles:
    """Request and result files."""

    input_file: Annotated[
        Path,
        option(
            INPUT,
            "Requests, one per line: OpenAI's batch format, or objects with a `prompt` or `messages`.",
            "--input-file",
            "-i",
        ),
    ]
    output_file: Annotated[
        Path,
        option(
            OUTPUT,
            "Results, one line per request, in OpenAI's format. If the file is partial, the command resumes.",
            "--output-file",
            "-o",
        ),
    ]

    def check(self) -> None:
        """SpecDecError unless the requests can be read twice, and the results are another file."""
        path = self.input_file
        if path.exists() and not path.is_file():
            what = "Is a directory" if path.is_dir() else "not a regular file, and it is read twice"
            raise SpecDecError(f"cannot read the file ({what}): {path}", hint="give a file")
        if path.exists() and self.output_file.exists() and path.samefile(self.output_file):
            raise UsageError(f"the output would overwrite an input: {self.output_file}", hint="choose another path")


@dataclass(frozen=True)
class BatchDefaults:
    """Defaults for requests."""

    max_output_len: Annotated[
        int | None, option(SAMPLING, "Default for `max_tokens`.", shown="16; in a chat as many as fit", min=1)
    ] = None
    temperature: Annotated[
        float | None, option(SAMPLING, "Default for requests; 0 is greedy.", shown="the model's, or 1")
    ] = None
    top_k: Annotated[int | None, option(SAMPLING, "Default for requests.", shown="the model's, or 0")] = None
    top_p: Annotated[float | None, option(SAMPLING, "Default for requests.", shown="the model's, or 1")] = None
    random_seed: Annotated[int, option(SAMPLING, "With `custom_id`, determines the seed of requests without one.")] = 0
    form: FormOptions = field(default_factory=FormOptions, repr=False)

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling flags that are given."""
        values = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return {name: value for name, value in values.items() if value is not None}

    def checked(self) -> "BatchDefaults":
        """The same with the texts of files; SpecDecError for a value that is wrong."""
        SamplingConfig(**self.sampling)
        SamplingParams(**self.form.params)
        return replace(self, form=self.form.read())


@dataclass(frozen=True)
class BatchModelOptions:
    """Name and settings of the model."""

    served_model_name: Annotated[
        list[str] | None,
        option(
            INPUT,
            "Name of the model in requests; repeatable, the first appears in results.",
            shown="the directory's name",
        ),
    ] = None
    max_num_tokens: Annotated[
        int | None, option(RUNTIME, "Prompt tokens per step (chunked prefill).", shown="512", min=1)
    ] = None
    defaults: BatchDefaults = field(default_factory=BatchDefaults)


@expand_groups
def batch(
    files: BatchFiles, engine: EngineOptions, model: BatchModelOptions, cluster: ClusterOptions, output: Output
) -> None:
    """Answer a file of requests, with speculation in a running batch, on this machine or with Ray on many.

    Started again after a kill or Ctrl-C it goes on where it was, and in the end the results are the same bytes.
    """
    files.check()
    defaults = model.defaults.checked()
    cluster.check()
    engine.check_is_leader("a batch")
    check_readable([files.input_file])
    check_output_files([files.output_file], [files.input_file, *engine.leader.paths])
    choice = engine.choose(SamplingParams(), model.max_num_tokens, "leader")
    choice.check_tokenizer()

    from commands.batch.work import start_batch

    start_batch(files, choice, tuple(model.served_model_name or [choice.model_name]), defaults, cluster, output)
