"""Trained drafters (heads) as modules: layers of transformers' own, over the pages of a `HeadCache`.

Of a token a head takes the pair of its embedding and what it knows of the token before: the target's hidden states, or
in a draft its own output. It gives its output, from which `logits` predicts the next token, and which takes the place
of the hidden states when the draft goes on.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from runtime.batch import Batch
from runtime.compiler.attention import PAGED, PagedInputs
from runtime.config import LayerShape
from runtime.errors import SpecDecError
from runtime.heads.head_config import HeadConfig
from runtime.kv_cache import KVPool
from runtime.locks import MODEL_INIT_LOCK, quiet_transformers
from runtime.source import load_tensors, read_tensors

_OTHER_MODEL = "config.json and weights are of two heads; download the head again"


class PagedPairs(PagedInputs):
    """Inputs of a head's attention: a sequence's first token has no pair, and no key that a query may see."""

    def mask(self, sliding_window: int | None, attention_chunk: int | None, num_groups: int) -> Tensor:
        visible = super().mask(sliding_window, attention_chunk, num_groups)
        return visible & (torch.arange(visible.shape[-1], device=visible.device) > 0)


class Head(Protocol):
    """A head in memory."""

    config: HeadConfig

    @property
    def state_size(self) -> int: ...

    @property
    def kv_layers(self) -> tuple[LayerShape, ...]: ...

    def reduce(self, states: Tensor) -> Tensor: ...

    def __call__(self, batch: Batch, states: Tensor, pool: KVPool) -> Tensor:
        """(B x Q, state_size) outputs of the batch's tokens, whose states before them are (B x Q, state_size)."""
        ...

    def logits(self, outputs: Tensor) -> Tensor:
        """(T, vocab) of (T, state_size) outputs; -inf for tokens that it never drafts."""
        ...


class EagleHead(nn.Module):
    """An EAGLE-3 head (arXiv 2503.01840): its first layer attends over embedding and hidden state side by side."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            model = _layers_of(config)
            self.layers, self.norm = model.layers, model.norm
            first, own, size = self.layers[0], config.hidden_size, config.target_hidden_size
            for name in ("q_proj", "k_proj", "v_proj"):
                layer = getattr(first.self_attn, name)
                wide = nn.Linear(2 * own, layer.out_features, bias=layer.bias is not None)
                setattr(first.self_attn, name, wide)
            norm = type(first.input_layernorm)
            eps: float = model.config.rms_norm_eps
            first.hidden_norm = norm(own, eps=eps)
            num_states = 3 if config.hidden_states is None else len(config.hidden_states)
            self.fc = nn.Linear(num_states * size, own, bias=False)
            self.lm_head = nn.Linear(own, config.draft_vocab_size, bias=False)
            if "norm_before_fc" in config.flags:
                self.input_norm = norm(num_states * size, eps=eps)
            if "fc_norm" in config.flags:
                self.fc_norm = nn.ModuleList(norm(size, eps=eps) for _ in range(num_states))
        self.rotary_emb = _rotary_of(model)
        self.embedding: Tensor
        self.target_ids: Tensor | None = None
        """(draft vocabulary,) ids of the target; None: all, in their order."""

    @property
    def state_size(self) -> int:
        return self.config.hidden_size

    @property
    def kv_layers(self) -> tuple[LayerShape, ...]:
        return tuple(_kv_shape(layer.self_attn, i) for i, layer in enumerate(self.layers))

    def reduce(self, states: Tensor) -> Tensor:
        if "norm_before_fc" in self.config.flags:
            states = self.input_norm(states)
        if "fc_norm" in self.config.flags:
            parts = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        reduced: Tensor = self.fc(states)
        return reduced

    def forward(self, batch: Batch, states: Tensor, pool: KVPool) -> Tensor:
        attention = _attention_inputs(batch, pool, states, self.rotary_emb)
        first, states = self.layers[0], states[None]
        normed = first.hidden_norm(states)
        residual = states if "norm_before_residual" not in self.config.flags else normed
        embedded = F.embedding(batch.input_ids.reshape(1, -1), self.embedding)
        pairs = torch.cat([first.input_layernorm(embedded), normed], -1)
        attended, _ = first.self_attn(hidden_states=pairs, **attention)
        hidden = residual + attended
        hidden = hidden + first.mlp(first.post_attention_layernorm(hidden))
        for layer in list(self.layers)[1:]:
            hidden = layer(hidden, **attention)
        if "norm_output" in self.config.flags:
            hidden = self.norm(hidden)
        outputs: Tensor = hidden[0]
        return outputs

    def logits(self, outputs: Tensor) -> Tensor:
        normed = outputs if "norm_output" in self.config.flags else self.norm(outputs)
        drafted: Tensor = self.lm_head(normed) * self.config.logit_scale
        if self.target_ids is None:
            return drafted
        logits = drafted.new_full((len(drafted), self.config.vocab_size), -torch.inf)
        logits[:, self.target_ids] = drafted
        return logits


def load_head(config: HeadConfig, target_embedding: Tensor | None, dtype: torch.dtype) -> EagleHead:
    """The head with its weights on the CPU; `target_embedding` (vocab, hidden) for one that has none of its own.

    SpecDecError where weights are missing, or do not have the shapes that its config says.
    """
    entries = {_own_name(one.name): one for one in read_tensors(config.directory)}
    tensors = dict(zip(entries, load_tensors(list(entries.values())), strict=True))
    head = EagleHead(config)
    embedding, offsets = tensors.pop("embed_tokens.weight", None), tensors.pop("d2t", None)
    wanted = dict(head.named_parameters())
    _check_weights(config, wanted, tensors)
    head.load_state_dict({name: tensors[name].to(dtype) for name in wanted}, assign=True)
    head.embedding = _embedding(config, embedding, target_embedding).to(dtype)
    head.target_ids = _target_ids(config, offsets)
    return head.requires_grad_(requires_grad=False).eval()


def _own_name(name: str) -> str:
    name = name.removeprefix("model.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def _check_weights(config: HeadConfig, wanted: dict[str, nn.Parameter], found: dict[str, Tensor]) -> None:
    if missing := sorted(wanted.keys() - found.keys()):
        raise SpecDecError(
            f"the head lacks {len(missing)} of its weights, such as {missing[0]}: {config.directory}", hint=_OTHER_MODEL
        )
    layers = sorted(name for name in found.keys() - wanted.keys() if name.startswith("layers."))
    if layers:
        raise SpecDecError(
            f"the head has {len(layers)} weights that its config does not speak of, such as {layers[0]}: "
            f"{config.directory}",
            hint=_OTHER_MODEL,
        )
    for name, parameter in wanted.items():
        if parameter.shape != found[name].shape:
            raise SpecDecError(
                f"the head has {name} of {list(found[name].shape)}, and by its config it is of "
                f"{list(parameter.shape)}: {config.directory}",
                hint=_OTHER_MODEL,
            )


def _embedding(config: HeadConfig, own: Tensor | None, target: Tensor | None) -> Tensor:
    found = target if own is None else own
    if found is None:
        raise SpecDecError(
            f"the head has no embeddings, and its target's are not to be had as they are: {config.directory}",
            hint="take a head with `embed_tokens.weight`",
        )
    if tuple(found.shape) != (config.vocab_size, config.hidden_size):
        raise SpecDecError(
            f"the head reads embeddings of {[config.vocab_size, config.hidden_size]}, and "
            f"{'the target has' if own is None else 'its own are'} of {list(found.shape)}: {config.directory}",
            hint="it was trained for another target" if own is None else _OTHER_MODEL,
        )
    return found


def _target_ids(config: HeadConfig, offsets: Tensor | None) -> Tensor | None:
    """Target ids by the head's: `d2t` has the distance of each."""
    size = config.draft_vocab_size
    if offsets is None:
        if size == config.vocab_size:
            return None
        raise SpecDecError(
            f"the head drafts {size} of {config.vocab_size} ids, and has no `d2t` that says which: {config.directory}",
            hint=_OTHER_MODEL,
        )
    if offsets.shape != (size,) or offsets.is_floating_point():
        raise SpecDecError(
            f"the head's `d2t` is {str(offsets.dtype).removeprefix('torch.')} {list(offsets.shape)}, and not a whole "
            f"number for each of {size} ids: {config.directory}",
            hint=_OTHER_MODEL,
        )
    ids = torch.arange(size) + offsets.long()
    outside = ids[(ids < 0) | (ids >= config.vocab_size)]
    if len(outside):
        raise SpecDecError(
            f"the head's `d2t` points outside the target's vocabulary of {config.vocab_size}: {int(outside[0])}, "
            f"in {config.directory}",
            hint="it was trained for another target",
        )
    if len(set(ids.tolist())) < size:
        raise SpecDecError(f"the head's `d2t` names an id of the target twice: {config.directory}", hint=_OTHER_MODEL)
    return ids


def _layers_of(config: HeadConfig) -> Any:
    """A model without memory, of which the layers, the norm and the rotary embedding are taken."""
    settings = {key: value for key, value in config.layers.items() if key not in ("model_type", "architectures")}
    try:
        pretrained = AutoConfig.for_model(str(config.layers["model_type"]), **settings)
        with MODEL_INIT_LOCK, quiet_transformers():
            model: PreTrainedModel = AutoModel.from_config(pretrained, attn_implementation=PAGED)  # type: ignore[no-untyped-call]
        first: Any = model.layers[0]  # type: ignore[index]
        assert all(hasattr(first, name) for name in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"))
    except Exception as error:  # whatever transformers says of a config
        raise SpecDecError(
            f"the head's layers cannot be made by its config.json, which is of {config.layers['model_type']}: "
            f"{config.directory}",
            hint="layers as Llama's and Qwen3's are supported",
        ) from error
    return model


def _rotary_of(model: Any) -> nn.Module:
    """Its own, with numbers: those of a model without memory have none."""
    rotary: nn.Module = type(model.rotary_emb)(model.config)
    return rotary


def _kv_shape(attention: Any, layer: int) -> LayerShape:
    config: PreTrainedConfig = attention.config
    heads: int = config.num_key_value_heads
    return LayerShape(layer, heads, attention.head_dim, attention.head_dim, None)


def _attention_inputs(batch: Batch, pool: KVPool, states: Tensor, rotary: nn.Module) -> dict[str, Any]:
    """Arguments of layers beside the first."""
    numbers = tuple(range(len(pool.keys)))
    pairs = PagedPairs(pool.keys, pool.values, [], batch.positions, batch.slot_mapping, batch.block_tables, numbers)
    positions = batch.positions.reshape(1, -1)
    return {
        "position_embeddings": rotary(states[None], positions),
        "attention_mask": None,
        "paged": pairs,
    }
