"""Directories of heads: EAGLE-3 heads, new or trained, in the form of `speculators`, which vLLM reads too; and trained
MTP heads, in the form of their model.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from runtime.checkpoint.quant.formats import without_quantization
from runtime.drafters.heads.head_config import HeadConfig, num_layers_of
from runtime.drafters.heads.head_model import EagleHead
from runtime.drafters.heads.mtp_head import ChainedMtp, MtpHead, kept_tensors_of_mtp, tensors_of_mtp
from runtime.engine.draft_vocab import rows_by_id
from runtime.util.errors import SpecDecError
from runtime.util.files import read_json, write_file, write_json

_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
_OTHERS = ("max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "hidden_act")
_QWENS = ("qwen3", "qwen3_moe")
_INITIAL_STD = 0.02
_NORMS = {"input_layernorm.weight": "hidden_norm.weight"}
"""A head's name for a norm of the target's layer: its own `input_layernorm` is for the embedding."""
_NOT_OF_LAYERS = (
    "draft_vocab_size",
    "eagle_config",
    "architectures",
    "transformers_version",
    "auto_map",
    "torch_dtype",
)


def read_states_of(num_layers: int) -> tuple[int, ...]:
    """The hidden states that a new head reads: EAGLE-3's usual three, or up to three of fewer than 9 layers."""
    if num_layers < 9:
        return tuple(sorted({min(1, max(num_layers - 2, 0)), num_layers // 2, num_layers - 1}))
    return 2, num_layers // 2, num_layers - 3


def new_head_config(target: dict[str, Any], directory: Path, draft_vocab_size: int) -> HeadConfig:
    """Config of a head with one layer like the target's; SpecDecError if the target's config lacks a size."""
    inner = target.get("text_config")
    target = inner if isinstance(inner, dict) else target
    layers = {key: target[key] for key in (*_SIZES, *_OTHERS) if target.get(key) is not None}
    missing = sorted({"hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"} - layers.keys())
    if missing:
        raise SpecDecError(
            f"a head cannot be made for this target, whose config has no `{missing[0]}`: {target.get('model_type')}",
            hint="a head that was published for it can be trained further",
        )
    layers["model_type"] = "qwen3" if target.get("model_type") in _QWENS else "llama"
    layers["num_hidden_layers"] = 1
    size = layers["hidden_size"]
    states = read_states_of(num_layers_of(target))
    return HeadConfig(directory, "eagle3", layers, size, size, 1, layers["vocab_size"], draft_vocab_size, states)


@dataclass(frozen=True)
class TargetWeights:
    """Weights that a new head begins with."""

    output_layer: Tensor  # (vocab, hidden)
    norm: Tensor | None
    """Weight of the target's last norm; None if the norm does not multiply by it."""
    layer: dict[str, Tensor]
    """Weights of the layer that reads the last of the head's hidden states, by their names in the layer."""


def new_tensors(config: HeadConfig, ids: Seq[int], target: TargetWeights, seed: int) -> dict[str, Tensor]:
    """Initial weights: the last hidden state is passed on with a little noise, the layer, the last norm and the output
    layer are the target's where shapes allow, other norms are 1, and all else is small random numbers. The layer's
    input has two halves, and the target's weights read the half with the hidden state.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shapes = {name: one.shape for name, one in EagleHead(config).named_parameters()}
        tensors = {
            name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * _INITIAL_STD
            for name, shape in shapes.items()
        }
    size = config.hidden_size
    tensors["fc.weight"][:, -size:] += torch.eye(size)
    tensors["lm_head.weight"] = target.output_layer[torch.tensor(ids)].float()
    if target.norm is not None:
        tensors["norm.weight"] = target.norm.float()
    for name, weight in target.layer.items():
        own = tensors.get(f"layers.0.{_NORMS.get(name, name)}")
        if own is not None and own.shape == weight.shape:
            own.copy_(weight)
        elif own is not None and own.shape == (len(weight), 2 * size):
            own[:, size:] = weight
    return tensors | _id_tables(ids, config.vocab_size)


def _id_tables(ids: Seq[int], vocab_size: int) -> dict[str, Tensor]:
    """`d2t` [draft vocab], the target's id less the head's id, and `t2d` [vocab], True for ids that the head has."""
    own = torch.tensor(ids)
    return {
        "d2t": own - torch.arange(len(ids)),
        "t2d": torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, own, value=True),
    }


def with_vocabulary(head: EagleHead, ids: Seq[int]) -> EagleHead:
    """The head itself, changed to draft only these of its ids; its output layer keeps their rows."""
    own, size = torch.tensor(ids), len(ids)
    rows = own if head.draft_ids is None else rows_by_id(head.draft_ids, head.config.vocab_size)[own]
    head.lm_head.weight = torch.nn.Parameter(head.lm_head.weight[rows].detach().clone())
    head.draft_ids = own
    head.config = replace(head.config, draft_vocab_size=size)
    return head


def drafted_ids(head: EagleHead) -> list[int]:
    """The target's ids that the head drafts, in the order of the head's ids."""
    ids = torch.arange(head.config.vocab_size) if head.draft_ids is None else head.draft_ids
    return [int(one) for one in ids]


def tensors_of(head: EagleHead, dtype: torch.dtype) -> dict[str, Tensor]:
    """The head's weights by `speculators`' names, without the embeddings, which are the target's."""
    tensors = {name: one.detach().to(dtype) for name, one in head.named_parameters()}
    if head.draft_ids is not None:
        tensors |= _id_tables(drafted_ids(head), head.config.vocab_size)
    return tensors


def write_mtp(directory: Path, head: MtpHead | ChainedMtp, dtype: torch.dtype) -> None:
    """Write a trained MTP head as its model's files have it, with the layers that it shares with the model, so that it
    can draft from this directory. Nothing is quantized, and the config says so.
    """
    learned = tensors_of_mtp(head, dtype)
    whole = kept_tensors_of_mtp(head.config, learned, dtype)
    # A layer's experts are parts of one tensor, which safetensors does not write.
    whole |= {name: one.clone(memory_format=torch.contiguous_format) for name, one in learned.items()}
    write_json(directory / "config.json", without_quantization(read_json(head.config.directory / "config.json")))
    write_file(directory / "model.safetensors", save(whole, {"format": "pt"}))


def write_head(
    directory: Path,
    config: HeadConfig,
    tensors: dict[str, Tensor],
    target: dict[str, Any],
    *,
    target_name: str,
    draft_len: int,
) -> None:
    """Write an EAGLE-3 head's `config.json` and `model.safetensors`. `target` is the target's `pretrained_config`."""
    layers = {key: value for key, value in config.layers.items() if key not in (*_NOT_OF_LAYERS, *config.flags)}
    content = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.hidden_states_of(num_layers_of(target))),
        "norm_before_residual": "norm_before_residual" in config.flags,
        **dict.fromkeys(sorted(config.flags), True),
        **({} if config.logit_scale == 1.0 else {"logit_scale": config.logit_scale}),
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": draft_len}],
            "verifier": {"name_or_path": target_name, "architectures": target.get("architectures") or []},
        },
    }
    write_json(directory / "config.json", content)
    whole = {name: one.contiguous() for name, one in tensors.items()}
    write_file(directory / "model.safetensors", save(whole, {"format": "pt"}))
