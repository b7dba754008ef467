"""Flags of `specdec batch`."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from commands.options.sampling_flags import FormOptions, given_params
from commands.options.shared import Receipts
from commands.output.help import INPUT, OUTPUT, SAMPLING, option
from runtime.core.params import SamplingConfig, SamplingParams
from runtime.util.errors import SpecDecError, UsageError


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

    receipts: Receipts = None

    def check(self) -> None:
        """SpecDecError for requests that cannot be read twice, UsageError if the results would overwrite them."""
        path = self.input_file
        if path.exists() and not path.is_file():
            what = "Is a directory" if path.is_dir() else "not a regular file, and it is read twice"
            raise SpecDecError(f"cannot read the file ({what}): {path}", hint="give a file")
        if path.exists() and self.output_file.exists() and path.samefile(self.output_file):
            raise UsageError(f"the output would overwrite an input: {self.output_file}", hint="choose another path")


@dataclass(frozen=True)
class BatchDefaults:
    """Default sampling settings for requests that do not set them."""

    max_output_len: Annotated[
        int | None, option(SAMPLING, "Default for `max_tokens`.", shown="16; in a chat as many as fit", min=1)
    ] = None
    temperature: Annotated[
        float | None, option(SAMPLING, "Default for requests; 0 is greedy.", shown="the model's, or 1")
    ] = None
    top_k: Annotated[int | None, option(SAMPLING, "Default for requests.", shown="the model's, or 0")] = None
    top_p: Annotated[float | None, option(SAMPLING, "Default for requests.", shown="the model's, or 1")] = None
    thinking_token_budget: Annotated[int | None, option(SAMPLING, "Default for requests.", shown="no limit", min=0)] = (
        field(default=None, repr=False)
    )
    random_seed: Annotated[
        int,
        option(SAMPLING, "Seed for requests that have none; each gets a seed made from this one and its `custom_id`."),
    ] = 0
    form: FormOptions = field(default_factory=FormOptions, repr=False)

    def checked(self) -> "BatchDefaults":
        """The same defaults with the content of files, such as a JSON schema's, in place of paths; SpecDecError for a
        value that is wrong.
        """
        SamplingConfig(**given_params(self))
        SamplingParams(**self.form.params)
        return replace(self, form=self.form.read())
