"""Flags of `specdec bench`."""

import json
import math
import random
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from commands.inputs.dataset import DEMO, Columns, EvalTask, load_samples, summarization_prompt
from commands.inputs.prompts import Prompt, read_prompts
from commands.options.shared import DatasetDir, InputFile, OutputLen
from commands.output.help import INPUT, OUTPUT, RUNTIME, SAMPLING, option
from commands.output.output import check_report
from runtime.util.errors import SpecDecError, SpecDecWarning, UsageError

RANDOM = "random"


DEFAULT_NUM_RANDOM = 100


Content = str | list[int] | list[dict[str, str]]
"""A text, token ids, or the messages of a conversation."""


_WORDS = (
    "the of and to in is that for it was on are as with they at be this have from or one had by word but not what all "
    "were we when your can said there use an each which she do how their if will up other about out many then them "
    "these so some her would make like him into time has look two more write go see number no way could people"
)


def random_contents(num_prompts: int, num_words: int, seed: int) -> list[Content]:
    """Random words, as short as words are: how many tokens they are is told by the server."""
    chosen = random.Random(seed)
    return [" ".join(chosen.choices(_WORDS.split(), k=num_words)) for _ in range(num_prompts)]


def dataset_contents(
    name: str, eval_task: EvalTask | None, dataset_dir: Path | None, text_column: str | None, seed: int
) -> list[Content]:
    """The prompts of a dataset, shuffled with `seed`. References are neither needed nor read."""
    task = eval_task or ("summarize" if name == DEMO else "question")
    samples = load_samples(
        name,
        eval_task=task,
        dataset_dir=dataset_dir,
        max_samples=None,
        seed=seed,
        columns=Columns(text=text_column),
        needs_reference=False,
    )
    return [summarization_prompt(sample.text) if task == "summarize" else sample.text for sample in samples]


def file_contents(path: Path, endpoint: Literal["completions", "chat"]) -> list[Content]:
    """The prompts of a file in order; SpecDecError for one of a kind that the endpoint does not take."""
    return [_content(prompt, number, path, endpoint) for number, prompt in enumerate(read_prompts([], path), 1)]


def _content(prompt: Prompt, number: int, path: Path, endpoint: str) -> Content:
    if prompt.messages is not None and endpoint == "completions":
        raise SpecDecError(
            f"prompt {number} of {path} is a conversation, and completions take text or token ids",
            hint="`--endpoint chat` takes conversations",
        )
    if prompt.ids is not None and endpoint == "chat":
        raise SpecDecError(
            f"prompt {number} of {path} is token ids, and a chat takes text",
            hint="`--endpoint completions` takes token ids",
        )
    if prompt.messages is not None:
        return [{"role": message["role"], "content": message["content"]} for message in prompt.messages]
    return list(prompt.ids) if prompt.ids is not None else str(prompt.text)


def as_many(contents: list[Content], num_prompts: int | None) -> list[Content]:
    """Repeat prompts up to a number."""
    if num_prompts is None:
        return contents
    if num_prompts > len(contents):
        warnings.warn(
            f"{num_prompts} prompts are asked for, and there are {len(contents)}: they are sent more than once, and a "
            "server that reuses prefixes knows them then",
            SpecDecWarning,
            stacklevel=1,
        )
    return [contents[i % len(contents)] for i in range(num_prompts)]


Endpoint = Literal["completions", "chat"]


_DEFAULT_INPUT_LEN = 256


@dataclass(frozen=True)
class BenchServer:
    """Server to benchmark."""

    named: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="Model to request; of a file or directory here its name.", show_default=False
        ),
    ] = None
    base_url: Annotated[str, option(RUNTIME, "Address of the server, with or without `/v1`.", metavar="URL")] = (
        "http://127.0.0.1:8000"
    )
    model: Annotated[str | None, option(RUNTIME, "The same as `MODEL`, by a flag.", shown="the server's first")] = None
    endpoint: Annotated[Endpoint, option(RUNTIME, "`/v1/completions` or `/v1/chat/completions`.")] = "completions"
    api_key: Annotated[
        str | None,
        option(
            RUNTIME,
            "Key to send; safer in the environment, as SPECDEC_API_KEY or OPENAI_API_KEY, where others cannot see it.",
            envvar=["SPECDEC_API_KEY", "OPENAI_API_KEY"],
            show_envvar=False,
        ),
    ] = None
    timeout: Annotated[float, option(RUNTIME, "Seconds to wait for the next chunk of an answer.", min=0.001)] = 600.0

    @property
    def model_name(self) -> str | None:
        """Name of the model to request; None: the server's first."""
        if self.named is None:
            return self.model
        path = Path(self.named).expanduser()
        return path.resolve().name if path.exists() else self.named

    def check(self) -> None:
        """UsageError for two models, for what is no address, or for no key that a header can hold."""
        if self.named is not None and self.model is not None:
            raise UsageError(f"`{self.named}` and `--model` both name a model: {self.model}", hint="leave one out")
        if not self.base_url.startswith(("http://", "https://")):
            raise UsageError(
                f"`--base-url` is no HTTP address: {self.base_url}", hint="write it as http://127.0.0.1:8000"
            )
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise UsageError("`--api-key` has characters that no header can hold", hint="check what was pasted")


@dataclass(frozen=True)
class BenchPrompts:
    """Prompts to send."""

    dataset: Annotated[
        str | None,
        option(
            INPUT,
            "`demo`, `random` words, a hub id, or a .jsonl, .csv or .parquet file such as Spec-Bench's.",
            shown="demo",
        ),
    ] = None
    input_file: InputFile = None
    num_prompts: Annotated[
        int | None, option(INPUT, "Requests to send.", shown=f"all there are; {DEFAULT_NUM_RANDOM} for `random`", min=1)
    ] = None
    eval_task: Annotated[
        EvalTask | None,
        option(
            INPUT,
            "Task of the dataset, as in `summarize`.",
            shown="question; summarize for `demo`",
            metavar="[summarize|code_completion|question]",
        ),
    ] = None
    dataset_dir: DatasetDir = None
    text_column: Annotated[str | None, option(INPUT, "Column of the prompt.", shown="by the task")] = None
    input_len: Annotated[
        int | None, option(INPUT, "Words of a `random` prompt.", shown=str(_DEFAULT_INPUT_LEN), min=1, max=1_000_000)
    ] = None

    @property
    def paths(self) -> list[Path]:
        """Paths to read."""
        return [path for path in (self.input_file, Path(self.dataset) if self.dataset else None) if path is not None]

    @property
    def source(self) -> str:
        """Source of the prompts, for people and documents."""
        return str(self.input_file) if self.input_file is not None else self.dataset or DEMO

    def check(self) -> None:
        """UsageError for two sources of prompts, or for a flag of another source."""
        if self.input_file is not None and self.dataset is not None:
            raise UsageError(f"both `--dataset` and `--input-file` given: {self.dataset}", hint="pass one of the two")
        of_datasets = {
            "--eval-task": self.eval_task,
            "--dataset-dir": self.dataset_dir,
            "--text-column": self.text_column,
        }
        for flag, value in of_datasets.items():
            if value is not None and (self.input_file is not None or self.dataset == RANDOM):
                raise UsageError(
                    f"`{flag}` is about a dataset, and {self.source} is none: {value}", hint="leave it out"
                )
        if self.input_len is not None and self.dataset != RANDOM:
            raise UsageError(
                f"`--input-len` is for `--dataset random`, and the prompts come from {self.source}: {self.input_len}",
                hint="leave it out",
            )

    def contents(self, endpoint: Endpoint, seed: int) -> list[Content]:
        """The prompts, read or made."""
        if self.dataset == RANDOM:
            num_prompts = self.num_prompts or DEFAULT_NUM_RANDOM
            return random_contents(num_prompts, self.input_len or _DEFAULT_INPUT_LEN, seed)
        if self.input_file is not None:
            return as_many(file_contents(self.input_file, endpoint), self.num_prompts)
        contents = dataset_contents(self.source, self.eval_task, self.dataset_dir, self.text_column, seed)
        return as_many(contents, self.num_prompts)


@dataclass(frozen=True)
class BenchTraffic:
    """Rate and amount of requests."""

    request_rate: Annotated[
        float, option(RUNTIME, "Requests per second, as a Poisson process; `inf` sends them all at once.")
    ] = math.inf
    concurrency: Annotated[int | None, option(RUNTIME, "Limit on requests in flight.", shown="any number", min=1)] = (
        None
    )
    num_warmups: Annotated[int, option(RUNTIME, "Requests before the clock starts.", min=0)] = 1
    output_len: OutputLen = 128
    ignore_eos: Annotated[
        bool,
        option(
            RUNTIME,
            "Have the server generate all `--output-len` tokens, past the end of the answer (vLLM's field "
            "`ignore_eos`).",
            "--ignore-eos",
        ),
    ] = False
    temperature: Annotated[float, option(SAMPLING, "Temperature to request; 0 is greedy.", min=0.0)] = 0.0
    seed: Annotated[
        int, option(RUNTIME, "Seed for arrival times, the order of prompts, and random prompts.", min=0)
    ] = 0
    extra_body: Annotated[
        str | None, option(RUNTIME, 'More fields for every request, such as `{"speculative": false}`.', metavar="JSON")
    ] = None

    def check(self) -> None:
        if not self.request_rate > 0:
            raise UsageError(
                f"`--request-rate` must be more than 0: {self.request_rate}", hint="`inf` sends all requests at once"
            )
        if not math.isfinite(self.temperature):
            raise UsageError(f"`--temperature` is no number: {self.temperature}", hint="0 is greedy")
        assert isinstance(self.extra, dict)

    @property
    def extra(self) -> dict[str, Any]:
        """Additional fields of every request; UsageError for anything but a JSON object."""
        try:
            given = json.loads(self.extra_body) if self.extra_body is not None else {}
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict):
            raise UsageError(
                f"`--extra-body` is no JSON object: {self.extra_body}", hint='{"speculative": false} is one'
            )
        ignore = {"ignore_eos": True} if self.ignore_eos else {}
        return {"temperature": self.temperature, **ignore, **given}


@dataclass(frozen=True)
class BenchResults:
    """Outputs of a benchmark."""

    goodput: Annotated[
        list[str] | None,
        option(
            OUTPUT,
            "Limits that a request must keep to count for goodput: `ttft:200 tpot:50 e2el:2000`, in milliseconds.",
            metavar="METRIC:MS",
        ),
    ] = None
    metric_percentiles: Annotated[str, option(OUTPUT, "Percentiles of each metric.", metavar="P,…")] = "90,95,99"
    report: Annotated[
        Path | None,
        option(OUTPUT, "Write a self-contained page with the numbers, charts and requests.", metavar="FILE.html"),
    ] = None

    def check(self) -> None:
        """UsageError for an objective or a percentile that is none, or a page by another file's name."""
        from runtime.measure.benchmark.results import parse_objectives

        parse_objectives(self.goodput or [])
        assert self.percentiles
        check_report(self.report)

    @property
    def percentiles(self) -> list[float]:
        try:
            values = [float(word) for word in self.metric_percentiles.split(",")]
        except ValueError:
            values = [math.nan]
        if not all(0 <= value <= 100 for value in values):
            raise UsageError(
                f"`--metric-percentiles` is no list of numbers from 0 to 100: {self.metric_percentiles}",
                hint="90,99 is one",
            )
        return values
