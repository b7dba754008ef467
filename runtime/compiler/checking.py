"""What a compiled step is compared with before an engine is written: transformers, and itself in other company."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel

from runtime.batch import Row, pack
from runtime.compiler.compilation import StepFunction
from runtime.compiler.quantized import without_kernels
from runtime.config import BuildConfig, LayerShape, LogitsCheck
from runtime.errors import SpecDecError
from runtime.kv_cache import KVPool

_NUM_SINGLE = 4  # tokens that are computed one at a time too


def check_logits(
    step: StepFunction, model: PreTrainedModel, layers: tuple[LayerShape, ...], build: BuildConfig, tolerance: float
) -> LogitsCheck:
    """Compare a ragged batch's context step and draft-length step with eager attention over the whole sequences.

    Raises SpecDecError if the largest relative difference of a row of logits exceeds `tolerance`.
    """
    num_context = _check_context_len(layers, build)
    num_generation = min(1 + build.max_draft_len, build.max_request_len - num_context)
    lengths = [(num_context, num_generation), (-(-num_context // 2), -(-num_generation // 2))]
    lengths = lengths[: build.max_batch_size]
    generator = torch.Generator().manual_seed(0)
    rows_tokens = [
        torch.randint(0, model.config.vocab_size, (context + draft,), generator=generator).tolist()
        for context, draft in lengths
    ]
    parameter = next(model.parameters())
    run, tables = _stepping(step, layers, build, [num_context + num_generation] * len(lengths), parameter)
    with torch.inference_mode():  # as an engine does: a compiled step is found again only under the same mode
        zipped = list(zip(rows_tokens, tables, lengths, strict=True))
        ours = [
            run([Row(tokens[:context], 0, table, 1) for tokens, table, (context, _) in zipped]).float(),
            run([Row(tokens[context:], context, table, draft) for tokens, table, (context, draft) in zipped]).float(),
        ]
        with _eager_attention(model), without_kernels(model):
            reference = [
                model(input_ids=torch.tensor([tokens], device=parameter.device), use_cache=False).logits[0].float()
                for tokens in rows_tokens
            ]
    theirs = [
        torch.stack([logits[context - 1] for logits, (context, _) in zip(reference, lengths, strict=True)]),
        torch.cat([logits[context:] for logits, (context, _) in zip(reference, lengths, strict=True)]),
    ]
    difference, scale = torch.cat(ours) - torch.cat(theirs), torch.cat(theirs)
    check = LogitsCheck(
        max_abs_difference=difference.abs().max().item(),
        relative_difference=(difference.norm(dim=-1) / scale.norm(dim=-1)).max().item(),
        tolerance=tolerance,
    )
    if not check.relative_difference <= tolerance:
        raise SpecDecError(
            f"the engine's logits differ from transformers' by more than {tolerance:g} of their norm: "
            f"{check.relative_difference:.2e} (largest difference {check.max_abs_difference:.2e})",
            hint="the model is not computed correctly and no engine was written; please report it",
        )
    return check


def is_batch_invariant(
    step: StepFunction, model: PreTrainedModel, layers: tuple[LayerShape, ...], build: BuildConfig
) -> bool:
    """Whether two sequences' logits are the same bits computed in one step, and each by itself in pieces and tokens.

    A sample: it finds a step whose products or sums depend on its size, and proves nothing.
    """
    longest = min(_check_context_len(layers, build) + _NUM_SINGLE, build.max_request_len)
    lengths = [longest, -(-longest // 2)][: build.max_batch_size]
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, model.config.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    run, tables = _stepping(step, layers, build, lengths, next(model.parameters()))
    num_single = min(_NUM_SINGLE, lengths[-1])
    with torch.inference_mode():
        together = run([Row(tokens, 0, table, num_single) for tokens, table in zip(texts, tables, strict=True)])
        alone = []
        for tokens, table in zip(texts, tables, strict=True):
            ends = sorted({0, (len(tokens) - num_single) // 3, *range(len(tokens) - num_single, len(tokens) + 1)})
            pieces = [run([Row(tokens[start:end], start, table, 1)]) for start, end in pairwise(ends)]
            alone += pieces[-num_single:]
    return torch.equal(together, torch.cat(alone))


def _stepping(
    step: StepFunction, layers: tuple[LayerShape, ...], build: BuildConfig, lengths: list[int], like: Tensor
) -> tuple[Callable[[list[Row]], Tensor], list[list[int]]]:
    """The step as a function of rows, over a pool of its own, and block tables for sequences of these lengths."""
    block_size = build.tokens_per_block
    num_blocks = [-(-length // block_size) for length in lengths]
    ends = list(accumulate(num_blocks, initial=1))
    pool = KVPool(layers, ends[-1], block_size, like.dtype, like.device)

    def run(rows: list[Row]) -> Tensor:
        return step(*pack(rows, block_size, like.device).tensors(), pool.keys, pool.values)

    return run, [list(range(start, end)) for start, end in pairwise(ends)]


def _check_context_len(layers: tuple[LayerShape, ...], build: BuildConfig) -> int:
    """Long enough for several blocks, and to pass a sliding window where that is affordable; a draft fits after it."""
    windows = [layer.sliding_window for layer in layers if layer.sliding_window is not None]
    wanted = max([2 * build.tokens_per_block + 7] + [window + 9 for window in windows if window <= 1024])
    return max(1, min(wanted, build.max_input_len, build.max_request_len - 1 - build.max_draft_len))


@contextmanager
def _eager_attention(model: PreTrainedModel) -> Iterator[None]:
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(ours)
