"""The prompts that `bench` sends: of a dataset, of a file as `run` takes it, or random words."""

import random
import warnings
from pathlib import Path
from typing import Literal

from commands.inputs.dataset import DEMO, Columns, EvalTask, load_samples, summarization_prompt
from commands.inputs.prompts import Prompt, read_prompts
from runtime.errors import SpecDecError, SpecDecWarning

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
