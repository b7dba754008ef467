"""Checks of a compiled step before an engine is written: against transformers, and against itself in other batches."""

import copy
import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from runtime.builder.reference import (
    QUANTIZED_KV,
    Choices,
    QuantizeKV,
    Stored,
    WideProducts,
    has_slow_products,
    near_ties,
)
from runtime.checkpoint.config import LogitsCheck, StepShape
from runtime.compiler.package import StepFunction, logits_of
from runtime.core.batch import Row, pack
from runtime.core.kv_cache import KVPool, kv_dtype
from runtime.core.states import CHUNK_SIZE, num_rolled_back, state_inputs, state_pools
from runtime.model.pretrained import layers_that_keep
from runtime.model.quantized import QuantizedExperts, QuantizedLinear, quantized_layers, without_kernels
from runtime.model.weights import layer_by_layer, present, tensors_of
from runtime.util.errors import SpecDecError
from runtime.util.locks import quiet_transformers

TOLERANCE_OF_8_BITS = 0.2
"""Tolerance of logits if layers quantize their inputs to 8 bits; relative, like all tolerances here."""
_NUM_SINGLE = 4  # tokens that are computed one at a time too
_Sequence = tuple[list[int], tuple[int, int], QuantizeKV | None]


@dataclass(frozen=True)
class _Judge:
    """The same weights computed with more bits. They decide whose logits are closer, ours or transformers', since
    transformers' own are rounded.

    A correct step may be as far from these logits as transformers is, since it rounds other sums. A wrong step is
    farther: unrelated rows differ by 1.4.
    """

    dtype: torch.dtype
    more_rounding: float  # than transformers'
    most_rounding: float
    most_by_ties: float
    """Limit like `most_rounding` for three quarters of a mixture's rows: near ties may be decided otherwise."""
    of_rows: float = 1.0
    """Share of the rows that must be within the limit: the nearest rows."""
    farthest_row: float = math.inf

    def allows(self, ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
        """True if each row's distance from the logits with more bits is acceptable beside transformers' distance."""
        held = math.ceil(self.of_rows * len(theirs)) - 1
        limit = max(tolerance, min(self.more_rounding * theirs.sort().values[held].item(), self.most_rounding))
        return ours.sort().values[held].item() <= limit and ours.max().item() <= self.farthest_row

    def allows_beside_ties(self, ours: Tensor, moved: Tensor, tolerance: float) -> bool:
        """True if the distances are acceptable for a mixture of experts, where rows move by `moved` if near ties
        between experts are decided otherwise.

        Which ties a step decides otherwise is chance. Half of the rows must be within the usual limits, three quarters
        within `most_by_ties`, and the farthest row may be as far as unrelated rows.
        """
        farthest = max(_FARTHEST_ROW, moved.max().item() + self.most_rounding)
        half = replace(self, of_rows=min(self.of_rows, 0.5), farthest_row=farthest)
        most = replace(self, of_rows=min(self.of_rows, 0.75), most_rounding=self.most_by_ties)
        return half.allows(ours, moved, tolerance) and most.allows(ours, moved, tolerance)


_FARTHEST_ROW = 1.0
_JUDGE_16_BITS = _Judge(torch.float32, more_rounding=1.5, most_rounding=0.3, most_by_ties=0.7)
# A model that amplifies float32's rounding of 6e-8 to 1e-4 does so in few directions. Two ways to round may differ by
# more in these directions, hence the factor of 4.
_JUDGE_32_BITS = _Judge(torch.float64, more_rounding=4, most_rounding=1e-2, most_by_ties=1e-2)
# Inputs in 8 bits: a few rows are several times as far as most rows, in transformers' logits as often as in ours (the
# int4 copy of Gemma 3 270M: most rows by 0.07, one in a hundred by more than 0.3). So half of the rows decide.
_JUDGE_8_BITS = _Judge(
    torch.float32, more_rounding=1.5, most_rounding=0.3, most_by_ties=0.3, of_rows=0.5, farthest_row=_FARTHEST_ROW
)


@dataclass(frozen=True)
class Sample:
    """One or two texts of different lengths to check a step with: a context step, then a step with drafts."""

    shape: StepShape
    device: torch.device
    texts: list[list[int]]
    lengths: list[tuple[int, int]]
    """Numbers of tokens of context and of draft, for each text."""


def sample_for(model: PreTrainedModel, shape: StepShape) -> Sample:
    """The sample for a model and a shape; it is the same each time."""
    build = shape.build_config
    num_context = _check_context_len(shape)
    num_generation = min(1 + build.max_draft_len, build.max_request_len - num_context)
    lengths = [(num_context, num_generation), (-(-num_context // 2), -(-num_generation // 2))]
    lengths = lengths[: build.max_batch_size]
    generator = torch.Generator().manual_seed(0)
    texts = [_text(model, context + draft, generator) for context, draft in lengths]
    return Sample(shape, next(model.parameters()).device, texts, lengths)


@dataclass(frozen=True)
class Computed:
    """A step's logits for a sample."""

    step: StepFunction
    sample: Sample
    tables: list[list[int]]
    pool: KVPool
    contexts: Tensor
    """Logits of the last token of each context, [texts, vocab]."""
    drafts: Tensor
    """Logits of the drafts' tokens, [tokens, vocab]."""


def compute(step: StepFunction, sample: Sample) -> Computed:
    """Compute the logits by which a step is checked."""
    longest = max(context + draft for context, draft in sample.lengths)
    run, tables, pool = _stepping(step, sample.shape, [longest] * len(sample.lengths), sample.device)
    zipped = list(zip(sample.texts, tables, sample.lengths, strict=True))
    with torch.inference_mode():  # as an engine does: a compiled step is found again only under the same mode
        contexts = run([Row(tokens[:context], 0, table, 1) for tokens, table, (context, _) in zipped])
        drafts = run([Row(tokens[context:], context, table, draft) for tokens, table, (context, draft) in zipped])
    return Computed(step, sample, tables, pool, contexts, drafts)


def _reference(
    sample: Sample,
    model: PreTrainedModel,
    product_tolerance: float,
    have: Callable[..., AbstractContextManager[None]],
    kv: Seq[QuantizeKV | None],
) -> tuple[Tensor, Choices]:
    """transformers' logits float32 [rows, vocab], by eager attention over whole sequences, and the scores by which a
    mixture's routers chose experts. The rows are the last tokens of all contexts, then all tokens of drafts.

    Quantized keys and values are read from `kv`, which has the engine's own. `have` loads the weights of a layer.
    Raises SpecDecError for logits that are NaN or infinite, and if a quantized layer's product by its kernel differs
    from torch's by more than `product_tolerance`, relatively.
    """
    dtype = next(model.parameters()).dtype
    wide = WideProducts() if has_slow_products(dtype, sample.device) else nullcontext()
    with (
        torch.inference_mode(),
        _reference_attention(model, sample.shape),
        layer_by_layer(model, have),
        _products_checked(model, product_tolerance),
        wide,
        Choices() as choices,
    ):
        logits = _reference_logits(model, _sequences(sample, kv))
    if not logits.isfinite().all():
        raise SpecDecError(
            f"the model's logits are NaN or infinite in {sample.shape.dtype}, also where transformers computes them",
            hint="convert it to another dtype, or correct its weights",
        )
    return logits, choices


def _sequences(sample: Sample, kv: Seq[QuantizeKV | None]) -> list[_Sequence]:
    return list(zip(sample.texts, sample.lengths, kv or [None for _ in sample.texts], strict=True))


def check_logits(
    ours: Computed,
    model: PreTrainedModel,
    tolerance: float,
    product_tolerance: float,
    have: Callable[..., AbstractContextManager[None]] = present,
) -> LogitsCheck:
    """Compare a step's logits with transformers'.

    Raises SpecDecError if the largest relative difference of a row exceeds `tolerance` and more bits of the same
    weights (float32 for models of 16 bits, float64 for float32) confirm it: measured from those logits, the engine's
    row must not be much farther than transformers' row. For a mixture it may also be as far as the row moves when near
    ties of the router are decided otherwise.
    """
    sample, logits = ours.sample, torch.cat([ours.contexts, ours.drafts]).float()
    dtype, kv = next(model.parameters()).dtype, list[QuantizeKV | None]()
    if sample.shape.kv_cache is not None:
        kv = [Stored(ours.pool, table, tolerance) for table in ours.tables]
    theirs, choices = _reference(sample, model, product_tolerance, have, kv)
    check = _compare(logits, theirs, tolerance)
    if check.relative_difference <= tolerance:
        return check
    said = (
        f"the engine's logits differ from transformers' by more than {tolerance:g} of their norm: "
        f"{check.relative_difference:.2e} (largest difference {check.max_abs_difference:.2e})"
    )
    judge, sequences = _judge(dtype, tolerance), _sequences(sample, kv)
    ties = ""
    with torch.inference_mode(), _reference_attention(model, sample.shape), without_kernels(model):
        with Choices() as unrounded:
            exact = _logits_in(judge.dtype, model, sequences)
        distances = [_distances(one, exact) for one in (logits, theirs)]
        both = [rows.max().item() for rows in distances]
        is_right = judge.allows(distances[0], distances[1], tolerance)
        if not is_right and unrounded.scores:
            margins = near_ties(choices, unrounded)
            moved = _moved_by_ties(judge.dtype, model, sequences, margins, exact)
            ties = f", and near ties between experts that are decided otherwise by up to {moved.max().item():.2e}"
            if moved.max().item() > tolerance:
                is_right = judge.allows_beside_ties(distances[0], torch.maximum(moved, distances[1]), tolerance)
    if is_right:
        return _with_distances(check, judge.dtype, both)
    said += (
        f"; from {str(judge.dtype).removeprefix('torch.')} of the same weights they differ by "
        f"{both[0]:.2e}, transformers' by {both[1]:.2e}{ties}"
    )
    raise SpecDecError(said, hint="the model is not computed correctly and no engine was written; please report it")


def _moved_by_ties(
    dtype: torch.dtype, model: PreTrainedModel, sequences: Seq[_Sequence], margins: Seq[float], exact: Tensor
) -> Tensor:
    """Largest distance [rows], for each row, of a mixture's logits in `dtype` from `exact`, if near ties between
    experts are decided otherwise: all ties, or the ties of every other token.
    """
    found = []
    for every, turn in ((1, 0), (2, 0), (2, 1)):
        with Choices(margins, every, turn):
            found.append(_distances(_logits_in(dtype, model, sequences), exact).nan_to_num(0))
    return torch.stack(found).amax(0)


def _judge(dtype: torch.dtype, tolerance: float) -> _Judge:
    usual = _JUDGE_32_BITS if dtype == torch.float32 else _JUDGE_16_BITS
    return replace(_JUDGE_8_BITS, dtype=usual.dtype) if tolerance >= TOLERANCE_OF_8_BITS else usual


def _text(model: PreTrainedModel, length: int, generator: torch.Generator) -> list[int]:
    """Random tokens after the token that begins a text.

    Models put attention that is needed nowhere on that first token. Without it, another token takes its place, and
    rounding decides which: Gemma 3 270M with int8 K/V then differs from itself by a fifth.
    """
    tokens: list[int] = torch.randint(0, model.config.vocab_size, (length,), generator=generator).tolist()
    first = getattr(model.config, "bos_token_id", None)
    return tokens if first is None or not 0 <= first < model.config.vocab_size else [first, *tokens[1:]]


def _with_distances(check: LogitsCheck, dtype: torch.dtype, both: Seq[float]) -> LogitsCheck:
    if dtype == torch.float64:
        return replace(check, from_float64=both[0], transformers_from_float64=both[1])
    return replace(check, from_float32=both[0], transformers_from_float32=both[1])


def _logits_in(dtype: torch.dtype, model: PreTrainedModel, sequences: Seq[_Sequence]) -> Tensor:
    """transformers' logits from the same weights with more bits, computed layer by layer."""
    copied = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    copied.set_experts_implementation("eager")  # torch's grouped products have no float64
    with (
        _WidenFloat32() if dtype == torch.float64 else nullcontext(),
        layer_by_layer(copied, partial(_in_dtype, dtype)),
        # Mamba's models convert to the output layer's dtype before they call it.
        nullcontext() if layers_that_keep(model.config)[0] else _in_dtype(dtype, copied.get_output_embeddings()),  # type: ignore[no-untyped-call]
    ):
        return _reference_logits(copied, sequences)


@contextmanager
def _in_dtype(dtype: torch.dtype, *those: nn.Module | Tensor) -> Iterator[None]:
    """Give float tensors another dtype within the block. 8-bit weights keep theirs: their layers widen them."""
    with present(*those):
        before = [(one, one.data) for one in tensors_of(those) if one.is_floating_point() and one.element_size() > 1]
        try:
            for tensor, data in before:
                tensor.data = data.to(dtype)
            yield
        finally:
            for tensor, data in before:
                tensor.data = data


class _WidenFloat32(TorchFunctionMode):
    """Uses float64 where transformers asks for float32 by name, as in norms, ropes and softmax."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.float:
            return args[0].double()
        named = {name: _widen(value) for name, value in (kwargs or {}).items()}
        return function(*map(_widen, args), **named)


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _reference_logits(model: PreTrainedModel, sequences: Seq[_Sequence]) -> Tensor:
    """transformers' logits [rows, vocab], float32 or wider: of the last token of each sequence's context, then of the
    tokens of all drafts.

    Sequences are padded at the end and computed together, which dequantizes weights once; no token sees the padding.
    With quantized keys and values, each sequence is computed alone.
    """
    longest = max(len(tokens) for tokens, _, _ in sequences)
    wanted = [range(context - 1, len(tokens)) for tokens, (context, _), _ in sequences]
    if all(quantize_kv is None for _, _, quantize_kv in sequences):
        rows = [tokens + tokens[-1:] * (longest - len(tokens)) for tokens, _, _ in sequences]
        kept = torch.tensor(sorted({*chain(*wanted)}), device=model.device)  # of all rows
        ids = torch.tensor(rows, device=model.device)
        all_logits = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits
        found = [
            logits[torch.isin(kept, torch.tensor(one, device=model.device))]
            for logits, one in zip(all_logits, wanted, strict=True)
        ]
    else:
        found = [
            model(
                input_ids=torch.tensor([tokens], device=model.device),
                use_cache=False,
                logits_to_keep=torch.tensor(one, device=model.device),
                quantize_kv=quantize_kv,
            ).logits[0]
            for (tokens, _, quantize_kv), one in zip(sequences, wanted, strict=True)
        ]
    contexts, drafts = [logits[:1].float() for logits in found], [logits[1:].float() for logits in found]
    return torch.cat(contexts + drafts)


def _compare(ours: Tensor, theirs: Tensor, tolerance: float) -> LogitsCheck:
    return LogitsCheck((ours - theirs).abs().max().item(), _distances(ours, theirs).max().item(), tolerance)


def _distances(ours: Tensor, theirs: Tensor) -> Tensor:
    """Norm of the difference over the norm of `theirs`, for each row."""
    distances: Tensor = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    return distances


@contextmanager
def _products_checked(model: PreTrainedModel, tolerance: float) -> Iterator[None]:
    """Compute quantized layers by torch within the block, and compare each one's product with its kernel's.

    Each product is compared once, for a few tokens appended to the layer's input, because dequantizing the weight takes
    longer than both products; experts are compared alone, since transformers looks their weights up. Raises
    SpecDecError if the norm of a difference exceeds `tolerance` of the product's norm.
    """
    generator = torch.Generator().manual_seed(2)
    dtype = next(model.parameters()).dtype
    layers = []
    for layer in quantized_layers(model):
        if isinstance(layer, QuantizedExperts) and layer.with_kernels:
            more = torch.randn(_NUM_SINGLE, layer.in_features, generator=generator).to(dtype)
            chosen = torch.randint(0, layer.num_experts, (_NUM_SINGLE,), generator=generator)
            with present(layer):
                _check_product(layer(more, chosen), layer.by_torch(more, chosen), tolerance)
        elif isinstance(layer, QuantizedLinear) and layer.with_kernels:
            layers.append(layer)

    def checked(layer: QuantizedLinear, x: Tensor) -> Tensor:
        del layer.forward
        more = torch.randn(_NUM_SINGLE, layer.in_features, generator=generator).to(dtype)
        outputs: Tensor = layer(torch.cat([x.flatten(0, -2), more]))
        _compare_products(layer, more, outputs[-_NUM_SINGLE:], tolerance)
        return outputs[:-_NUM_SINGLE].view(*x.shape[:-1], layer.out_features)

    for layer in layers:
        layer.forward = partial(checked, layer)  # type: ignore[method-assign]
    try:
        with without_kernels(model):
            yield
            for layer in layers:
                if "forward" in vars(layer):  # an expert that got no token
                    with present(layer):
                        layer(torch.empty(0, layer.in_features, dtype=dtype))
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _compare_products(layer: QuantizedLinear, x: Tensor, by_torch: Tensor, tolerance: float) -> None:
    layer.with_kernels = True
    try:
        ours = layer(x)
    finally:
        layer.with_kernels = False
    _check_product(ours, by_torch, tolerance)


def _check_product(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    ours, theirs = ours.float(), theirs.float()
    difference = ((ours - theirs).norm() / theirs.norm().clamp(min=torch.finfo(torch.float32).tiny)).item()
    if not difference <= tolerance:
        raise SpecDecError(
            f"a quantized layer's product differs from torch's by more than {tolerance:g} of its norm: "
            f"{difference:.2e}",
            hint="the model is not computed correctly and no engine was written; please report it",
        )


def is_batch_invariant(together: Computed) -> bool:
    """True if the logits of texts are bitwise the same whether they are computed alone, in a batch, in chunks or token
    by token. It is a sample: it finds a step whose sums depend on the batch's size, but proves nothing.
    """
    sample = together.sample
    lengths = [context + draft for context, draft in sample.lengths]
    run, tables, _ = _stepping(together.step, sample.shape, lengths, sample.device)
    (context, draft), *others = sample.lengths
    ends = sorted({0, context // 3, *range(context - 1, context + min(draft, _NUM_SINGLE) + 1)})
    with torch.inference_mode():
        pieces = [run([Row(sample.texts[0][a:b], a, tables[0], 1)]) for a, b in pairwise(ends)]
        drafts = torch.split(together.drafts, [draft for _, draft in sample.lengths])
        num_singles = min(draft, _NUM_SINGLE)
        alone, same = pieces[-1 - num_singles :], [together.contexts[:1], drafts[0][:num_singles]]
        for i, (_, draft) in enumerate(others, 1):
            alone.append(run([Row(sample.texts[i], 0, tables[i], 1 + draft)]))
            same += [together.contexts[i : i + 1], drafts[i]]
    return torch.equal(torch.cat(alone), torch.cat(same))


def _stepping(
    step: StepFunction, shape: StepShape, lengths: list[int], device: torch.device
) -> tuple[Callable[[list[Row]], Tensor], list[list[int]], KVPool]:
    """The step as a function of rows, block tables for sequences of these lengths, and the K/V pool."""
    block_size = shape.build_config.tokens_per_block
    num_blocks = [-(-length // block_size) for length in lengths]
    ends = list(accumulate(num_blocks, initial=1))
    pool = KVPool(shape.layers, ends[-1], block_size, kv_dtype(shape.dtype, shape.kv_cache), device)
    tables = [list(range(start, end)) for start, end in pairwise(ends)]
    num_back = num_rolled_back(shape.build_config.max_draft_len)
    states = state_pools(shape.states, 1 + len(tables), num_back, getattr(torch, shape.dtype), device)

    def run(rows: list[Row]) -> Tensor:
        rows = [replace(row, state_slot=1 + tables.index(row.block_table)) for row in rows]
        inputs = *pack(rows, block_size, device), *pool.tensors, *state_inputs(rows, states)
        return logits_of(step(*inputs))

    return run, tables, pool


def _check_context_len(shape: StepShape) -> int:
    """Context length for the check: more than two blocks and chunks of states, and beyond sliding windows of up to
    1,024 tokens, as far as the engine's lengths leave room for a draft.
    """
    build = shape.build_config
    windows = [window for layer in shape.layers if (window := layer.sliding_window or layer.attention_chunk_size)]
    least = max(build.tokens_per_block, CHUNK_SIZE if shape.states else 0)
    wanted = max([2 * least + 7] + [window + 9 for window in windows if window <= 1024])
    return max(1, min(wanted, build.max_input_len, build.max_request_len - 1 - build.max_draft_len))


@contextmanager
def _reference_attention(model: PreTrainedModel, shape: StepShape) -> Iterator[None]:
    ours = model.config._attn_implementation
    with quiet_transformers():  # it warns of models without such an attention
        model.set_attn_implementation("eager" if shape.kv_cache is None else QUANTIZED_KV)
    try:
        with quiet_transformers():
            yield
    finally:
        with quiet_transformers():
            model.set_attn_implementation(ours)
