"""Gemma 4's assistants as heads: a few layers without keys and values of their own, which read the target's keys and
values. The input for a token is its embedding in the target, and a state of the token before: the target's last hidden
state, or within a draft the assistant's own output. All tokens of a draft stand at one position, the position of the
sequence's last token, and attend to the keys and values that the target has computed, in the last layer of each kind
that stores them (transformers' `gemma4_assistant`, and `SinglePositionMultiTokenCandidateGenerator`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MODEL_MAPPING

from runtime.checkpoint.config import EngineConfig, LayerShape
from runtime.checkpoint.quant.planning import load_numbers
from runtime.checkpoint.source import read_tensors
from runtime.core.batch import Batch
from runtime.core.kv_cache import KVPool
from runtime.drafters.heads.head_config import HeadConfig, language_model, num_layers_of
from runtime.drafters.heads.paged_head import PagedHead
from runtime.engine.draft_vocab import among_all
from runtime.model.attention import KERNEL, PAGED, PagedInputs
from runtime.model.pretrained import read_any_config
from runtime.util.errors import SpecDecError
from runtime.util.locks import MODEL_INIT_LOCK, quiet_transformers

_SLIDING = "sliding_attention"


class AssistantHead(PagedHead):
    """A Gemma 4 assistant. An output is the state that replaces the target's within a draft, followed by the state that
    logits are made from: [tokens, target's width + own width].
    """

    uses_kernels, reads_target, attention = False, True, KERNEL
    first_token, keeps_outputs, drafts_at_once, longest_draft = 1, False, False, None
    embedding: Tensor
    draft_ids: Tensor | None
    token_ordering: Tensor
    embedding_scale: float
    """Factor of the embeddings, rounded to the dtype as the target's is."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config, self.places = config, tuple[int, ...]()
        self.shapes = dict[str, LayerShape]()
        own: Any = read_any_config(config.layers, str(config.directory / "config.json"))
        with torch.device("meta"):
            self.model = _layers(own, config)
            size, width = config.hidden_size, config.target_hidden_size
            self.pre_projection = nn.Linear(2 * width, size, bias=False)
            self.post_projection = nn.Linear(size, width, bias=False)
            if "centroids" in config.flags:
                self.centroids = nn.Linear(size, own.num_centroids, bias=False)
                self.rows = nn.Parameter(torch.empty(config.vocab_size, size))
                self.register_buffer("token_ordering", torch.empty(config.vocab_size, dtype=torch.long))
            else:
                self.lm_head = nn.Linear(size, config.vocab_size, bias=False)
        self.num_centroids: int = own.num_centroids
        self.num_chosen: int = own.centroid_intermediate_top_k
        self.model.embed_tokens = nn.Identity()  # the target's are read
        self.model.rotary_emb = type(self.model.rotary_emb)(self.model.config)  # with numbers
        self.register_buffer("embedding", None, persistent=False)
        self.register_buffer("draft_ids", None, persistent=False)

    @property
    def state_size(self) -> int:
        return self.config.target_hidden_size

    @property
    def kv_layers(self) -> tuple[LayerShape, ...]:
        return ()

    def read_layers_of(self, target: EngineConfig) -> None:
        """Choose the target's layers whose keys and values are read: the last layer of each kind that stores them.
        SpecDecError if its keys do not fit the assistant's queries.
        """
        shared = language_model(target.pretrained_config).get("num_kv_shared_layers") or 0
        end = num_layers_of(target.pretrained_config) - shared
        places = []
        for layer in self.model.layers:
            attention, kind = layer.self_attn, layer.self_attn.layer_type
            found = [
                (place, one)
                for place, one in enumerate(target.layers)
                if one.layer < end and (one.sliding_window is not None) == (kind == _SLIDING)
            ]
            heads: int = attention.config.num_attention_heads
            if not found or heads % found[-1][1].num_kv_heads or found[-1][1].key_head_dim != attention.head_dim:
                has = f"heads of {found[-1][1].key_head_dim}" if found else "none"
                raise SpecDecError(
                    f"the assistant reads keys of {kind} with heads of {attention.head_dim}, and the target has "
                    f"{has}: {self.config.directory}",
                    hint="it was trained for another target",
                )
            places.append(found[-1][0])
            self.shapes[kind] = found[-1][1]
        self.places = tuple(places)

    def outputs_at(self, ids: Tensor, states: Tensor, positions: Tensor, **attention: Any) -> Tensor:
        """Outputs for tokens at the position of the sequence's last token. Of the states, the first numbers are read,
        as many as the target's are wide.
        """
        embedded = F.embedding(ids, self.embedding) * self.embedding_scale
        inputs = self.pre_projection(torch.cat([embedded, states[..., : self.config.target_hidden_size]], -1))
        output = self.model(
            inputs_embeds=inputs,
            position_ids=positions,
            attention_mask=dict.fromkeys(self.shapes),
            shared_kv_states={kind: self._nothing(one, inputs) for kind, one in self.shapes.items()},
            use_cache=False,
            **attention,
        )
        hidden: Tensor = output.last_hidden_state
        return torch.cat([self.post_projection(hidden), hidden], -1)

    def pages(self, batch: Batch, pool: KVPool) -> PagedInputs:
        """The target's pages of the layers that are read. The query sees all tokens before the last token, which has no
        keys yet. Attention writes its own new keys into the null block, which nothing reads.
        """
        keys, values = ([part[i] for i in self.places] for part in (pool.keys, pool.values))
        scales = [pool.scales[i] for i in self.places] if pool.scales else []
        nowhere = torch.zeros_like(batch.slot_mapping)
        layers = tuple(range(len(self.places)))
        return PagedInputs(keys, values, scales, batch.positions - 1, nowhere, batch.block_tables, layers)

    def _nothing(self, shape: LayerShape, like: Tensor) -> tuple[Tensor, Tensor]:
        """A key and a value of zeros for each token: transformers' layers want some beside the pages."""
        zeros = torch.zeros_like(like[..., :1])[:, None]
        sizes = shape.key_head_dim, shape.value_head_dim
        key, value = (zeros.expand(-1, shape.num_kv_heads, -1, size).contiguous() for size in sizes)
        return key, value

    def logits(self, outputs: Tensor, num_drafted: int = 0) -> Tensor:
        hidden = outputs[:, self.config.target_hidden_size :]
        if "centroids" not in self.config.flags:
            return among_all(self.lm_head(hidden), self.draft_ids, self.config.vocab_size)
        chosen = self.centroids(hidden).topk(self.num_chosen).indices
        ids = self.token_ordering.view(self.num_centroids, -1)[chosen].flatten(1)
        drafted = (self.rows[ids] @ hidden[:, :, None])[..., 0]
        return drafted.new_full((len(hidden), self.config.vocab_size), -torch.inf).scatter_(1, ids, drafted)


def _layers(config: Any, head: HeadConfig) -> Any:
    """transformers' text model in which every layer reads the keys and values of a layer elsewhere, which its config
    cannot express.
    """
    text, n = config.get_text_config(), head.num_layers
    kind = type(text)
    text.__class__ = type(kind.__name__, (kind,), {"kv_sharing_modes": ["reuse"] * n, "__module__": kind.__module__})
    with MODEL_INIT_LOCK, quiet_transformers():
        model_class: Any = MODEL_MAPPING[kind]
        model = model_class._from_config(text, attn_implementation=PAGED)
    model.first_kv_shared_layer_idx = -1  # from there on transformers would leave tokens out
    for layer in model.layers:
        if layer.self_attn.sliding_window is not None:
            # As transformers' mask has it: these keys, and one more in the place of the token's own.
            layer.self_attn.sliding_window += 1
    return model


def load_assistant(config: HeadConfig, embedding: Tensor | None, dtype: torch.dtype) -> AssistantHead:
    """Load the assistant; `embedding` [vocab, hidden] is the target's. SpecDecError if the target's is not there, or if
    the files lack a weight or have it in another shape.
    """
    where, width = config.directory, config.target_hidden_size
    if embedding is None or tuple(embedding.shape) != (config.vocab_size, width):
        raise SpecDecError(
            f"an assistant reads its target's embeddings, and the engine has them quantized only: {where}",
            hint="quantize the target without its embeddings, or choose another drafter",
        )
    head = AssistantHead(config)
    entries = {_own_name(one.name, "centroids" in config.flags): one for one in read_tensors(where)}
    wanted = head.state_dict()
    for name, tensor in wanted.items():
        found = entries.get(name)
        if found is None or tuple(found.shape) != tuple(tensor.shape):
            has = "lacks" if found is None else f"has, of {list(found.shape)} and not {list(tensor.shape)},"
            raise SpecDecError(
                f"the assistant {has} weights of its layers: {name}, in {where}",
                hint="config.json and weights belong to two heads; download the head again",
            )
    tensors = load_numbers([entries[name] for name in wanted])
    head.load_state_dict(
        {
            name: one.to(dtype) if one.is_floating_point() else one.long()
            for name, one in zip(wanted, tensors, strict=True)
        },
        assign=True,
    )
    head.embedding = embedding.to(dtype)
    head.embedding_scale = float(torch.tensor(width**0.5).to(dtype))
    if "centroids" in config.flags and sorted(head.token_ordering.tolist()) != list(range(config.vocab_size)):
        raise SpecDecError(
            f"the assistant's `token_ordering` does not have each id once: {where}", hint="download the head again"
        )
    return head


def _own_name(name: str, has_centroids: bool) -> str:
    if name in ("lm_head.weight", "model.embed_tokens.weight"):
        return "rows" if has_centroids else "lm_head.weight"
    return name.removeprefix("masked_embedding.")
