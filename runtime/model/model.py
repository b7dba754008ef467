"""The transformers model of an engine: made from a config without weights (probe), or from a checkpoint.

Model code is transformers' own, except the classes in `runtime.model.families`. Ours are the check that specdec runs
the model correctly, and `Step`, which gives the compiled function its signature.
"""

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributions import Distribution
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.pytorch_utils import Conv1D

from runtime.checkpoint.config import LayerShape, Quantization, Shapes
from runtime.checkpoint.quant.planning import PrequantizedLayer
from runtime.checkpoint.quant.weight import take_quantized
from runtime.checkpoint.tensor_writer import Piece
from runtime.kernels.ops import choose_vector_math
from runtime.model.attention import KERNEL, PROBE, SEE_MODELS, PagedInputs, Recorded, chunks_without_padding
from runtime.model.causal_heads import model_class
from runtime.model.fusing import fuse, fuse_layers, fused_names
from runtime.model.placing import is_linear, place_modules
from runtime.model.pretrained import last_words, layers_that_keep, wrong_turns
from runtime.model.quantized import place_quantized, placeholders
from runtime.model.split import compute_together, place_pieces, placeholders_of_pieces
from runtime.model.tp_layers import Splitting, split_model
from runtime.model.weights import absent_weights, is_absent, present, read_weights
from runtime.util.errors import SpecDecError
from runtime.util.locks import MODEL_INIT_LOCK, lock_transformers, quiet_transformers

_CONVERT_AGAIN = "convert the model again"
_LEFT_OUT = {"gate", "router", "shared_expert_gate", "wg", "dt_proj", "weights_proj"}
# Words of errors about Python code, which tell the user nothing about a config.
_OF_CODE = re.compile(
    r"\w(Error|Exception)\b|has no attribute|unexpected keyword|meta tensor|NoneType|unsupported operand"
)

_OF_SIZES = re.compile(r"\bshape|\bsizes?\b|dimension|divi|modulo")

_models: dict[tuple[type[PreTrainedConfig], str], PreTrainedModel] = {}
_probed: dict[tuple[type[PreTrainedConfig], str], Shapes] = {}
_MOST_PROBED = 256

lock_transformers()


def parameter_shapes(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each weight in the config's model."""
    model = _model_without_memory(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}


def linear_layers(config: PreTrainedConfig) -> tuple[list[str], str | None]:
    """The model's linear layers that can be quantized, and the name of the output layer if it is among them.

    Routers and the layers for Mamba's step sizes are left out: they are few numbers that decide much.
    """
    model = _model_without_memory(config)
    names = [name for name, module in model.named_modules() if type(module) in (nn.Linear, Conv1D) or is_linear(module)]
    output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    head = next((name for name in names if model.get_submodule(name) is output), None)
    return [name for name in names if is_quantizable(name)], head


def is_quantizable(name: str) -> bool:
    """False for a router's linear layer and for the layer that computes Mamba's step sizes."""
    return name.rpartition(".")[2] not in _LEFT_OUT and ".router." not in name


def transposed_layers(config: PreTrainedConfig) -> frozenset[str]:
    """The linear layers whose weights are [inputs, outputs] in the model: GPT-2's."""
    return frozenset(name for name, one in _model_without_memory(config).named_modules() if type(one) is Conv1D)


def _model_without_memory(config: PreTrainedConfig) -> PreTrainedModel:
    """A model on `meta`, to be read only. The last model is kept, because a conversion asks for it eight times."""
    key = type(config), config.to_json_string()
    with _on_meta():
        if key not in _models:
            # In 16 bits, which shows the weights that the class itself makes float32.
            model = _made(config, dtype=torch.bfloat16)
            _models.clear()
            _models[key] = model
        return _models[key]


def _made(config: PreTrainedConfig, **settings: Any) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        copy.deepcopy(config), trust_remote_code=False, **settings
    )
    return model


@contextmanager
def _on_meta() -> Iterator[None]:
    """Make models on `meta` within the block, without torch's warnings about empty weights."""
    with MODEL_INIT_LOCK, torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors", UserWarning)
        yield


def renames_weights(config: PreTrainedConfig) -> bool:
    """True if transformers may load the model's weights from other names than its own."""
    return get_checkpoint_conversion_mapping(config.model_type) is not None  # type: ignore[no-untyped-call]


def own_names(config: PreTrainedConfig, names: Iterable[str]) -> list[str]:
    """The model's names for weights stored under these names, if transformers only renames them."""
    return _renamed(get_model_conversion_mapping(_model_without_memory(config)), names)


def names_in_whole(model_type: str, names: Iterable[str]) -> list[str]:
    """The whole multimodal model's names for weights that are stored under these names."""
    return _renamed(get_checkpoint_conversion_mapping(model_type) or [], names)  # type: ignore[no-untyped-call]


def _renamed(mapping: Iterable[Any], names: Iterable[str]) -> list[str]:
    renamings = [one for one in mapping if type(one) is WeightRenaming]
    return [reduce(lambda found, one: one.rename_source_key(found)[0], renamings, name) for name in names]


def dtypes_of_weights(config: PreTrainedConfig, dtype: torch.dtype) -> Callable[[str], torch.dtype]:
    """Function from a weight's stored name to its dtype in transformers, for a model of `dtype`.

    Some weights stay float32: those in the class's lists (`_keep_in_fp32_modules_strict`, and for float16
    `_keep_in_fp32_modules` too), and those that the class itself makes float32. In bfloat16, for example, a router's
    bias of 8.02 would become 8.0, and other experts would be chosen.
    """
    model = _model_without_memory(config)
    own, kept, mapping = model.state_dict(), _kept_in_float32(model, dtype), get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]

    def dtype_of(name: str) -> torch.dtype:
        if kept and name not in own:
            name, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        return torch.float32 if name in kept else dtype

    return dtype_of


def _kept_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> set[str]:
    """Names of the weights that transformers keeps in float32 in `model`, a model of 16 bits."""
    if dtype == torch.float32:
        return set()
    weights = {name: one for name, one in model.state_dict().items() if one.is_floating_point()}
    lists = [*model._get_dtype_plan(dtype)]
    listed, _, _ = build_glob_alternation(lists)
    return {name for name, one in weights.items() if one.dtype == torch.float32 or (lists and listed.search(name))}


def loaded_otherwise(
    config: PreTrainedConfig, dtype: torch.dtype, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]
) -> str | None:
    """Name of a weight that transformers loads differently from `ours` than from `theirs`, in a model of `dtype`; None
    if all are equal. Both are stored tensors by their names in files. The model's other weights take no memory.
    """
    with _on_meta():
        model = _made(config, dtype=dtype)
    found = [_loaded_by_transformers(model, dtype, tensors) for tensors in (theirs, ours)]
    return next((name for name, one in found[0].items() if not _are_same(one, found[1].get(name))), None)


def _loaded_by_transformers(
    model: PreTrainedModel, dtype: torch.dtype, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The weights that transformers loads from `tensors` into a model without memory."""
    plan = model._get_dtype_plan(dtype)
    mapping = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightConverter | WeightRenaming)]
    with quiet_transformers():
        convert_and_load_state_dict_in_model(
            model, dict(tensors), LoadStateDictConfig(dtype=dtype, dtype_plan=plan, weight_mapping=mapping)
        )
    return {name: one for name, one in model.state_dict().items() if not one.is_meta}


def _are_same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.dtype == other.dtype and torch.equal(one, other)


def missing_weights(config: PreTrainedConfig, names: Iterable[str]) -> list[str]:
    """Weights of the model that these names do not give. Of two tied weights either may be missing."""
    model = _model_without_memory(config)
    found = {*fused_names(model, names)}
    for pair in model.all_tied_weights_keys.items():
        if found & set(pair):
            found |= set(pair)
    passed = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    wanted = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return sorted(name for name in wanted - found if not any(pattern.search(name) for pattern in passed))


def has_experts(config: PreTrainedConfig) -> bool:
    return bool(_experts(config))


def fuse_experts(config: PreTrainedConfig, pieces: Seq[Piece]) -> list[Piece]:
    """The pieces, with the weights of all experts of a layer joined into one, as in the model."""
    experts = _experts(config)
    return fuse(_model_without_memory(config), pieces, experts) if experts else list(pieces)


def fuse_expert_layers(
    config: PreTrainedConfig, layers: Mapping[str, PrequantizedLayer]
) -> tuple[dict[str, PrequantizedLayer], dict[str, PrequantizedLayer]]:
    """Quantized experts joined into one weight for each layer without dequantizing; and the remaining layers."""
    shapes = _experts(config)
    wanted = {name: shapes[name] for name, is_transposed in expert_layers(config).items() if not is_transposed}
    return fuse_layers(_model_without_memory(config), layers, wanted) if wanted else ({}, dict(layers))


def expert_layers(config: PreTrainedConfig) -> dict[str, bool]:
    """Experts' weights that can be quantized, by name; True for a weight [experts, inputs, outputs].

    Experts whose products are not computed through transformers' interface are left out (Llama 4).
    """
    return {
        f"{name}.{part}": bool(module.is_transposed)
        for name, module in _model_without_memory(config).named_modules()
        if hasattr(module, "has_post_expert_norm")
        for part, weight in module.named_parameters(recurse=False)
        if weight.dim() == 3
    }


def _experts(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the experts' weights by name: [experts, outputs, inputs] or [experts, inputs, outputs]."""
    return {name: shape for name, shape in parameter_shapes(config).items() if len(shape) == 3}


def split_config(config: PreTrainedConfig, tp_size: int) -> Splitting | None:
    """Split of the config's model over `tp_size` ranks; None for one rank. SpecDecError if it cannot be split."""
    if tp_size == 1:
        return None
    with _on_meta():
        model = _model_without_weights(config)
    splitting = split_model(model, probe_config(config).layers, tp_size)
    probe_config(config, splitting)
    return splitting


def probe_config(config: PreTrainedConfig, splitting: Splitting | None = None) -> Shapes:
    """The K/V shape or state shape of every layer, found by a forward on `meta`.

    For a split model, one rank's shapes. Other results are kept: a conversion, a build and an engine all ask for them.
    """
    if splitting is not None:
        return _probe(config, splitting)
    key = type(config), config.to_json_string()
    if key not in _probed:
        if len(_probed) >= _MOST_PROBED:
            _probed.clear()
        _probed[key] = _probe(config, None)
    return _probed[key]


def _probe(config: PreTrainedConfig, splitting: Splitting | None) -> Shapes:
    recorded = Recorded()
    with _on_meta(), torch.no_grad(), _distributions_unchecked(), chunks_without_padding():
        model = _model_without_weights(config)
        if splitting is not None:
            place_pieces(model, splitting)
            compute_together(model, splitting, shares_memory=False)
        tokens = torch.zeros(1, 2, dtype=torch.long)
        # Without a mask transformers would look for several sequences in the positions, which have no values on `meta`.
        everything = torch.ones(1, 2, dtype=torch.long, device="cpu")  # layers with states read its values
        try:
            model(input_ids=tokens, position_ids=tokens, attention_mask=everything, use_cache=False, paged=recorded)
        except SpecDecError:
            raise
        except Exception as error:  # any failure means the same to the user: not a model that can be served
            raise _not_served(error, config) from error
    with_kv, with_state = layers_that_keep(config)
    if not with_kv and not with_state:
        raise SpecDecError(f"the model has no layers: {config.model_type}", hint="its config.json is damaged")
    if (*sorted(recorded.layers), *sorted(recorded.states)) != (*with_kv, *with_state):
        raise SpecDecError(
            f"only {len(recorded.layers) + len(recorded.states)} of {len(with_kv) + len(with_state)} layers let "
            f"specdec compute their attention, so the output would be wrong: {config.model_type}",
            hint="its attention does not go through transformers' AttentionInterface",
        )
    _refuse_forgetful_cache(config, recorded.layers)
    layers, states = (tuple(one[i] for i in sorted(one)) for one in (recorded.layers, recorded.states))
    return Shapes(layers, states)  # type: ignore[arg-type]


def _refuse_forgetful_cache(config: PreTrainedConfig, layers: dict[int, LayerShape]) -> None:
    """SpecDecError if transformers' own cache drops keys that attention would see: its outputs then depend on the
    number of tokens in a step (Moshi). A cache as long as the model's positions drops no key.
    """
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    for i, layer in enumerate(DynamicCache(config=config).layers):
        kept = getattr(layer, "sliding_window", None)
        window = (layers[i].sliding_window or layers[i].attention_chunk_size) if i in layers else None
        if i in layers and kept not in (None, window) and kept < positions:
            raise SpecDecError(
                f"transformers keeps {kept} keys of layer {i}, and its attention asks for "
                f"{window or 'all'}: {config.model_type}",
                hint=SEE_MODELS,
            )


def _model_without_weights(config: PreTrainedConfig) -> PreTrainedModel:
    model_class(config)
    try:
        model = _made(config, attn_implementation=PROBE)
    except Exception as error:  # whatever the family's code stumbles over
        words = last_words(error)
        said = "" if _OF_CODE.search(words) else f" ({words})"
        raise SpecDecError(
            f"transformers cannot make a model of this config: {config.model_type}{said}{_suspects(config, error)}",
            hint="a value that the model needs is missing or wrong in config.json; download or save the model again",
        ) from error
    if hasattr(model, "set_experts_implementation"):
        # The default mixture of experts reads values, and tensors on `meta` have none.
        model.set_experts_implementation("batched_mm")
    _declare_no_padding(model)
    _fix_rotary_factors(model)
    place_modules(model)
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        raise SpecDecError(
            f"the model counts positions from its padding token's id, not from 0: {config.model_type}", hint=SEE_MODELS
        )
    model.train(False)  # in training Mamba-2's modules call a function of another library, if it is installed
    return model


def _suspects(config: PreTrainedConfig, error: Exception) -> str:
    """Values in a config that may have caused an error: whole numbers below 1 other than the class's default, the text
    that a KeyError names, and after an IndexError lists shorter than the number of layers.
    """
    configs = [config, *(one for one in vars(config).values() if isinstance(one, PreTrainedConfig))]
    missing, num_layers = error.args[:1] if isinstance(error, KeyError) else (), getattr(config, "num_hidden_layers", 0)
    found = [
        f"`{name}` {value!r}"
        for one in configs
        for name, value in vars(one).items()
        if (type(value) is int and value < 1 and value != getattr(type(one), name, value) and "token_id" not in name)
        or (isinstance(value, str) and value in missing)
        or (isinstance(error, IndexError) and isinstance(value, list) and 0 < len(value) < num_layers)
    ]
    return f": {', '.join(found)}" if found else ""


def _not_served(error: Exception, config: PreTrainedConfig) -> SpecDecError:
    kind = config.model_type
    # `meta` has no values. torch raises NotImplementedError for `nonzero`, and names the meta tensor for `item`.
    if isinstance(error, NotImplementedError) or "meta tensor" in str(error):
        why = "the model looks at values while it computes, which a compiled step cannot"
        return SpecDecError(f"{why}: {kind}", hint=SEE_MODELS)
    if _OF_SIZES.search(words := last_words(error)):
        words = wrong_turns(config) or words
        return SpecDecError(
            f"transformers cannot compute with the sizes of this config: {kind} ({words}){_suspects(config, error)}",
            hint="correct config.json, or download or save the model again",
        )
    return SpecDecError(
        f"the model cannot run with specdec's attention: {kind}{_suspects(config, error)}", hint=SEE_MODELS
    )


@contextmanager
def _distributions_unchecked() -> Iterator[None]:
    """Within the block torch's distributions do not check parameters, which have no values on `meta` (Gemma 3n)."""
    checks = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(checks)


def _fix_rotary_factors(model: PreTrainedModel) -> None:
    """Keep the model from choosing rotary factors by the largest position in a step, which depends on drafts and on
    other rows.

    Within `num_positions`, its first factors are those that transformers uses for a sequence alone.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            module.rope_type = "fixed"  # type: ignore[assignment]  # what transformers puts on rotary modules
        elif isinstance(kind, dict):
            module.rope_type = dict.fromkeys(kind, "fixed")  # type: ignore[assignment]
        _fix_rotary_scale(module)


def _fix_rotary_scale(module: Any) -> None:
    """`_fix_rotary_factors` for a model that chooses the factors' scale by the largest position in a step (PhiMoE)."""
    ropes = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    if hasattr(module, "rope_init_fn") and "short_mscale" in ropes:
        module.config = copy.deepcopy(module.config)
        module.config.rope_parameters["rope_type"] = "default"  # then the model reads the scale below
        module.rope_init_fn = lambda config: (module.inv_freq, ropes["short_mscale"])


@dataclass(frozen=True)
class ModelKind:
    """A model without its weights' values: its config, and its dtype and computation."""

    config: PreTrainedConfig
    dtype: torch.dtype
    attention: str
    quantization: Quantization | None = None
    splitting: Splitting | None = None
    """Split over ranks, of which the weights belong to one; None for a whole model."""


def load_model(kind: ModelKind, weights: Path) -> PreTrainedModel:
    """The model with a checkpoint's weights, on the CPU; transformers maps names, ties weights and fills buffers."""
    return model_of_weights(kind, _read_weights(weights, read_weights), str(weights))


def load_absent(kind: ModelKind, weights: Path) -> PreTrainedModel:
    """The model as `load_model` gives it, whose weights are in memory only while they are `present`; all the time if
    loading converts one of them.
    """
    model = model_of_weights(kind, _read_weights(weights, absent_weights), str(weights))
    if all(is_absent(tensor) for tensor in model.state_dict(keep_vars=True).values()):
        return model
    return load_model(kind, weights)


def check_weights(kind: ModelKind, weights: Path, where: str) -> None:
    """SpecDecError if a checkpoint lacks a weight or has it in another shape. Reads no weight's numbers."""
    model_of_weights(kind, _read_weights(weights, absent_weights), where)


def _read_weights(weights: Path, read: Callable[[Path], dict[str, Tensor]]) -> dict[str, Tensor]:
    try:
        return read(weights)
    except FileNotFoundError:
        raise SpecDecError(f"file is missing: {weights}", hint=_CONVERT_AGAIN, code="checkpoint") from None
    except SafetensorError as error:
        raise SpecDecError(f"`{weights}` is damaged: {error}", hint=_CONVERT_AGAIN, code="checkpoint") from None


def load_whole_model(kind: ModelKind, ranks: Seq[Path]) -> PreTrainedModel:
    """The model with the weights of all ranks."""
    splitting = kind.splitting
    if splitting is None:
        return load_model(kind, ranks[0])
    pieces = [_read_weights(path, read_weights) for path in ranks]
    whole = {name: splitting.join(name, [piece[name] for piece in pieces]) for name in pieces[0]}
    return model_of_weights(replace(kind, splitting=None), whole, str(ranks[0].parent))


def model_of_weights(kind: ModelKind, state_dict: dict[str, Tensor], where: str) -> PreTrainedModel:
    """The model as `load_model` gives it, from tensors in memory. SpecDecError for a missing weight, a wrong shape or a
    layer too many, found in `where`.
    """
    choose_vector_math()
    config, splitting = kind.config, kind.splitting
    own_class = model_class(config)
    _refuse_rounded(kind, state_dict, where)
    quantized = take_quantized(state_dict, present)
    transposed = transposed_layers(config) if quantized else frozenset()
    state_dict |= placeholders(quantized, kind.dtype, transposed, _experts(config) if quantized else {})
    pieces = {}
    if splitting is not None:
        pieces = placeholders_of_pieces(state_dict, splitting, parameter_shapes(config), kind.dtype)
    with MODEL_INIT_LOCK, quiet_transformers():
        model, report = own_class.from_pretrained(
            None,
            config=config,
            state_dict=state_dict,
            dtype=kind.dtype,
            attn_implementation=kind.attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    # Other unexpected weights are no error: some files have weights for other uses.
    layers_beyond = [name for name in report["unexpected_keys"] if re.search(r"\.\d+\.", name)]
    for problem, names in (
        ("lacks {} of the model's weights", report["missing_keys"]),
        ("has the wrong shape of {} of the model's weights", report["mismatched_keys"]),
        ("has {} weights of layers that the model does not have", layers_beyond),
    ):
        if names:
            raise SpecDecError(
                f"`{where}` {problem.format(len(names))}, such as: {sorted(names)[0]}",
                hint="config.json and weights belong to two models; download or correct the model, and convert it "
                "again",
                code="checkpoint_of_two_models",
            )
    _declare_no_padding(model)
    _fix_rotary_factors(model)
    if splitting is not None:
        place_pieces(model, splitting, pieces)
    activations = "float" if kind.quantization is None else kind.quantization.activations
    place_quantized(model, quantized, activations, with_kernels=kind.attention == KERNEL)
    if splitting is not None:
        compute_together(model, splitting, shares_memory=kind.attention == KERNEL)
    loaded: PreTrainedModel = model.eval()
    return loaded


def _refuse_rounded(kind: ModelKind, state_dict: Mapping[str, Tensor], where: str) -> None:
    """SpecDecError for a weight in 16 bits that transformers keeps in float32: it was probably rounded."""
    if kind.dtype == torch.float32:
        return
    dtype_of = dtypes_of_weights(kind.config, kind.dtype)
    for name, tensor in state_dict.items():
        if tensor.is_floating_point() and dtype_of(name) == torch.float32 and tensor.dtype.itemsize == 2:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise SpecDecError(
                f"`{where}` has a weight in {dtype} that transformers keeps in float32: {name}",
                hint=_CONVERT_AGAIN,
                code="checkpoint",
            )


def _declare_no_padding(model: PreTrainedModel) -> None:
    """Keep the model from looking for padding, which fails on `meta` (GPT-2) and elsewhere warns needlessly."""
    object.__setattr__(model.config, "pad_token_id", None)  # some config classes accept only a number


class Step(nn.Module):
    """The function that is compiled: takes one step's tokens, returns the wanted logits, and updates the K/V pools in
    place.

    With `hidden_states` (`BuildConfig`) it also returns the hidden states of all its tokens.
    """

    def __init__(self, model: PreTrainedModel, hidden_states: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.hidden_states = hidden_states
        self._kept = kept_hidden_states(model, hidden_states) if hidden_states else {}
        place_modules(model)
        self.model = model
        self.layers = layers_that_keep(model.config)
        self.stand_ins: list[int] | None = None
        """Index of the pool that stands in for each layer's own, if fewer pools than layers are given."""

    def forward(
        self,
        input_ids: Tensor,  # (B, Q) int64
        positions: Tensor,  # (B, Q) int64
        slot_mapping: Tensor,  # (B, Q) int64
        block_tables: Tensor,  # (B, N) int64
        logit_indices: Tensor,  # (T,) int64 into the flattened (B x Q)
        key_pools: list[Tensor],  # per layer (num_blocks, Hk, D, block_size)
        value_pools: list[Tensor],  # per layer (num_blocks, Hk, block_size, Dv); then, in 8 bits, per layer scales
        state_slots: Tensor | None = None,  # (B,) int64, of a model with states
        state_pools: Seq[Tensor] = (),  # as from `runtime.core.states.state_pools`
    ) -> Tensor | tuple[Tensor, Tensor]:  # (T, vocab), and hidden states (B x Q, all beside each other)
        value_pools, scale_pools = value_pools[: len(key_pools)], value_pools[len(key_pools) :]
        if self.stand_ins is not None:
            given = key_pools, value_pools, scale_pools
            key_pools, value_pools, scale_pools = ([part[i] for i in self.stand_ins if part] for part in given)
        pools, rows = (key_pools, value_pools, scale_pools), (positions, slot_mapping, block_tables)
        paged = PagedInputs(*pools, *rows, *self.layers, state_slots, list(state_pools))
        B, Q = input_ids.shape
        _declare_equal(B, positions.shape[0], slot_mapping.shape[0], block_tables.shape[0])
        if state_slots is not None:
            _declare_equal(B, state_slots.shape[0])
            _declare_equal(state_pools[0].shape[0], *(pool.shape[0] for pool in state_pools))
        _declare_equal(Q, positions.shape[1], slot_mapping.shape[1])
        if key_pools:
            num_blocks, block_size = key_pools[0].shape[0], key_pools[0].shape[3]
            _declare_equal(num_blocks, *(pool.shape[0] for pool in (*key_pools, *value_pools, *scale_pools)))
            _declare_equal(block_size, *(pool.shape[3] for pool in key_pools), *(pool.shape[2] for pool in value_pools))
        # One row of B x Q tokens, so that the model's own `logits_to_keep` picks positions across rows.
        output = self.model(
            input_ids=input_ids.reshape(1, B * Q),
            position_ids=positions.reshape(1, B * Q),
            use_cache=False,
            logits_to_keep=logit_indices,
            paged=paged,
        )
        logits: Tensor = output.logits[0]
        if not self.hidden_states:
            return logits
        states = torch.cat([self._kept[number] for number in self.hidden_states], -1)[0]
        self._kept.clear()
        return logits, states


class _Kept(dict[int, Tensor]):
    """Hidden states by number. Of a plain dictionary the exporter makes a copy, which the hooks would not fill."""


def kept_hidden_states(model: PreTrainedModel, numbers: Iterable[int]) -> dict[int, Tensor]:
    """A dictionary that every forward of the model fills with these hidden states, [1, tokens, hidden size].

    Hooks fill it, and are never removed: transformers' own `output_hidden_states` cannot be compiled. SpecDecError for
    a number beyond the model's layers, and for a model whose layers are not one list.
    """
    kept: dict[int, Tensor] = model.__dict__.setdefault("_kept_hidden_states", _Kept())
    hooked: set[int] = model.__dict__.setdefault("_hooked_hidden_states", set())
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    layers: Any = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise SpecDecError(f"a trained drafter cannot read this model's hidden states: {type(model).__name__}")

    def entering(number: int) -> Callable[..., None]:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kept[number] = args[0] if args else kwargs["hidden_states"]

        return keep

    def keep_last(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        kept[len(layers)] = output.last_hidden_state

    for number in set(numbers) - hooked:
        if number > len(layers):
            raise SpecDecError(f"a drafter reads hidden state {number} of a target of {len(layers)} layers")
        if number == len(layers):
            decoder.register_forward_hook(keep_last)
        else:
            layers[number].register_forward_pre_hook(entering(number), with_kwargs=True)
        hooked.add(number)
    return kept


def _declare_equal(size: int, *others: int) -> None:
    """Tell the compiler that sizes are equal. Otherwise inner loops compute indices by division, at half the speed."""
    for other in others:
        torch._check(other == size)  # type: ignore[no-untyped-call]
