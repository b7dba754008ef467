"""Extra and unusual files in a model's directory, and tensors that are no weights."""

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from runtime.errors import SpecDecError, SpecDecWarning
from runtime.files import read_json

_ADAPTER = "adapter_config.json"
# Numbers that transformers computes, and once saved: masks of GPT-2 and GPT-NeoX, rotary frequencies.
_COMPUTED = (".masked_bias", ".rotary_emb.inv_freq")
_MASKS = (".attn.bias", ".attention.bias")
_WRAPPERS = {
    "_orig_mod.": "torch.compile leaves it: save `model._orig_mod`",
    "module.": "DistributedDataParallel leaves it: save `model.module`",
}


def check_not_an_adapter(model_dir: Path) -> None:
    """SpecDecError for a directory of what changes a model (PEFT), without the model."""
    if (model_dir / _ADAPTER).is_file() and not (model_dir / "config.json").is_file():
        base = read_json(model_dir / _ADAPTER).get("base_model_name_or_path")
        raise SpecDecError(
            f"this is an adapter and no model (PEFT), made for {base}: {model_dir}",
            hint="merge it into its model and save that: PEFT's `merge_and_unload` and `save_pretrained`",
        )


def warn_of_adapter(model_dir: Path) -> None:
    """A warning where an adapter lies beside the model: transformers loads it too, where PEFT is installed."""
    if (model_dir / _ADAPTER).is_file():
        warnings.warn(
            f"an adapter next to the model is ignored: {model_dir / _ADAPTER}; to have it answer, merge it "
            "into the model (PEFT's `merge_and_unload`)",
            SpecDecWarning,
            stacklevel=4,
        )


def check_not_wrapped(names: Iterable[str], model_dir: Path) -> None:
    """SpecDecError where weights are saved under the names of what was around the model in training."""
    first = next(iter(names), "")
    for prefix, hint in _WRAPPERS.items():
        if first.startswith(prefix):
            raise SpecDecError(
                f"the names of the weights begin with `{prefix}`, which no model's do: {model_dir}",
                hint=f"{hint}, or save the weights again without it",
            )


def check_head(names: Iterable[str], config: Mapping[str, Any], head: str | None, *, is_tied: bool) -> None:
    """SpecDecError for a model of `config` whose layer that computes logits has no weight; transformers would draw one
    at random."""
    if head is not None and not is_tied and not any(name.startswith(f"{head}.") for name in names):
        raise SpecDecError(
            f"the model has no weight for its last layer, `{head}`, and by its config that is not its embeddings: "
            f"{config['model_type']}",
            hint="if they are, say `tie_word_embeddings: true` in config.json; else download or save the model again",
        )


def is_computed(name: str, shape: tuple[int, ...]) -> bool:
    """True if the tensor is no weight, but computed by transformers from the config."""
    return name.endswith(_COMPUTED) or (name.endswith(_MASKS) and len(shape) == 4)


def predicts_further(name: str, config: Mapping[str, Any]) -> bool:
    """True if the weight belongs to layers that predict more than the next token (MTP), which the model class lacks.

    DeepSeek V3 and GLM count them on after the model's own layers, others call them `mtp`.
    """
    parts = name.split(".")
    if "mtp" in parts[:3]:
        return True
    num_layers, num_further = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if not isinstance(num_layers, int) or not isinstance(num_further, int) or parts[:2] != ["model", "layers"]:
        return False
    return len(parts) > 2 and parts[2].isdigit() and num_layers <= int(parts[2]) < num_layers + num_further
