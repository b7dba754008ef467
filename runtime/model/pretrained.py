"""Model configurations, read by transformers, and the check that specdec supports the model."""

import dataclasses
import inspect
import itertools
import math
import re
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

import torch
from transformers import GenerationConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from runtime.model.attention import SEE_MODELS, refuse_own_attention
from runtime.model.causal_heads import has_causal_class, model_class
from runtime.model.families.registry import family_of, published_type
from runtime.util.errors import SpecDecError, SpecDecWarning
from runtime.util.locks import quiet_transformers
from runtime.util.reading import shown

# Sizes that are at least 1 in every model.
_SIZES = {
    "max_position_embeddings": "positions",
    "hidden_size": "hidden units",
    "num_hidden_layers": "layers",
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "heads of keys and values",
    "vocab_size": "words",
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), "tokens in a chunk"),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), "state dimensions"),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups"), "groups"),
}
# Keys that some families compute with, and the values that change nothing in a family that ignores the key.
_CAPS = dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv"), (0,))
_FACTORS = ("logits_scaling", "logit_scale", "attention_multiplier", "embedding_multiplier", "residual_multiplier")
_OF_COMPUTING: dict[str, tuple[int, ...]] = _CAPS | dict.fromkeys(_FACTORS, (0, 1)) | {"alibi": ()}
_IS_SIZE = re.compile(r"_(size|dim|rank|width|units|channels|groups|heads|experts|layers?)$|^(n|num|d)_")
_IS_NO_SIZE = re.compile(r"^max_|position|window|ctx|token|chunk|length|seq")
_LARGEST_SIZE = 2**40
"""Largest size in a config, 2^40: beyond that of any model, and far below what 64 bits hold."""
MANY_LAYERS = 1000
"""Number of layers beyond that of any published model."""
_NUMBERS_OF_EXPERTS = "n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"
_NUMBERS_OF_CHOSEN = (
    *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts", "moe_k", "moe_top_k"),
)
_PATTERN = "sliding_window_pattern"
# Keys of a rope whose value is a number above 0, or a list of such numbers.
_OF_ROPES = (
    *("rope_theta", "factor", "partial_rotary_factor", "original_max_position_embeddings", "attention_factor"),
    *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
)
# Earlier names of a type of rope, which configs keep as `type` beside today's `rope_type`.
_ALSO_CALLED = {"longrope": ("su",), "default": ("mrope",)}
_INDEXED = "indexed_attention"  # sees only the keys that an index chooses
_WITH_KV = {"full_attention", "sliding_attention", "hybrid", _INDEXED}
_WITH_STATE = {"conv", "linear_attention", "hybrid"}

_DIVISORS = ("final_logit_softcapping", "floor_scale")
# Parts of the names of keys that need no reader: they are about training, multi-token prediction, files or programs.
_OF_NO_MODEL = re.compile(
    r"^_|init|dropout|loss|dtype|version|mtp|nextn|pretrain|train|auto_map|compress|quant|token|hub"
    r"|^summary_|verbose|ignore_index|video|image|vision|audio_output"
)
_OF_OTHERS = {
    # what transformers once wrote into every config
    *("add_cross_attention", "finetuning_task", "is_decoder", "is_encoder_decoder", "prefix", "pruned_heads"),
    *("task_specific_params", "tf_legacy_loss", "tie_encoder_decoder", "torchscript", "use_bfloat16", "use_cache"),
    # they change how a program computes, not its result
    *("ep_size", "num_logits_to_keep", "use_mamba_kernels", "use_flash_attn", "for_llm_compressor", "seq_aux"),
    "spd_type",  # PARD's
    *("chunk_size_feed_forward", "output_router_logits", "use_mem_eff_path", "moe_shared_expert_overlap"),
    # read by nobody without `use_sliding_window`
    "max_window_layers",
}
_WITHIN = ("thinker_config", "text_config", "attn_config", "ffn_config")
"""Keys of inner configs that affect the language model."""
_ROPES_SAID = ("rope_scaling", "rope_parameters")
# A `head_dim` that contradicts the weights is an error by itself; a request's settings are read by `generation_config`.
_ALWAYS_READ = {"head_dim", *vars(GenerationConfig())}  # type: ignore[no-untyped-call]
_OF_EVERY_ROPE = {
    *("rope_theta", "partial_rotary_factor", "max_position_embeddings", "original_max_position_embeddings"),
}
# Keys that only the processor of images reads, from the config of a model that takes images.
_OF_IMAGES = {
    *("downsample_factor", "encoder_patch_size", "max_pixels_tolerance", "max_tiles", "min_tiles", "tile_size"),
    *("use_thumbnail", "patch_size"),
}
# Notes of programs that quantize, on how they did it; readers of the weights do not need them.
_NOTES_OF_QUANTIZERS = {
    *("fmt", "static_groups", "model_name_or_path", "model_file_base_name", "producer", "provider", "pack_dtype"),
    *("is_marlin_format", "damp_auto_increment", "failsafe", "rotation", "parallel_packing", "v2", "do_fuse"),
    *("exclude_modules", "kv_cache_quant_algo", "quant_type_kwargs", "version", "checkpoint_format", "lm_head"),
    # auto-round's: the search for rounded weights
    *("autoround_version", "iters", "lr", "minmax_lr", "nsamples", "seqlen", "low_gpu_mem_usage", "amp"),
    *("gradient_accumulate_steps", "enable_quanted_input", "enable_minmax_tuning", "enable_norm_bias_tuning"),
    *("enable_torch_compile", "enable_alg_ext", "not_use_best_mse", "to_quant_block_names", "packing_format"),
}
# Keys that transformers reads for each type of rope (`modeling_rope_utils`), beside the base and the share of a head.
_OF_SCALED = {"factor", "attention_factor", "original_max_position_embeddings"}
_KEYS_OF_ROPES = {
    "default": {"mrope_section", "mrope_interleaved"},
    "linear": {"factor"},
    "proportional": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings", "alpha"},
    "yarn": _OF_SCALED | {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "longrope": _OF_SCALED | {"short_factor", "long_factor", "short_mscale", "long_mscale"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
_ALWAYS_SO_OF_QUANTIZERS = {"data_type": "int", "act_bits": 16, "act_data_type": "float", "super_bits": None}
_READ_OF_QUANTIZERS = {
    # by the readers in `runtime.checkpoint.quant`, beside the parameters of transformers' classes
    *("quant_method", "dynamic", "quant_algo", "config_groups", "w_bit", "q_group_size", "sparsity_config"),
    *("transform_config", "quantization", "_load_in_4bit", "_load_in_8bit", "modules_to_convert"),
}


def _fault(where: str, problem: str, hint: str = "correct it, or download or save the model again") -> SpecDecError:
    return SpecDecError(f"`{where}` {problem}", hint=hint)


def parse_pretrained_config(data: dict[str, Any], where: str) -> PreTrainedConfig:
    """Read a Hugging Face config from its JSON; SpecDecError unless specdec supports the model."""
    config = read_any_config(data, where)
    _refuse_unsupported(config)
    return config


def read_any_config(data: dict[str, Any], where: str) -> PreTrainedConfig:
    """Read a config like `parse_pretrained_config`, for any model that transformers has a class for."""
    model_type = data.get("model_type")
    if isinstance(model_type, str) and (same := published_type(model_type)) != model_type:
        data, model_type = data | {"model_type": same}, same
    if model_type is None:
        raise _fault(where, "names no `model_type`", "it should be a Hugging Face model's config.json")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        hint = (
            "models with code of their own (`trust_remote_code`) are not supported"
            if "auto_map" in data
            else SEE_MODELS
        )
        raise SpecDecError(f"transformers does not know this model type: {model_type}", hint=hint)
    _refuse_absurd_sizes(data, where)
    for place in (data, data.get("text_config")):
        if isinstance(place, dict):
            _refuse_two_ropes(place, where)
            _refuse_sizes(place, where)
            _refuse_dtype(place, where)
    try:
        # transformers writes infinity as `{"__float__": "Infinity"}`, but decodes it in `from_pretrained` only.
        values = _with_decimals(CONFIG_MAPPING[model_type], PreTrainedConfig._decode_special_floats(data))
        inside = family_of(model_type).rope_theta_within
        if inside is not None and "rope_parameters" not in data:  # transformers reads it inside only
            values |= {name: value for name, value in (data.get(inside) or {}).items() if name == "rope_theta"}
        with quiet_transformers():
            config: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(values)
    except Exception as error:  # validators may raise anything; the user needs the file's name
        _refuse_pattern_alone(data, where)
        problem = f"is not a valid {model_type} config: {_with_values(last_words(error), data)}"
        raise _fault(where, problem) from error
    for rope in _ropes(config):
        _check_rope(rope, where)
    within = ((getattr(config, name, None), data.get(name)) for name in ("text_config", "ffn_config"))  # DBRX's experts
    for one, said in ((config, data), *within):
        if isinstance(one, PreTrainedConfig) and isinstance(said, dict):
            _refuse_unread(one, said, where)
            _refuse_windows(one, said, where)
            _refuse_patterns(said, where)
            _refuse_experts(one, said, where)
    return config


def _with_decimals(kind: type[Any], data: dict[str, Any]) -> dict[str, Any]:
    """The values with 1 written as 1.0 if transformers accepts only decimals; DBRX's own config.json has such a 1."""
    kinds = {one.name: get_args(one.type) or (one.type,) for one in dataclasses.fields(kind)}
    values = dict(data)
    for name, value in data.items():
        inner = kind.sub_configs.get(name)
        if isinstance(value, dict) and dataclasses.is_dataclass(inner) and isinstance(inner, type):
            values[name] = _with_decimals(inner, value)
        elif type(value) is int and float in kinds.get(name, ()) and int not in kinds[name]:
            values[name] = float(value)
    return values


def _refuse_unread(config: PreTrainedConfig, said: dict[str, Any], where: str) -> None:
    """SpecDecError for a value that transformers' class ignores and other families use, such as `clip_qkv` 1.0 in a
    Llama: the model was probably trained with it.
    """
    known = inspect.signature(type(config)).parameters.keys() | config.attribute_map.keys()
    for name, neutral in _OF_COMPUTING.items():
        is_read = name in known or hasattr(type(config), name)
        if not is_read and (value := said.get(name)) is not None and value is not False and value not in neutral:
            raise _fault(
                where,
                f"has a value that transformers' {config.model_type} does not compute with: `{name}` {value!r}",
                "leave it out if the model was trained without it; else the model is of another type",
            )


def _refuse_windows(config: PreTrainedConfig, said: dict[str, Any], where: str) -> None:
    """SpecDecError for layers whose window or chunk has no tokens, and for a window that no layer uses."""
    window, types = vars(config).get("sliding_window"), said.get("layer_types")
    uses = "use_sliding_window"
    sees = "`layer_types` has sliding_attention" if "sliding_attention" in (types or ()) else ""
    sees = sees or (f"`{uses}` is true" if said.get(uses) else "")
    if sees and (window is None or (isinstance(window, int) and window < 1)):
        no_window = f"`sliding_window` is {said.get('sliding_window')!r}"
        raise _fault(where, f"has contradicting windows: {sees}, and {no_window}")
    chunk, chunked = vars(config).get("attention_chunk_size", 1), "chunked_attention"
    if chunked in (vars(config).get("layer_types") or ()) and (not isinstance(chunk, int) or chunk < 1):
        raise _fault(where, f"has layers of {chunked}, and `attention_chunk_size` is {chunk!r}")
    if said.get(uses) and isinstance(types, list) and "sliding_attention" not in types:
        no_layers = "`layer_types` has no sliding_attention"
        raise _fault(where, f"has contradicting windows: `{uses}` is true, and {no_layers}")


def _refuse_pattern_alone(data: dict[str, Any], where: str) -> None:
    """SpecDecError for a pattern of windows that transformers ignores: letters (EXAONE 4), 0, or without a window."""
    for said in (data, data.get("text_config")):
        if not isinstance(said, dict) or said.get("layer_types"):
            continue
        model_type, pattern = str(said.get("model_type")), said.get(_PATTERN, 1)
        divides = model_type in CONFIG_MAPPING and hasattr(CONFIG_MAPPING[model_type], _PATTERN)
        if divides and (not isinstance(pattern, int) or pattern == 0 or said.get("sliding_window", 1) is None):
            of_windows = ", ".join(f"`{name}` {said[name]!r}" for name in (_PATTERN, "sliding_window") if name in said)
            raise _fault(
                where,
                f"has windows by a pattern that transformers does not read: {of_windows}, and no `layer_types`",
                "add `layer_types`, sliding_attention or full_attention for each layer",
            )


def _refuse_patterns(said: dict[str, Any], where: str) -> None:
    """SpecDecError if `layer_types` and a pattern beside them disagree. A pattern is a number n (every n-th layer sees
    all keys) or letters L and G; the last layer may see all keys in either case.
    """
    pattern, types = said.get(_PATTERN), said.get("layer_types")
    if not isinstance(types, list) or not set(types) <= {"sliding_attention", "full_attention"}:
        return
    letters = "L" * (pattern - 1) + "G" if isinstance(pattern, int) and pattern > 0 else pattern
    if not isinstance(letters, str) or not letters or set(letters) - {"L", "G"}:
        return
    for i, kind in enumerate(types[:-1]):
        if (kind == "sliding_attention") != (letters[i % len(letters)] == "L"):
            problem = f"has contradicting windows: `{_PATTERN}` {pattern!r}, and layer {i} of `layer_types` is {kind}"
            raise _fault(where, problem, "leave out the one that is wrong")


def _refuse_experts(config: PreTrainedConfig, said: dict[str, Any], where: str) -> None:
    """SpecDecError for contradicting numbers of experts, of chosen experts, and of their groups."""

    def refuse_if(is_wrong: bool, problem: str, first: tuple[str, int], second: tuple[str, int]) -> None:
        if is_wrong:
            raise _fault(where, f"{problem}: `{first[0]}` {first[1]}, `{second[0]}` {second[1]}")

    def said_numbers(names: tuple[str, ...]) -> list[tuple[str, int]]:
        return [(name, said[name]) for name in names if isinstance(said.get(name), int)]

    def number_of(*names: str) -> tuple[str, int]:
        found = ((name, getattr(config, name, None)) for name in names)
        return next(((name, size) for name, size in found if isinstance(size, int) and size > 0), ("", 0))

    for first, second in itertools.pairwise(one for one in said_numbers(_NUMBERS_OF_EXPERTS) if one[1] >= 0):
        refuse_if(first[1] != second[1], "has two numbers of experts", first, second)
    for first, second in itertools.pairwise(one for one in said_numbers(_NUMBERS_OF_CHOSEN) if one[1] >= 1):
        refuse_if(first[1] != second[1], "has two numbers of experts that a token chooses", first, second)
    experts, chosen = number_of(*_NUMBERS_OF_EXPERTS), number_of(*_NUMBERS_OF_CHOSEN)
    groups, chosen_groups = number_of("n_group"), number_of("topk_group")
    if experts[1]:
        for one in said_numbers(_NUMBERS_OF_CHOSEN):
            refuse_if(one[1] < 1, "chooses no experts", one, experts)
        refuse_if(chosen[1] > experts[1], "chooses more experts than there are", chosen, experts)
        if groups[1]:
            more = "chooses more groups of experts than there are"
            refuse_if(experts[1] % groups[1] > 0, "has groups of experts that do not divide them", groups, experts)
            refuse_if(chosen_groups[1] > groups[1], more, chosen_groups, groups)


def _refuse_sizes(data: dict[str, Any], where: str) -> None:
    """SpecDecError for a size below 1, a divisor of 0, an epsilon below 0, and NaN."""
    for name, what in _SIZES.items():
        if isinstance(size := data.get(name), int) and size < 1:
            raise _fault(where, f"has an invalid number of {what}: {size}", "correct it")
    for name in _DIVISORS:
        if data.get(name) == 0:
            problem = f"has a value that nothing can be divided by: `{name}` {data[name]}"
            raise _fault(where, problem, "correct it; null leaves it out")
    numbers = {name: value for name, value in data.items() if isinstance(value, int | float)}
    for name, value in numbers.items():
        if name.endswith(("eps", "epsilon")) and value < 0:
            raise _fault(where, f"has a value below 0 whose square root is taken: `{name}` {value}", "correct it")
    for name, value in numbers.items():
        if isinstance(value, float) and math.isnan(value):
            raise _fault(where, f"has a value that is not a number: `{name}` {math.nan}", "correct it")


def _refuse_absurd_sizes(data: dict[str, Any], where: str) -> None:
    """SpecDecError for sizes that no memory can hold, in inner configs too, and for more layers than can be made."""
    for name, size in sizes_of(data):
        if size > _LARGEST_SIZE:
            raise _fault(where, f"has a size that no memory is large enough for: `{name}` {size}", "correct it")
    for name, count in counts_of_layers(data):
        if count > 10 * MANY_LAYERS:
            raise _fault(where, f"has more layers than any model: `{name}` {count}", "correct it")


def sizes_of(data: dict[Any, Any]) -> Iterator[tuple[str, int]]:
    """Integers in a config and its inner configs whose keys name sizes: `hidden_size` 4096. Keys of an inner object
    need not be names: those of `id2label` are numbers.
    """
    for name, value in data.items():
        if isinstance(value, dict):
            yield from sizes_of(value)
        elif isinstance(name, str) and _IS_SIZE.search(name) and not _IS_NO_SIZE.search(name):
            yield from ((name, one) for one in _numbers(value) if type(one) is int)


def counts_of_layers(data: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """The sizes that count layers: `num_hidden_layers` 32, or GPT-2's `n_layer` 12."""
    return ((name, size) for name, size in sizes_of(data) if name.endswith(("layer", "layers")))


def _refuse_dtype(data: dict[str, Any], where: str) -> None:
    for name in ("dtype", "torch_dtype"):
        value = data.get(name)
        if isinstance(value, str) and not isinstance(getattr(torch, value.removeprefix("torch."), None), torch.dtype):
            problem = f"has a `{name}` that torch does not know: {value}"
            raise _fault(where, problem, "correct it: float32, bfloat16 or float16")


def _check_rope(rope: dict[str, Any], where: str) -> None:
    """SpecDecError for a rope that gives no positions. transformers accepts such ropes, some with a warning."""
    if _type(rope) not in (known := {"default", *ROPE_INIT_FUNCTIONS}):
        problem = f"has a rope of a type that transformers does not know: {_type(rope)}"
        raise _fault(where, problem, f"it knows {', '.join(sorted(known))}")
    for name in _OF_ROPES:
        for value in [None] if name == "rope_theta" and rope.get(name, 0) is None else _numbers(rope.get(name)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise _fault(where, f"has a rope whose `{name}` is not a number above 0: {value!r}", "correct it")


def _numbers(value: Any) -> Iterator[Any]:
    """Yield the items of a list, or a value that is no list; nothing for None."""
    if isinstance(value, list):
        yield from value
    elif value is not None:
        yield value


def _refuse_two_ropes(data: dict[str, Any], where: str) -> None:
    """SpecDecError for a rope that is not an object, or for two ropes that disagree, which transformers accepts
    silently.

    A config from transformers 4 has `rope_theta` and `rope_scaling` at its top level, a config from transformers 5 has
    `rope_parameters`. A rope for one type of layer may differ from the common one.
    """
    for name in _ROPES_SAID:
        if not isinstance(rope := data.get(name) or {}, dict):
            raise _fault(where, f"has a rope that is not an object: `{name}` {rope!r}", "correct it")
    scaling, parameters = data.get("rope_scaling") or {}, data.get("rope_parameters") or {}
    found = [
        (f"rope_scaling.{name}", scaling[name], f"rope_parameters.{name}", parameters[name])
        for name in scaling
        if name in parameters
    ]
    for within, rope in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        for name in ("rope_theta", "original_max_position_embeddings"):
            if name in data and name in rope and not any(isinstance(value, dict) for value in rope.values()):
                found.append((name, data[name], f"{within}.{name}", rope[name]))
        if {"type", "rope_type"} <= set(rope) and rope["type"] not in _ALSO_CALLED.get(str(rope["rope_type"]), ()):
            found.append((f"{within}.type", rope["type"], f"{within}.rope_type", rope["rope_type"]))
    for first, one, second, other in found:
        if one != other:
            problem = f"has two conflicting ropes: `{first}` is {one!r}, and `{second}` {other!r}"
            raise _fault(where, problem, "leave out the one that is wrong")


def warn_of_unread_keys(config: PreTrainedConfig, data: dict[str, Any], where: str) -> None:
    """Warn of each key in a model's JSON, `data`, that has no effect on its language model, whose config is `config`.

    Whoever wrote the key had a model that computes differently, or misspelled a key that is read. A key has an effect
    if transformers' config class of the model has a field for it, or if a table above, or the model's family, lists it.
    """
    if found := list(_unread(config, data)):
        warnings.warn(
            f"`{where}` has values that neither transformers' {config.model_type} nor specdec reads, and that "
            f"change nothing: {', '.join(found)}",
            SpecDecWarning,
            stacklevel=4,
        )


def _unread(config: PreTrainedConfig, data: dict[str, Any], inside: str = "") -> Iterator[str]:
    """Yield each key that nothing reads, with its value; a key inside `text_config` as `text_config.KEY`.

    `num_experts` 8 in a Llama's config.json is yielded, since `LlamaConfig` has no such field.
    """
    known, family = _keys_read(config, data, inside), family_of(config.model_type)
    for name, value in data.items():
        says_nothing = value is None or value is False or value in ([], {}, "")
        if name in _WITHIN and isinstance(value, dict):
            yield from _unread(config, value, f"{inside}{name}.")
        elif name in _ROPES_SAID and isinstance(value, dict):
            yield from _unread_of_rope(config.model_type, value, f"{inside}{name}.")
        elif name in ("quantization_config", "compression_config") and isinstance(value, dict):
            yield from _unread_of_quantizer(value, f"{inside}{name}.")
        elif name in family.ignores:
            if not says_nothing and value != getattr(type(config), name, None):
                yield f"`{inside}{name}` {shown(value)}"
        elif not (says_nothing or name in known or _OF_NO_MODEL.search(name) or value == family.always.get(name)):
            yield f"`{inside}{name}` {shown(value)}"


def _keys_read(config: PreTrainedConfig, data: dict[str, Any], inside: str) -> set[str]:
    """Keys of config.json for which transformers' classes of this model have a field, or which their code reads."""
    model_type, own = str(data.get("model_type")), type(config)
    within = getattr(config, inside.rstrip(".").rpartition(".")[2], config) if inside else config
    whole = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else type(within)
    known = {*_OF_OTHERS, *_ALWAYS_READ, *family_of(config.model_type).reads}
    kinds: list[Any] = [own, whole, type(within)]
    for kind in kinds:
        if issubclass(kind, PreTrainedConfig):
            known |= _attributes_of(kind)
    if hasattr(config, "rope_parameters"):
        known |= _OF_EVERY_ROPE
    return known | _OF_IMAGES if "vision_config" in data else known


@cache
def _attributes_of(kind: Any) -> set[str]:
    """A config class's fields, their other names, and the properties that an instance computes (`qk_head_dim`)."""
    try:
        computed = set(vars(kind()))
    except Exception:  # a class that cannot be made from its defaults: its validators may raise anything
        computed = set()
    renamed = {*kind.attribute_map, *kind.attribute_map.values()}
    return {*inspect.signature(kind).parameters, *dir(kind), *kind.sub_configs} | renamed | computed


def _unread_of_rope(model_type: str, rope: dict[str, Any], inside: str) -> Iterator[str]:
    """Yield the keys of a rope that its type does not use; no type is `default`, as in transformers."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    known = set(_KEYS_OF_ROPES.get(kind) or itertools.chain(*_KEYS_OF_ROPES.values()))
    known |= {"rope_type", "type", *_OF_EVERY_ROPE, *family_of(model_type).reads}
    for name, value in rope.items():
        if isinstance(value, dict):  # a rope for one type of layers
            yield from _unread_of_rope(model_type, value, f"{inside}{name}.")
        elif value is not None and name not in known:
            yield f"`{inside}{name}` {shown(value)} in a rope of the type `{kind}`"


def _unread_of_quantizer(said: dict[str, Any], inside: str) -> Iterator[str]:
    known = _READ_OF_QUANTIZERS | _NOTES_OF_QUANTIZERS | _fields_of_quantizers()
    for name, value in said.items():
        says_nothing = value is None or value in ([], {}, "") or value == _ALWAYS_SO_OF_QUANTIZERS.get(name, ...)
        if name not in known and not says_nothing:
            yield f"`{inside}{name}` {shown(value)}"


@cache
def _fields_of_quantizers() -> set[str]:
    """Parameters of transformers' classes for `quantization_config`."""
    kinds = AUTO_QUANTIZATION_CONFIG_MAPPING.values()
    return {name for kind in kinds for name in inspect.signature(kind).parameters} - {"kwargs"}


def last_words(error: Exception) -> str:
    """The last line of an error's message, without its class's name: the cause in a chain of transformers' errors."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
    return re.sub(r"^\w+Error: ", "", line).partition(". Errors:")[0]


def _with_values(words: str, data: dict[str, Any]) -> str:
    """A validator's message, followed by the values of the keys that it names."""
    named = dict.fromkeys(re.findall(r"`(\w+)`", words))
    values = [f"`{name}` {data[name]!r}" for name in named if name in data and repr(data[name]) not in words]
    return f"{words}: {', '.join(values)}" if values else words


def _refuse_unsupported(config: PreTrainedConfig) -> None:
    kind, family = config.model_type, family_of(config.model_type)
    if config.is_encoder_decoder:
        raise SpecDecError(f"encoder-decoder models are not supported: {kind}", hint=SEE_MODELS)
    inner = getattr(config, "text_config", None)
    if inner is not None and inner.model_type != kind:  # else `_language_model_inside` would have taken it
        raise SpecDecError(
            f"transformers has no class for the language model inside {kind} alone: {inner.model_type}", hint=SEE_MODELS
        )
    if not has_causal_class(kind):
        raise SpecDecError(f"transformers has no causal language model for this model type: {kind}", hint=SEE_MODELS)
    if getattr(config, "quantization_config", None):
        raise SpecDecError(f"quantized weights are not supported: {kind}", hint="convert the unquantized model")
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):  # of images alone
        raise SpecDecError(f"bidirectional attention is not supported: {kind}", hint=SEE_MODELS)
    for refusal in family.refusals:
        if getattr(config, refusal.key, None) not in refusal.allowed:
            raise SpecDecError(f"{refusal.words}: {kind}", hint=SEE_MODELS)
    num_shared = getattr(config, "num_kv_shared_layers", None)
    if num_shared and (per_layer := getattr(config, "hidden_size_per_layer_input", None)) == 0:
        raise SpecDecError(
            f"transformers cannot compute a {kind} whose last {num_shared} layers share keys and values, and whose "
            f"layers have no inputs of their own: `hidden_size_per_layer_input` {per_layer}",
            hint=SEE_MODELS,
        )
    known = {"full_attention", "sliding_attention", "chunked_attention", *family.layer_types}
    if chooses_all_of_few(config):
        known.add(_INDEXED)
    foreign = sorted(set(getattr(config, "layer_types", None) or []) - known)
    if foreign:
        raise SpecDecError(f"layers of this type are not supported in {kind}: {foreign[0]}", hint=SEE_MODELS)
    own_class = model_class(config)
    if own_class._is_stateful and not family.layer_types:
        raise SpecDecError(f"state-space models are not supported: {kind}", hint=SEE_MODELS)
    # Some classes, such as those with states, support it undeclared; `model.probe_config` counts their layers.
    if not (own_class._supports_attention_backend or family.layer_types or family.hands_over):
        refuse_own_attention(kind)
    if "logits_to_keep" not in inspect.signature(own_class.forward).parameters:
        raise SpecDecError(
            f"the model cannot compute logits of chosen positions (`logits_to_keep`): {kind}", hint=SEE_MODELS
        )


def layers_that_keep(config: PreTrainedConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Numbers of the layers with keys and values, and numbers of the layers with a state."""
    config = config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None) if family_of(config.model_type).layer_types else None
    if types is None:
        idle = getattr(config, "cross_attention_layers", None) or ()  # they see images alone
        return tuple(i for i in range(getattr(config, "num_hidden_layers", 0)) if i not in idle), ()
    with_kv, with_state = (tuple(i for i, one in enumerate(types) if one in known) for known in (_WITH_KV, _WITH_STATE))
    return with_kv, with_state


def parse_language_model(data: dict[str, Any], where: str) -> tuple[PreTrainedConfig, dict[str, Any] | None]:
    """Read a config like `parse_pretrained_config`. For a multimodal model, such as Gemma 3, it returns the config of
    the language model inside, and that config's JSON.
    """
    if isinstance(data.get("thinker_config"), dict):  # Qwen-Omni's language model, beside the model that speaks
        data = data["thinker_config"]
    config = read_any_config(data, where)
    inner = _language_model_inside(config, data)
    if inner is not None:
        return parse_pretrained_config(inner, where), inner
    _refuse_unsupported(config)
    return config, None


def _language_model_inside(config: PreTrainedConfig, data: dict[str, Any]) -> dict[str, Any] | None:
    """JSON of the config inside; None if it has no class of its own, or the model is a language model itself."""
    inner = getattr(config, "text_config", None)
    if not isinstance(inner, PreTrainedConfig) or inner.model_type == config.model_type:
        return None
    same = family_of(inner.model_type).same_on_text or {"model_type": inner.model_type}
    model_type = same["model_type"]
    if not has_causal_class(model_type):
        return None
    given = data.get("text_config") or {}
    tokens = ("eos_token_id", "bos_token_id", "pad_token_id")
    outside = {key: data[key] for key in tokens if key in data and key not in given}
    # The whole model's config says whether the embeddings are the output layer too.
    tied = {key: data[key] for key in ("tie_word_embeddings",) if key in data}
    values: dict[str, Any] = PreTrainedConfig._encode_special_floats(inner.to_dict())
    return values | outside | tied | dict(same)


def chooses_all_of_few(config: PreTrainedConfig) -> bool:
    """True if the model's index chooses all of up to `index_topk` keys. GLM-5.3's index may leave out the last few."""
    return bool(getattr(config, "index_topk", None) and getattr(config, "index_kpool_always_select_tail", True))


def num_positions(config: PreTrainedConfig) -> int | None:
    """Number of positions that can be served; None if the config does not state it.

    Positions end where rotary factors no longer depend on a token's own position alone. `longrope` has two sets of
    factors, and transformers switches the whole sequence, computed K/V included, when it grows beyond
    `original_max_position_embeddings`; `dynamic` changes factors with every token beyond `max_position_embeddings`.
    PhiMoE keeps its first set and changes the scale, which in published models is the same number. Positions also end
    where an index would begin to leave out keys.
    """
    limits = [getattr(config, "max_position_embeddings", None), _positions_of_biases(config)]
    limits += [rope.get("original_max_position_embeddings") for rope in _ropes(config) if _changes(rope, config)]
    if _INDEXED in (getattr(config, "layer_types", None) or ()):
        limits.append(config.index_topk)
    return min((limit for limit in limits if limit is not None), default=None)


def _positions_of_biases(config: PreTrainedConfig) -> int | None:
    """Number of positions that have an attention bias in transformers' model (MPT); None without such a limit."""
    key = family_of(config.model_type).key_of_positions
    return None if key is None else getattr(config, key)


def _changes(rope: dict[str, Any], config: PreTrainedConfig) -> bool:
    """True if `longrope` has other factors, or another scale, for long sequences in transformers' model."""
    if family_of(config.model_type).longrope_changes_scale_alone:
        return _type(rope) == "longrope" and rope.get("long_mscale") != rope.get("short_mscale")
    return _type(rope) == "longrope"


def why_positions_end(config: PreTrainedConfig) -> str:
    """Reason for the limit of `num_positions`, for an error."""
    limit = num_positions(config)
    if limit in (getattr(config, "max_position_embeddings", None), _positions_of_biases(config)):
        return "the model has"
    chooses = limit == getattr(config, "index_topk", None)
    return "its attention sees before an index chooses among them" if chooses else "before its longrope factors change"


def wrong_turns(config: PreTrainedConfig) -> str:
    """A fault in the sizes of a config's rotary positions, such as an odd `rotary_dim`; empty if there is none."""
    if isinstance(odd := getattr(config, "rotary_dim", None), int) and odd % 2:
        return f"`rotary_dim` {odd} is odd, and positions turn pairs of numbers"
    rope = getattr(config, "rope_parameters", None) or {}
    sections = rope.get("mrope_section")
    if not isinstance(sections, list) or not all(isinstance(one, int) for one in sections):
        return ""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = int(head_dim * rope.get("partial_rotary_factor", 1)) // 2
    different = f"`mrope_section` {sections} is of {sum(sections)} pairs of numbers, and positions turn {pairs}"
    return different if sum(sections) != pairs else ""


def _ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The config's rotary parameters: one set for all layers, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [parameters] if "rope_type" in parameters else [one for one in parameters.values() if isinstance(one, dict)]


def _type(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type", "default"))
