"""A family that nobody has heard of, with attention of its own, is served by one `Family` row.

Each head has a sink, a logit without a value; each layer has a scale of its scores. Its eager forward calls none of
transformers' attention functions, so that no step can hand it a paged cache.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from sentences import Said
from test_families import check_greedy
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, repeat_kv

from runtime.model.families.family import Family, Refusal
from runtime.model.families.registry import register, unregister
from runtime.model.model import probe_config
from runtime.model.pretrained import parse_pretrained_config, warn_of_unread_keys
from runtime.model.replaced import Replaced, attends_by_ours
from runtime.util.errors import SpecDecError


class SinkholeConfig(LlamaConfig):
    model_type = "sinkhole"
    layer_scales: list[float] | None = None


class SinkholeAttention(LlamaAttention):
    """The family's attention as its authors would publish it."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.sinks = nn.Parameter(torch.zeros(config.num_attention_heads))
        self.scale_of_layer = config.layer_scales[layer_idx]

    def heads(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """(B, H, T, D) queries, (B, Hk, T, D) keys and values."""
        query, key, value = (
            one(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        return query, key, value

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        query, key, value = self.heads(hidden_states, position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        key, value = (repeat_kv(one, self.num_key_value_groups) for one in (key, value))
        scores = query @ key.mT * self.scale_of_layer
        if attention_mask is not None:
            scores = scores + attention_mask
        beside = self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, beside], -1).softmax(-1)[..., :-1]
        return self.o_proj((weights @ value).transpose(1, 2).flatten(2)), weights


class SinkholeForCausalLM(LlamaForCausalLM):
    config_class = SinkholeConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for i, layer in enumerate(self.model.layers):
            layer.self_attn = SinkholeAttention(config, i)
        self.post_init()


class PagedSinkholeAttention(Replaced):
    """The same by transformers' interface, where a step's attention computes."""

    heads: Any
    o_proj: nn.Linear
    sinks: Tensor
    scale_of_layer: float

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        if not attends_by_ours(self.model_config):
            return super().forward(hidden_states, **kwargs)
        heads = self.heads(hidden_states, kwargs.pop("position_embeddings"))
        attend, mask = ALL_ATTENTION_FUNCTIONS[self.model_config._attn_implementation], kwargs.pop("attention_mask")
        output = attend(self, *heads, mask, scaling=self.scale_of_layer, s_aux=self.sinks, **kwargs)[0]
        return self.o_proj(output.flatten(2)), None


FAMILY = Family(
    "sinkhole",
    causal_class="SinkholeForCausalLM",
    reads={"sinkhole_release"},
    refusals=(Refusal("attention_bias", (None, False), "nobody has trained a bias beside sinks"),),
    replaced={"SinkholeAttention": PagedSinkholeAttention},
)


@pytest.fixture
def known_to_transformers() -> Iterator[None]:
    """Config class, as the package of the family's authors registers it; its model class is found by the row."""
    CONFIG_MAPPING.register("sinkhole", SinkholeConfig)
    yield
    del CONFIG_MAPPING._extra_content["sinkhole"]
    MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.pop(SinkholeConfig, None)


@pytest.fixture
def family(known_to_transformers: None) -> Iterator[Family]:
    register(FAMILY)
    yield FAMILY
    unregister("sinkhole")


def sinkhole_config(**settings: Any) -> SinkholeConfig:
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    sizes |= {"num_hidden_layers": 3, "num_key_value_heads": 2, "max_position_embeddings": 256}
    scales = {"layer_scales": [0.1, 0.25, 0.6], "initializer_range": 0.3}
    return SinkholeConfig(**sizes | scales | {"pad_token_id": 0} | settings)


def sinkhole_model() -> PreTrainedModel:
    torch.manual_seed(5)
    model = SinkholeForCausalLM._from_config(sinkhole_config(), attn_implementation="eager").eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.add_(torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("compiler", ["none", pytest.param("aot", marks=pytest.mark.slow)])
def test_a_family_with_attention_of_its_own_is_served_by_one_row(
    compiler: str, family: Family, make_engine: Any
) -> None:
    model = sinkhole_model()
    check_greedy(make_engine(model, compiler=compiler), model)


def test_without_its_row_the_family_is_refused(known_to_transformers: None, said: Said) -> None:
    with pytest.raises(SpecDecError) as error:
        parse_pretrained_config(sinkhole_config().to_dict(), "config.json")
    said(error, "sinkhole")


def test_without_its_class_the_attention_is_refused(known_to_transformers: None, said: Said) -> None:
    register(replace(FAMILY, replaced={}))
    try:
        with pytest.raises(SpecDecError) as error:
            probe_config(parse_pretrained_config(sinkhole_config().to_dict(), "config.json"))
    finally:
        unregister("sinkhole")
    said(error, "sinkhole")


def test_a_row_says_which_keys_mean_something_and_which_values_are_refused(family: Family, said: Said) -> None:
    data = sinkhole_config().to_dict() | {"sinkhole_release": 2}
    warn_of_unread_keys(parse_pretrained_config(data, "config.json"), data, "config.json")  # a warning is an error
    with pytest.raises(SpecDecError) as error:
        parse_pretrained_config(data | {"attention_bias": True}, "config.json")
    said(error, "nobody has trained a bias beside sinks: sinkhole")
