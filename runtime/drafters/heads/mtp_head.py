"""MTP heads: the layers in a model's own files that predict the token after the next, and the names of their weights.

Each family names these weights in its own way. `_name_in_mtp` maps the names in one place, for loading and for writing
a trained head: a tensor is written under the name from which it was read.
"""

import copy
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from runtime.checkpoint.config import LayerShape
from runtime.checkpoint.quant.formats import find_layers, format_of, without_quantization
from runtime.checkpoint.quant.planning import PrequantizedLayer, load_numbers
from runtime.checkpoint.source import SourceTensor, load_tensors, read_tensors
from runtime.core.batch import Batch
from runtime.core.kv_cache import KVPool
from runtime.drafters.heads.head_config import HeadConfig, check_weights, lacks_weights, num_layers_of
from runtime.drafters.heads.mtp_families import (
    BEFORE_LAYER,
    NAMES_IN_FILES,
    STATE_FIRST,
    WITHOUT_NORM,
    MtpFamily,
    mtp_family,
)
from runtime.drafters.heads.paged_head import HEAD, PagedHead, PagedPairs, for_kernels, paged_pairs
from runtime.engine.draft_vocab import among_all
from runtime.model.attention import PAGED
from runtime.model.model import (
    ModelKind,
    Step,
    dtypes_of_weights,
    missing_weights,
    model_of_weights,
    own_names,
    parameter_shapes,
    probe_config,
)
from runtime.model.pretrained import parse_pretrained_config
from runtime.model.read_model import read_numbers
from runtime.util.errors import SpecDecError
from runtime.util.files import read_json


class MtpHead(PagedHead):
    """A head with one layer of the target's own kind, whose input is a projection of the embedding together with the
    last hidden state.

    `model` is a model with that one layer, the target's embeddings and output layer, and the head's own norm; `parts`
    are the weights before the layer. As in transformers' `MtpLayer` and vLLM, it reads the target's hidden states after
    the target's norm, and within a draft its own outputs after its own norm.
    """

    uses_kernels = reads_target = False
    attention, first_token, keeps_outputs, drafts_at_once, longest_draft = HEAD, 1, False, False, None
    draft_ids: Tensor | None
    depth = 0
    """Number of the layer in the head, from 0."""

    def __init__(
        self,
        config: HeadConfig,
        model: PreTrainedModel,
        parts: dict[str, Tensor],
        name_in_file: Callable[[str], str],
        *,
        has_norm: bool = True,
    ) -> None:
        super().__init__()
        self.config, self.step = config, Step(model)
        self.register_buffer("draft_ids", None, persistent=False)
        self._shapes = probe_config(model.config).layers
        decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
        self.decoder = decoder
        last = next(name for name in ("norm", "norm_f") if hasattr(decoder, name))
        norms = (copy.deepcopy(getattr(decoder, last)) for _ in range(2))
        self.enorm, self.hnorm = norms
        if not has_norm:
            setattr(decoder, last, nn.Identity())
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        wanted = {name: one for name, one in self.named_parameters() if name.split(".")[0] in BEFORE_LAYER}
        check_weights(config, shapes_of(wanted), shapes_of(parts), name_in_file)
        self.load_state_dict(parts, assign=True, strict=False)

    def pages(self, batch: Batch, pool: KVPool) -> PagedPairs:
        return paged_pairs(batch, pool, tuple(one.layer for one in self._shapes), self.depth)

    def outputs_at(self, ids: Tensor, states: Tensor, positions: Tensor, **attention: Any) -> Tensor:
        embedded = self.decoder.get_input_embeddings()(ids)
        pairs = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(states)], -1))
        output = self.decoder(inputs_embeds=pairs, position_ids=positions, use_cache=False, **attention)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def logits(self, outputs: Tensor, num_drafted: int = 0) -> Tensor:
        return among_all(self.own_logits(outputs), self.draft_ids, self.config.vocab_size)

    def own_logits(self, outputs: Tensor) -> Tensor:
        """Logits [..., vocabulary] from outputs [..., hidden]."""
        logits: Tensor = self.step.model.get_output_embeddings()(outputs)  # type: ignore[no-untyped-call]
        return logits

    @property
    def kv_layers(self) -> tuple[LayerShape, ...]:
        return for_kernels(self._shapes) if self.uses_kernels else self._shapes


class ChainedMtp(nn.Module):
    """Several MTP layers in a row: the first layer drafts the first token of a draft, the second layer the second
    token, and so on.

    For token j, layer k reads the embedding of token j and the output of layer k - 1 for token j - 1; layer 1 reads the
    target's hidden state of token j - 1. So layer k begins at position k, counted from 0. It works as transformers'
    `MtpModel`.

    The state of a token is its hidden state, followed by the outputs of all layers but the last. Draft tokens have no
    hidden state; there the last layer's output takes its place.
    """

    uses_kernels = reads_target = False
    attention, first_token, keeps_outputs, drafts_at_once = HEAD, 1, True, False
    draft_ids: Tensor | None
    longest_draft: int | None

    def __init__(self, heads: Seq[MtpHead]) -> None:
        super().__init__()
        self.config, self.longest_draft = heads[0].config, len(heads)
        self.heads: Any = nn.ModuleList(heads)
        self.register_buffer("draft_ids", None, persistent=False)
        for depth, head in enumerate(heads):
            head.depth = depth
            if depth > 0:
                head.step.model.set_output_embeddings(nn.Identity())  # type: ignore[no-untyped-call]

    @property
    def step(self) -> Step:
        """The model that has the output layer."""
        found: Step = self.heads[0].step
        return found

    @property
    def state_size(self) -> int:
        return len(self.heads) * self.config.hidden_size

    @property
    def kv_layers(self) -> tuple[LayerShape, ...]:
        shapes = tuple(shape for head in self.heads for shape in head._shapes)
        return for_kernels(shapes) if self.uses_kernels else shapes

    def reduce(self, states: Tensor) -> Tensor:
        return states

    def forward(self, batch: Batch, states: Tensor, pool: KVPool, num_drafted: int = 0) -> Tensor:
        (B, Q), before = batch.input_ids.shape, list(states.chunk(len(self.heads), -1))
        outputs = [*before[1:], before[0]]
        for depth, head in enumerate(self.heads):
            if depth < num_drafted:
                continue  # it has drafted, and its outputs for these tokens are not read again
            if depth > num_drafted and Q > 1:
                below = outputs[depth - 1].view(B, Q, -1)[:, :-1]
                before[depth] = torch.cat([before[depth].view(B, Q, -1)[:, :1], below], 1).flatten(0, 1)
            is_there = (batch.positions > depth).view(-1, 1)
            outputs[depth] = head(batch, before[depth].where(is_there, 0), pool)
        return torch.cat([outputs[-1], *outputs[:-1]], -1)

    def own_logits(self, outputs: Tensor) -> Tensor:
        """Logits [..., vocabulary] from outputs [..., hidden] of one layer."""
        logits: Tensor = self.heads[0].own_logits(outputs)
        return logits

    def logits(self, outputs: Tensor, num_drafted: int = 0) -> Tensor:
        parts = outputs.chunk(len(self.heads), -1)
        drafted: Tensor = self.heads[0].logits(parts[(num_drafted + 1) % len(parts)])
        return among_all(drafted, self.draft_ids, self.config.vocab_size)


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(one.shape) for name, one in tensors.items()}


_MAKE_EAGLE = "leave the head out, and an EAGLE-3 head is made"
_NOT_LEARNED = ("e_score_correction_bias", "expert_bias")
_COPIES = ("embed_tokens.", "shared_head.head.")
"""Names of weights beside the layer that are copies of the target's."""
_OF_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
_NUM_COMPARED, _LEAST_LIKENESS = 16, 0.8


@dataclass(frozen=True)
class _OwnLayer:
    """One MTP layer in the model's files, with weights named as in a model of that layer alone."""

    config: HeadConfig
    depth: int
    entries: dict[str, SourceTensor]
    one_layer: PreTrainedConfig

    @property
    def has_norm(self) -> bool:
        """False for Ernie's heads, in which no norm follows the layer."""
        return not any(one.name.startswith(WITHOUT_NORM) for one in self.entries.values())

    @property
    def reads_state_first(self) -> bool:
        return any(one.name.startswith(STATE_FIRST) for one in self.entries.values())

    def name_in_file(self, name: str) -> str | None:
        """The checkpoint's name for a weight; for a quantized weight, the name that it would have unquantized; None if
        the checkpoint lacks the weight.
        """
        if name in self.entries:
            return self.entries[name].name
        stem = name.removesuffix("weight")
        part = next((own for own in self.entries if own.startswith(stem)), None)
        if part is None:
            return None
        return self.entries[part].name.removesuffix(part.removeprefix(stem)) + name.removeprefix(stem)

    def would_be(self, name: str) -> str:
        """The name that the checkpoint would use for a weight that it lacks."""
        if _family(self.config).lists_its_blocks:
            last = len(self.one_layer.layer_types) - 1
            own = name.replace("model.norm_f.", f"model.layers.{last}.final_layernorm.")
            is_inside = own.startswith("model.layers.")
            return f"mtp.layers.{own.removeprefix('model.layers.') if is_inside else f'0.{own}'}"
        names = [one.name for one in self.entries.values()]
        for table in NAMES_IN_FILES:
            prefixes = {theirs.replace(".N.", f".{self.depth}."): ours for theirs, ours in table.items()}
            if any(one.startswith(tuple(prefixes)) for one in names):
                found = (theirs + name.removeprefix(ours) for theirs, ours in prefixes.items() if name.startswith(ours))
                return next(found, name)
        own = name.replace("model.norm.", "shared_head.norm.").removeprefix("model.layers.0.")
        return f"model.layers.{num_layers_of(self.config.layers) + self.depth}.{own}"

    def check_experts(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """SpecDecError if an expert's tensor is missing. `shapes` are the shapes of weights in a model, where a weight
        [experts, ...] has the numbers of all experts.
        """
        parts: dict[tuple[str, str], SourceTensor] = {}
        for name, entry in self.entries.items():
            if (found := _OF_EXPERT.fullmatch(name)) is not None:
                parts[found[1], found[3]] = entry
        missing = []
        for (experts, part), entry in parts.items():
            joined = (shape[0] for name, shape in shapes.items() if name.startswith(experts) and len(shape) == 3)
            for number in range(next(joined, 0)):
                if f"{experts}{number}{part}" not in self.entries:
                    missing.append(re.sub(r"(\.experts\.)\d+", rf"\g<1>{number}", entry.name))
        if missing:
            raise lacks_weights(self.config, missing)

    def as_in_file(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights under the checkpoint's names; SpecDecError if it lacks a weight or has it in another shape."""
        found = dict[str, Tensor]()
        for own, weight in weights.items():
            name, entry = self.name_in_file(own), self.entries.get(own)
            if name is None or (entry is not None and entry.is_float and entry.shape != weight.shape):
                raise SpecDecError(
                    f"an MTP head cannot be trained whose weights have another form in the model's files, {own}: "
                    f"{self.config.directory}",
                    hint=_MAKE_EAGLE,
                )
            is_swapped = own == "eh_proj.weight" and self.reads_state_first
            found[name] = _swapped(weight) if is_swapped else weight
        return found


def _own_layers(config: HeadConfig) -> list[_OwnLayer]:
    """The head's layers; SpecDecError if the files have fewer layers than the config states."""
    entries, layers = read_tensors(config.directory), []
    for depth in range(config.num_layers):
        number = num_layers_of(config.layers) + depth
        own = {name: one for one in entries if (name := _name_in_mtp(one.name, number, depth)) is not None}
        if not own:
            which = "no MTP head" if depth == 0 else f"{depth} MTP layers and not {config.num_layers}"
            raise SpecDecError(
                f"the model's weights have {which}, as its config.json says: {config.directory}",
                hint="repackaged models often leave the MTP head out; take the original model",
            )
        layers.append(_OwnLayer(config, depth, own, _config_of_one_layer(config, own)))
    return layers


DtypeOf = Callable[[str], torch.dtype]
"""Function (a weight's name) -> its dtype."""
Read = Callable[[dict[str, SourceTensor], HeadConfig, DtypeOf, Mapping[str, tuple[int, ...]]], dict[str, Tensor]]
"""Type of `_numbers`, and of functions that replace it."""


def load_mtp(
    config: HeadConfig, target_embedding: Tensor | None, dtype: torch.dtype, read: Read | None = None
) -> MtpHead | ChainedMtp:
    """Load the head's layers; `target_embedding` [vocab, hidden] is taken instead of the embeddings in the model's
    files. SpecDecError if weights are missing, or belong to another target.
    """
    read = read or _numbers
    layers, embeddings = _own_layers(config), embeddings_of(config)
    shared = shared_with_target(read_tensors(config.directory), embeddings)
    if target_embedding is not None:
        shared.pop(embeddings, None)
    shapes = [parameter_shapes(layer.one_layer) for layer in layers]
    for layer, of_layer in zip(layers, shapes, strict=True):
        layer.check_experts(of_layer)
    dtypes = [dtypes_of_weights(layer.one_layer, dtype) for layer in layers]
    known = read(shared, config, dtypes[0], shapes[0])
    if target_embedding is not None:
        _check_likeness(
            config, {(embeddings, tuple(target_embedding.shape)): _some_rows(target_embedding)}, "the target"
        )
        known[embeddings] = target_embedding
    known.setdefault("lm_head.weight", known[embeddings].to(dtypes[0]("lm_head.weight")))
    heads = [
        _mtp_layer(layer, dtype, read(layer.entries, config, dtype_of, of_layer) | known)
        for layer, dtype_of, of_layer in zip(layers, dtypes, shapes, strict=True)
    ]
    return heads[0] if len(heads) == 1 else ChainedMtp(heads)


def _mtp_layer(layer: _OwnLayer, dtype: torch.dtype, tensors: dict[str, Tensor]) -> MtpHead:
    config = layer.config
    parts = {name: tensors.pop(name) for name in list(tensors) if name.split(".")[0] in BEFORE_LAYER}
    if layer.reads_state_first and "eh_proj.weight" in parts:
        parts["eh_proj.weight"] = _swapped(parts["eh_proj.weight"])
    if not layer.has_norm:
        tensors["model.norm.weight"] = torch.ones(config.hidden_size)
    if missing := missing_weights(layer.one_layer, own_names(layer.one_layer, tensors)):
        raise lacks_weights(config, [layer.would_be(name) for name in missing])
    model = model_of_weights(ModelKind(layer.one_layer, dtype, PAGED), tensors, str(config.directory))
    return MtpHead(config, model, parts, layer.would_be, has_norm=layer.has_norm)


def _swapped(projection: Tensor) -> Tensor:
    """Turn a projection of [state, embedding] into a projection of [embedding, state], or the reverse."""
    return torch.cat(projection.chunk(2, -1)[::-1], -1)


def layers_of_mtp(head: MtpHead | ChainedMtp) -> list[MtpHead]:
    return [head] if isinstance(head, MtpHead) else list(head.heads)


def learned_weights(head: MtpHead) -> dict[str, nn.Parameter]:
    """The layer's weights, named as in a model of that layer alone, except weights that no gradient reaches: a router's
    biases that choose experts without weighing them. Embeddings and output layer are the target's.
    """
    model: Any = head.step.model
    parts = model.get_input_embeddings(), model.get_output_embeddings()
    shared = {id(one) for part in parts for one in part.parameters()}
    named = dict(head.named_parameters())
    before = {name: one for name, one in named.items() if name.split(".")[0] in BEFORE_LAYER}
    found = {name: one for name, one in model.named_parameters() if id(one) not in shared}
    return before | {name: one for name, one in found.items() if not name.endswith(_NOT_LEARNED)}


def check_mtp_is_trained(config: HeadConfig) -> None:
    """SpecDecError for an MTP head whose trained weights could not be written back. Reads no numbers of weights."""
    with torch.no_grad():
        tensors_of_mtp(load_mtp(config, None, torch.bfloat16, _zeros), torch.bfloat16)


def check_mtp_is_of(config: HeadConfig, model: Path) -> None:
    """SpecDecError if the embeddings or the output layer in the head's files differ from this `model`'s. Compares a few
    rows, with a tolerance: rows of a model trained further, or quantized, are nearly the same. Tables that only one of
    the two has are not compared.
    """
    if model.resolve() != config.directory.resolve():
        _check_likeness(config, _tables_of(model, embeddings_of(config)), str(model))


Tables = dict[tuple[str, tuple[int, ...]], Tensor]
"""Some rows of embeddings and output layer, by the tensor's name and its whole shape."""


def _check_likeness(config: HeadConfig, targets: Tables, target: str) -> None:
    own = _tables_of(config.directory, embeddings_of(config))
    for name, shape in sorted(own.keys() & targets.keys()):  # other sizes are found by the configs
        theirs, ours = own[name, shape].flatten(), targets[name, shape].flatten()
        if float(F.cosine_similarity(theirs, ours, dim=0)) < _LEAST_LIKENESS:
            raise SpecDecError(
                f"the head belongs to another model, `{name}` differs from {target}'s: {config.directory}",
                hint="take the head of this model, or one that was trained with its embeddings",
            )


def _tables_of(model: Path, embeddings: str) -> Tables:
    """A few rows of the model's embeddings and output layer, if the files have them as plain numbers; of a GGUF file,
    rows of its embeddings alone.
    """
    if model.is_file():
        _, numbers = read_numbers(model, torch.bfloat16, lambda name: name == embeddings)
        return {(name, tuple(one.shape)): _some_rows(one) for name, one in numbers.items()}
    entries = shared_with_target(read_tensors(model), embeddings)
    tables = {name: one for name, one in entries.items() if one.is_float and one.is_as_in_file and len(one.shape) == 2}
    return {(name, one.shape): _rows_alone(one) for name, one in tables.items()}


def _some_of(num_rows: int) -> range:
    return range(0, num_rows, max(1, num_rows // _NUM_COMPARED))


def _some_rows(table: Tensor) -> Tensor:
    return table[list(_some_of(len(table)))].float()


def _rows_alone(entry: SourceTensor) -> Tensor:
    """A few rows of a tensor, read without the rest of it."""
    num_rows, width = entry.shape
    num_bytes = width * entry.dtype.itemsize
    places = _some_of(num_rows)
    rows = [replace(entry, shape=(1, width), offset=entry.offset + place * num_bytes) for place in places]
    return torch.cat(load_tensors(rows)).float()


def tensors_of_mtp(head: MtpHead | ChainedMtp, dtype: torch.dtype) -> dict[str, Tensor]:
    """The learned weights under the checkpoint's names, split as in the checkpoint, such as into a tensor for each
    expert. SpecDecError if a weight cannot be split in this way.
    """
    found = dict[str, Tensor]()
    for layer, one in zip(_own_layers(head.config), layers_of_mtp(head), strict=True):
        dtype_of = dtypes_of_weights(layer.one_layer, dtype)
        learned = {name: weight.detach().to(dtype_of(name)) for name, weight in learned_weights(one).items()}
        found |= layer.as_in_file(revert_weight_conversion(one.step.model, learned))
    return found


def kept_tensors_of_mtp(config: HeadConfig, learned: Container[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors to write besides the `learned` weights, under the checkpoint's names: embeddings, output layer, and the
    rest of the head's layers. Copied from the files; a quantized output layer is dequantized.
    """
    layers, entries = _own_layers(config), read_tensors(config.directory)
    kept = [one for one in entries if _is_copy(one, config)]
    shared = _OwnLayer(config, 0, shared_with_target(entries, embeddings_of(config)), layers[0].one_layer)
    for layer in (shared, *layers):
        plain = _in_files(layer.entries, config, parameter_shapes(layer.one_layer))[1]
        kept += [layer.entries[one.name] for one in plain if layer.name_in_file(one.name) not in learned]
    quantized, _ = _in_files(shared.entries, config, parameter_shapes(shared.one_layer))
    numbers = {f"{name}.weight": layer.load().dequantize(dtype) for name, layer in quantized.items()}
    tensors = zip((one.name for one in kept), load_tensors(kept), strict=True)
    return dict(tensors) | shared.as_in_file(numbers)


def _is_copy(entry: SourceTensor, config: HeadConfig) -> bool:
    """True for a copy of the target's embeddings or output layer beside the head's layer. A quantized copy does not
    count, since the written output layer is not quantized.
    """
    first = num_layers_of(config.layers)
    beside = (f".layers.{first + depth}.{part}weight" for depth in range(config.num_layers) for part in _COPIES)
    return entry.is_float and entry.name.endswith(tuple(beside))


def _family(config: HeadConfig) -> MtpFamily:
    return mtp_family(config.layers.get("model_type"))


def embeddings_of(config: HeadConfig) -> str:
    return _family(config).embeddings


def _numbers(
    entries: dict[str, SourceTensor], config: HeadConfig, dtype_of: DtypeOf, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """The numbers of these tensors, named as in a model with these `shapes`; SpecDecError for an unknown format."""
    layers, tensors = _in_files(entries, config, shapes)
    numbers = {one.name: t.to(dtype_of(one.name)) for one, t in zip(tensors, load_numbers(tensors), strict=True)}
    with _of_head(config):
        for name, layer in layers.items():
            numbers[f"{name}.weight"] = layer.load().dequantize(dtype_of(f"{name}.weight"))
    return numbers


def _zeros(
    entries: dict[str, SourceTensor], config: HeadConfig, dtype_of: DtypeOf, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Zeros that take no memory, in the shapes of `_numbers`, for callers that read no numbers."""
    layers, tensors = _in_files(entries, config, shapes)
    found = {one.name: one.shape for one in tensors}
    for name, layer in layers.items():
        found[f"{name}.weight"] = layer.read({part: one.without_values() for part, one in layer.parts.items()}).shape
    return {name: torch.zeros((), dtype=dtype_of(name)).expand(shape) for name, shape in found.items()}


def _in_files(
    entries: dict[str, SourceTensor], config: HeadConfig, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, PrequantizedLayer], list[SourceTensor]]:
    """Split the entries into quantized layers, by name, and other tensors under their new names. SpecDecError if
    config.json does not say how the weights are quantized.
    """
    tensors = [replace(one, name=name) for name, one in entries.items()]
    few = next((one.source_name for one in tensors if not one.is_float), None)
    if few is None:
        return {}, tensors
    found = format_of(read_json(config.directory / "config.json"), config.directory)
    if found is None:
        raise SpecDecError(
            f"the head's weights are quantized, and config.json does not say how: {few}, in {config.directory}",
            hint="take the model as it was published",
        )
    with _of_head(config):
        return find_layers(tensors, found, shapes, config.directory)


@contextmanager
def _of_head(config: HeadConfig) -> Iterator[None]:
    """Context in which an error about quantized weights also says that the weights are the head's."""
    try:
        yield
    except SpecDecError as error:
        raise SpecDecError(f"{error.message}, in the head of {config.directory}", hint=error.hint) from error


def shared_with_target(entries: list[SourceTensor], embeddings: str) -> dict[str, SourceTensor]:
    """The target's embeddings and output layer (of a quantized layer, its parts), by their names in a model. Copies
    beside the head's layer do not count.
    """
    found = dict[str, SourceTensor]()
    for one in entries:
        if ".layers." in one.name or one.name.startswith("mtp."):
            continue
        _, is_output, part = f".{one.name}".rpartition(".lm_head.")
        if is_output:
            found.setdefault(f"lm_head.{part}", one)
        elif one.name.endswith(f".{embeddings.removeprefix('model.')}"):
            found.setdefault(embeddings, one)
    return found


def _name_in_mtp(name: str, number: int, depth: int) -> str | None:
    """Name of a weight in a model of one MTP layer alone; `number` is the layer's number in the model, `depth` in the
    head. None for a weight of the target or of another MTP layer.
    """
    for theirs, ours in (item for table in NAMES_IN_FILES for item in table.items()):
        prefix = theirs.replace(".N.", f".{depth}.")
        if name.startswith(prefix):
            own = ours + name.removeprefix(prefix)
            place, _, part = own.removeprefix("model.layers.").partition(".")  # Nemotron-H's stand in its layers
            if place.isdigit() and part.startswith("final_layernorm."):
                return f"model.norm_f.{part.removeprefix('final_layernorm.')}"
            return part if place.isdigit() and part.split(".")[0] in BEFORE_LAYER else own
    _, is_there, own = name.partition(f".layers.{number}.")
    if not is_there or own.startswith(_COPIES) or ".mtp.layers." in name:
        return None
    if own.startswith("shared_head.norm."):
        return f"model.norm.{own.removeprefix('shared_head.norm.')}"
    return own if own.split(".")[0] in BEFORE_LAYER else f"model.layers.0.{own}"


def _config_of_one_layer(config: HeadConfig, own: Iterable[str]) -> PreTrainedConfig:
    """The target's config with one layer of the head's kind: full attention, and experts if the head's `own` names have
    them. Nemotron-H's config lists the head's blocks itself.
    """
    layers = without_quantization(config.layers)
    one: Any = copy.deepcopy(parse_pretrained_config(layers, str(config.directory / "config.json")))
    if _family(config).lists_its_blocks:
        one.layer_types = list(one.mtp_layers_block_type)
        return one  # type: ignore[no-any-return]
    has_experts = any(".mlp.experts." in name for name in own)
    is_windowed = _family(config).is_windowed
    settings = {
        "moe_layer_start_index": 0 if has_experts else 1,  # Ernie's
        "layer_types": ["sliding_attention" if is_windowed else "full_attention"],
        "mlp_layer_types": ["dense" if is_windowed else (getattr(one, "mlp_layer_types", None) or ["dense"])[-1]],
        "first_k_dense_replace": 0,
        "mlp_only_layers": [],
        "num_hidden_layers": 1,
    }
    for name, value in settings.items():
        if getattr(one, name, None) is not None:
            setattr(one, name, value)
    return one  # type: ignore[no-any-return]
