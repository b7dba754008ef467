"""The flags of generation that `run` and `summarize` share."""

from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from commands.options.panels import RUNTIME
from commands.options.sampling import SamplingOptions
from commands.options.single import EndId, MaxNumTokens, end_id_params
from runtime.errors import UsageError
from runtime.params import SamplingParams


@dataclass(frozen=True)
class GenerationOptions:
    """How tokens are chosen and what ends an output; beams and Python sessions are TensorRT-LLM's, and refused."""

    end_id: EndId = None
    stop_words: Annotated[
        list[str] | None,
        typer.Option(help="Text that ends an output; repeatable.", rich_help_panel=RUNTIME, show_default="none"),
    ] = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    max_num_tokens: MaxNumTokens = None
    num_beams: Annotated[int, typer.Option(hidden=True)] = 1
    use_py_session: Annotated[bool, typer.Option("--use-py-session", hidden=True)] = False

    def check(self) -> None:
        """UsageError for what specdec cannot do."""
        if self.num_beams != 1:
            raise UsageError(f"beam search is not supported: `--num-beams {self.num_beams}`", hint="leave the flag out")
        if self.use_py_session:
            raise UsageError("there is no Python session to choose: `--use-py-session`", hint="leave the flag out")

    def params(self, **others: Any) -> SamplingParams:
        """How to answer a prompt; `others` are the command's. UsageError for a value that is out of range."""
        return self.sampling.params(stop=self.stop_words, **end_id_params(self.end_id), **others)
