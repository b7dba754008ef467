"""DFlash and DSpark: heads that draft a block of tokens in one pass (arXiv 2602.06036, 2607.05147).

For every token that the target has computed, each layer has a key and a value, projected from the target's reduced
hidden states. A block is the embedding of the sequence's last token, the anchor, followed by mask tokens. A block's
tokens attend to all these keys and to each other; in layers with a window, only to tokens before them. Their own keys
are overwritten once the target has decided on the tokens.

DSpark adds to a slot's logits a term that depends on the token before, token by token, and predicts the chance that a
slot's token is accepted.
"""

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.checkpoint.config import LayerShape
from runtime.core.batch import Batch
from runtime.core.kv_cache import KVPool
from runtime.drafters.heads.head_config import BlockConfig, HeadConfig
from runtime.drafters.heads.paged_head import kv_shapes
from runtime.engine.draft_vocab import among_all
from runtime.model.attention import KERNEL, PagedInputs, write_kv


class BlockHead(nn.Module):
    """A DFlash or DSpark head. `model` has its layers, its norm and its rotary embedding, on `meta`."""

    uses_kernels = reads_target = False
    attention, first_token, keeps_outputs, drafts_at_once = KERNEL, 0, False, True
    embedding: Tensor
    draft_ids: Tensor | None

    def __init__(self, config: HeadConfig, model: Any) -> None:
        super().__init__()
        assert config.block is not None and config.hidden_states is not None and config.block.size is not None
        self.config, self.block = config, config.block
        self.longest_draft = self.block.num_drafts(config.block.size)
        own, num_states, rank = config.hidden_size, len(config.hidden_states), self.block.markov_rank
        self.rotary_emb = type(model.rotary_emb)(model.config)  # with numbers
        with torch.device("meta"):
            self.layers, self.norm = model.layers, model.norm
            self.fc = nn.Linear(num_states * config.target_hidden_size, own, bias=False)
            self.hidden_norm = type(model.norm)(own, eps=model.config.rms_norm_eps)
            self.lm_head = nn.Linear(own, config.draft_vocab_size, bias=False)
            if rank:
                self.markov_w1 = nn.Embedding(config.vocab_size, rank)
                self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
            if self.block.markov == "gated":
                self.gate_proj = nn.Linear(own + rank, rank)
            if self.block.confidence != "none":
                self.confidence = nn.Linear(own + rank * (self.block.confidence == "markov"), 1)
        self.register_buffer("embedding", None, persistent=False)
        self.register_buffer("draft_ids", None, persistent=False)

    @property
    def state_size(self) -> int:
        return self.config.hidden_size

    @property
    def kv_layers(self) -> tuple[LayerShape, ...]:
        return kv_shapes(self.layers)

    def reduce(self, states: Tensor) -> Tensor:
        reduced: Tensor = self.hidden_norm(self.fc(states))
        return reduced

    def see(self, batch: Batch, states: Tensor, pool: KVPool) -> None:
        """Write keys and values for a batch's tokens into the pool; `states` [B x Q, state_size] are the target's
        reduced hidden states of these tokens.
        """
        cos, sin = self.rotary_emb(states[None], batch.positions.reshape(1, -1))
        paged = _pages(batch, pool, batch.positions)
        for place, layer in enumerate(self.layers):
            attention = layer.self_attn
            key, value = (
                one(states).view(1, len(states), -1, attention.head_dim) for one in (attention.k_proj, attention.v_proj)
            )
            key = attention.k_norm(key) if hasattr(attention, "k_norm") else key
            rotated = _rotary_function(attention)(key.transpose(1, 2), key.transpose(1, 2), cos, sin)[1]
            write_kv(paged, place, rotated[0], value.transpose(1, 2)[0])

    def forward(self, batch: Batch, states: Tensor, pool: KVPool, num_drafted: int = 0) -> Tensor:
        """Outputs [B x Q, hidden] of blocks, a block a row. `states` is not read: `see` has stored the keys."""
        hidden = F.embedding(batch.input_ids.reshape(1, -1), self.embedding)
        last = batch.positions.amax(1, keepdim=True).expand_as(batch.positions)
        both_ways, one_way = _pages(batch, pool, last.contiguous()), _pages(batch, pool, batch.positions)
        rotary = self.rotary_emb(hidden, batch.positions.reshape(1, -1))
        for layer in self.layers:
            has_window = getattr(layer.self_attn, "sliding_window", None) is not None
            paged = one_way if has_window else both_ways
            hidden = layer(hidden, attention_mask=None, position_embeddings=rotary, paged=paged)
        normed: Tensor = self.norm(hidden)[0]
        return normed

    def logits(self, outputs: Tensor, num_drafted: int = 0) -> Tensor:
        """Logits without the term that depends on the token before (which `behind` adds)."""
        return among_all(self.lm_head(outputs), self.draft_ids, self.config.vocab_size)

    def behind(self, logits: Tensor, outputs: Tensor, last_ids: Tensor) -> Tensor:
        """Logits with the term that depends on the tokens before, `last_ids` [tokens], if the head has this term."""
        if not self.block.markov_rank:
            return logits
        before = self.markov_w1(last_ids)
        if self.block.markov == "gated":
            before = torch.sigmoid(self.gate_proj(torch.cat([outputs, before], -1))) * before
        return logits + among_all(self.markov_w2(before), self.draft_ids, self.config.vocab_size)

    def confidences(self, outputs: Tensor, last_ids: Tensor) -> list[float] | None:
        """Predicted chances that the next tokens are accepted; None if the head predicts no chances."""
        if self.block.confidence == "none":
            return None
        features = [outputs] if self.block.confidence == "hidden" else [outputs, self.markov_w1(last_ids)]
        chances: list[float] = torch.sigmoid(self.confidence(torch.cat(features, -1)).float())[:, 0].tolist()
        return chances


def num_slots(block: BlockConfig, num_drafts: int, room: int) -> int:
    """Number of slots in a block for `num_drafts` draft tokens; `room` is the number of free slots in the sequence's
    pages from the last token on.
    """
    assert block.size is not None
    wanted = block.size if not block.is_cut else num_drafts + (not block.starts_at_anchor)
    return min(wanted, block.size, room)


def own_name(name: str) -> str:
    """Our name for a weight that DeepSpec, z-lab or `speculators` names in its own way."""
    name = name.removeprefix("model.").removeprefix("markov_head.")
    return f"confidence.{name.removeprefix('confidence_head.proj.')}" if name.startswith("confidence_head.") else name


def _pages(batch: Batch, pool: KVPool, seen: Tensor) -> PagedInputs:
    layers = tuple(range(len(pool.keys)))
    return PagedInputs(pool.keys, pool.values, [], seen, batch.slot_mapping, batch.block_tables, layers)


def _rotary_function(attention: nn.Module) -> Any:
    """transformers' function that applies rotary positions to queries and keys in layers of this kind."""
    return sys.modules[type(attention).__module__].apply_rotary_pos_emb
