"""A dataset's samples as an engine takes them: token ids, in batches."""

from commands.inputs.dataset import EvalTask, Sample, summarization_prompt
from commands.output import warn
from runtime.text import encode
from runtime.tokenizer import Tokenizer


def by_category(samples: list[Sample]) -> list[Sample]:
    """The samples of the category that comes first, then those of the next; otherwise in order."""
    order = {category: i for i, category in enumerate(dict.fromkeys(sample.category for sample in samples))}
    return sorted(samples, key=lambda sample: order[sample.category])


def make_batches(samples: list[Sample], prompts: list[list[int]], batch_size: int) -> list[list[list[int]]]:
    """Prompts answered together; all of one category, because a batch's time cannot be divided between two."""
    batches: list[list[list[int]]] = []
    previous = None
    for sample, prompt in zip(samples, prompts, strict=True):
        if not batches or len(batches[-1]) == batch_size or sample.category != previous:
            batches.append([])
        batches[-1].append(prompt)
        previous = sample.category
    return batches


def encode_samples(
    samples: list[Sample], eval_task: EvalTask, tokenizer: Tokenizer | None, max_input_length: int
) -> list[list[int]]:
    """Token ids of each sample's prompt, cut to their last tokens with a warning."""
    prompts, num_truncated = [], 0
    for sample in samples:
        text = summarization_prompt(sample.text) if eval_task == "summarize" else sample.text
        tokens, truncated = encode(text, tokenizer, max_input_length)
        prompts.append(tokens)
        num_truncated += truncated
    if num_truncated:
        warn(f"prompts cut to their last {max_input_length} tokens: {num_truncated} of {len(prompts)}")
    return prompts
