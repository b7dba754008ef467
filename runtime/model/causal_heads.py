"""Causal language models that transformers has only inside other models: their text model, and an output layer.

They are registered with transformers under the text model's config, so that they are found like all other models.
"""

import importlib
import sys
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationMixin, PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.integrations.moe import use_experts_implementation
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from runtime.model.attention import CACHE, KERNEL, PAGED, PROBE
from runtime.model.families.registry import family_of


def has_causal_class(model_type: str) -> bool:
    """True if there is a causal language model of this type; ours is registered if transformers has none."""
    if model_type not in CONFIG_MAPPING:
        return False
    config_class, family = CONFIG_MAPPING[model_type], family_of(model_type)
    if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING and family.causal_class is not None:
        module = importlib.import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
        found = getattr(module, family.causal_class)
        if (name := family.experts_class) is not None:
            # Another class: models that were made before keep the class whose experts know no implementation.
            ours = type(name, (getattr(module, name),), {"__module__": module.__name__})
            setattr(module, name, use_experts_implementation(ours))
            for one in (found, found.__bases__[0]):
                one._can_set_experts_implementation_cached_value = True  # which transformers reads in their code
        made = found if family.causal_class.endswith("ForCausalLM") else _with_head(found, config_class)
        # Without `exist_ok` transformers registers nothing for configs of its own.
        MODEL_FOR_CAUSAL_LM_MAPPING.register(config_class, made, exist_ok=True)  # type: ignore[arg-type]
    if family.weights_as is not None and get_checkpoint_conversion_mapping(model_type) is None:  # type: ignore[no-untyped-call]
        mapping = get_checkpoint_conversion_mapping(family.weights_as)  # type: ignore[no-untyped-call]
        # A language model inside another has the names of the language model alone (`model.names_in_whole`).
        names = (one for one in mapping if not isinstance(one, WeightConverter))
        inside = [one for one in names if family.is_published_alone and not one.source_patterns[0].startswith("^")]
        pieces: list[Any] = [one for one in mapping if isinstance(one, WeightConverter)]
        register_checkpoint_conversion_mapping(model_type, [*inside, *pieces])
    return config_class in MODEL_FOR_CAUSAL_LM_MAPPING


def model_class(config: PreTrainedConfig) -> Any:
    """The class for the config's model whose attention can be replaced by ours."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    for name, by_implementation in vars(sys.modules[found.__module__]).items():
        if name.endswith("_ATTENTION_CLASSES"):  # GPT-J's and GPT-Neo's: a class for each implementation
            for ours in (KERNEL, PAGED, PROBE):
                by_implementation.setdefault(ours, by_implementation["eager"])
    return found


def _with_head(text_model: type[Any], config_class: type[PreTrainedConfig]) -> type[Any]:
    """A causal language model class that adds an output layer to a text model's class."""
    (base, *_) = text_model.__bases__

    class WithHead(_Causal, base, GenerationMixin):  # type: ignore[misc, valid-type]
        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            self.model = text_model(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

    WithHead.__name__ = WithHead.__qualname__ = f"{text_model.__name__}WithHead"
    WithHead.__module__ = text_model.__module__  # transformers reads that module's code
    WithHead.config_class = config_class
    return WithHead


class _Causal:
    base_model_prefix = "model"
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}
    config: Any
    model: nn.Module
    lm_head: nn.Linear

    def forward(
        self, input_ids: Tensor | None = None, *, logits_to_keep: int | Tensor = 0, **kwargs: Any
    ) -> CausalLMOutputWithPast:
        output = self.model(input_ids=input_ids, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, kept])
        kept_states: dict[str, Any] = {CACHE: getattr(output, CACHE, None)}
        return CausalLMOutputWithPast(logits=_scaled(logits, self.config), **kept_states)


def _scaled(logits: Tensor, config: Any) -> Tensor:
    """Logits [..., vocab], scaled as in the multimodal model: Granite divides them, Muse multiplies and caps them."""
    logits = logits * getattr(config, "output_multiplier", 1) / getattr(config, "logits_scaling", 1)
    softcap = getattr(config, "final_logit_softcapping", None)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
