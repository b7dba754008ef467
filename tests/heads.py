"""Trained drafters with random weights, in the forms that they are published in, and what they draft by their formulas.

The formulas are written down here once more, in float64 and over whole sequences, without a cache: of EAGLE-3 those of
SafeAILab's `cnets.py` and `speculators`' `eagle3` model, as `docs/trained-drafters.md` has them.
"""

import json
import shutil
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from strength import draws
from torch import Tensor
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedTextConfig,
    PreTrainedModel,
)
from transformers.cache_utils import KVSharingDict

THETA = 5000.0


class Made:
    """Sizes that follow from a head's own."""

    tensors: dict[str, Tensor]
    hidden: int
    heads: int
    vocab: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def ids(self) -> Tensor:
        """The target's ids that it drafts."""
        offsets = self.tensors.get("d2t")
        return torch.arange(self.vocab) if offsets is None else torch.arange(len(offsets)) + offsets


@dataclass(frozen=True)
class Eagle(Made):
    """An EAGLE-3 head of a Llama, its config and tensors as `speculators` names them."""

    tensors: dict[str, Tensor]
    states: tuple[int, ...]
    flags: frozenset[str] = frozenset()
    num_layers: int = 1
    model_type: str = "llama"
    window: int | None = None
    theta: float = THETA
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 32
    scale: float = 1.0
    num_published: int = field(default=3)


def make_eagle(
    target: PreTrainedModel,
    *,
    flags: Seq[str] = (), draft_vocab: int | None = None, num_layers: int = 1, hidden: int | None = None,
    states: tuple[int, ...] | None = None, own_embedding: bool = False, seed: int = 0, **settings: Any,
) -> Eagle:  # fmt: skip
    """Weights so large that drafts differ, of a head for this target."""
    config: Any = target.config
    generator = torch.Generator().manual_seed(seed)
    size, vocab = config.hidden_size, config.vocab_size
    L = config.num_hidden_layers
    states = states or (2, L // 2, L - 3)
    made = Eagle({}, states, frozenset(flags), num_layers, hidden=hidden or size, vocab=vocab, **settings)
    own, dim, wide = made.hidden, made.head_dim, 3 * (hidden or size) // 2

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * (0.3 if len(shape) > 1 else 0.2) + (len(shape) == 1)

    tensors = {"fc.weight": random(own, len(states) * size), "norm.weight": random(own)}
    for i in range(num_layers):
        reads = 2 * own if i == 0 else own
        part = {
            "self_attn.q_proj.weight": random(made.heads * dim, reads),
            "self_attn.k_proj.weight": random(made.kv_heads * dim, reads),
            "self_attn.v_proj.weight": random(made.kv_heads * dim, reads),
            "self_attn.o_proj.weight": random(own, made.heads * dim),
            "mlp.gate_proj.weight": random(wide, own),
            "mlp.up_proj.weight": random(wide, own),
            "mlp.down_proj.weight": random(own, wide),
            "input_layernorm.weight": random(own),
            "post_attention_layernorm.weight": random(own),
        }
        if i == 0:
            part["hidden_norm.weight"] = random(own)
        if made.model_type == "qwen3":
            part |= {"self_attn.q_norm.weight": random(dim), "self_attn.k_norm.weight": random(dim)}
        tensors |= {f"layers.{i}.{name}": tensor for name, tensor in part.items()}
    if "norm_before_fc" in flags:
        tensors["input_norm.weight"] = random(len(states) * size)
    if "fc_norm" in flags:
        tensors |= {f"fc_norm.{i}.weight": random(size) for i in range(len(states))}
    if draft_vocab is not None:
        ids = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, value=True)
    if own_embedding:
        tensors["embed_tokens.weight"] = random(vocab, own)
    tensors["lm_head.weight"] = random(draft_vocab or vocab, own)
    made.tensors.update(tensors)
    return made


def save_eagle(head: Eagle, directory: Path, form: str, **changes: Any) -> Path:
    """Write it as `speculators` does, as SpecForge does, or as SafeAILab, which names no hidden states and no class."""
    directory.mkdir(parents=True, exist_ok=True)
    layers: dict[str, Any] = {
        "model_type": head.model_type, "hidden_size": head.hidden, "intermediate_size": 3 * head.hidden // 2,
        "num_attention_heads": head.heads, "num_key_value_heads": head.kv_heads, "head_dim": head.head_dim,
        "num_hidden_layers": head.num_layers, "vocab_size": head.vocab, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
    }  # fmt: skip
    if head.theta != 10000.0:  # which a config that has none means
        layers["rope_theta"] = head.theta
    if head.window is not None:
        layers |= {"sliding_window": head.window, "layer_types": ["sliding_attention"] * head.num_layers}
        layers |= {"use_sliding_window": True, "max_window_layers": 0}
    own = {"draft_vocab_size": len(head.ids), "logit_scale": head.scale} | dict.fromkeys(head.flags, True)
    if head.scale == 1.0:
        del own["logit_scale"]
    key = "eagle_aux_hidden_state_layer_ids"
    if form == "speculators":
        config = {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3Speculator"],
            "transformer_layer_config": layers,
            key: list(head.states),
            "speculators_config": {
                "algorithm": "eagle3",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": head.num_published}],
            },
            **own,
        }
    elif form == "specforge":
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {key: [one - 1 for one in head.states], "use_aux_hidden_state": True},
            **layers,
            **own,
        }
    else:
        config = {"architectures": ["LlamaForCausalLM"], **layers, **own}
    tensors = head.tensors
    if form != "speculators":
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors | changes.pop("tensors", {}), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config | changes))
    return directory


@dataclass(frozen=True)
class Block(Made):
    """A DFlash or DSpark head with layers of Qwen3's, its tensors as z-lab and DeepSpec name them."""

    tensors: dict[str, Tensor]
    states: tuple[int, ...]
    size: int = 5
    mask: int = 31
    anchor: bool = False
    markov: str | None = None
    confidence: bool = False
    windows: tuple[int | None, ...] = (None, None)
    hidden: int = 32
    vocab: int = 32
    theta: float = THETA
    heads, kv_heads, model_type = 4, 2, "qwen3"


def make_block(
    target: PreTrainedModel, *, states: tuple[int, ...] = (1, 3, 5), draft_vocab: int | None = None,
    own_output: bool = False, seed: int = 0, **settings: Any,
) -> Block:  # fmt: skip
    """Weights so large that drafts differ."""
    config: Any = target.config
    generator = torch.Generator().manual_seed(seed)
    size, vocab, rank = config.hidden_size, config.vocab_size, 6
    made = Block({}, states, hidden=size, vocab=vocab, **settings)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * (0.4 if len(shape) > 1 else 0.2) + (len(shape) == 1)

    tensors = {"fc.weight": random(size, len(states) * size), "hidden_norm.weight": random(size)}
    tensors["norm.weight"] = random(size)
    for i in range(len(made.windows)):
        dim, wide = made.head_dim, 3 * size // 2
        part = {
            "self_attn.q_proj.weight": random(made.heads * dim, size),
            "self_attn.k_proj.weight": random(made.kv_heads * dim, size),
            "self_attn.v_proj.weight": random(made.kv_heads * dim, size),
            "self_attn.o_proj.weight": random(size, made.heads * dim),
            "self_attn.q_norm.weight": random(dim),
            "self_attn.k_norm.weight": random(dim),
            "mlp.gate_proj.weight": random(wide, size),
            "mlp.up_proj.weight": random(wide, size),
            "mlp.down_proj.weight": random(size, wide),
            "input_layernorm.weight": random(size),
            "post_attention_layernorm.weight": random(size),
        }
        tensors |= {f"layers.{i}.{name}": tensor for name, tensor in part.items()}
    if draft_vocab is not None:
        ids = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
    if draft_vocab is not None or own_output:
        tensors["lm_head.weight"] = random(draft_vocab or vocab, size)
        tensors["embed_tokens.weight"] = random(vocab, size)
    if made.markov:
        tensors["markov_head.markov_w1.weight"] = 3 * random(vocab, rank)
        tensors["markov_head.markov_w2.weight"] = 3 * random(draft_vocab or vocab, rank)
    if made.markov == "gated":
        tensors |= {
            "markov_head.gate_proj.weight": random(rank, size + rank),
            "markov_head.gate_proj.bias": random(rank),
        }
    if made.confidence:
        tensors["confidence_head.proj.weight"] = random(1, size + (rank if made.markov else 0))
        tensors["confidence_head.proj.bias"] = random(1)
    made.tensors.update(tensors)
    return made


def save_block(head: Block, directory: Path, form: str, num_target_layers: int = 6, **changes: Any) -> Path:
    """Write it as z-lab does (DFlash), as DeepSpec does (DSpark), or as `speculators` does either."""
    directory.mkdir(parents=True, exist_ok=True)
    kinds = ["full_attention" if window is None else "sliding_attention" for window in head.windows]
    layers = {
        "model_type": "qwen3", "hidden_size": head.hidden, "intermediate_size": 3 * head.hidden // 2,
        "num_attention_heads": head.heads, "num_key_value_heads": head.kv_heads, "head_dim": head.head_dim,
        "num_hidden_layers": len(head.windows),
        "vocab_size": head.vocab, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": head.theta,
        "layer_types": kinds,
        "sliding_window": next((window for window in head.windows if window is not None), None),
        "use_sliding_window": any(head.windows),
        "attention_bias": False,
    }  # fmt: skip
    rank = head.tensors["markov_head.markov_w1.weight"].shape[1] if head.markov else 0
    spark = {
        "markov_rank": rank,
        "markov_head_type": head.markov or "vanilla",
        "enable_confidence_head": head.confidence,
        "confidence_head_with_markov": bool(head.markov),
    }
    after = [one - 1 for one in head.states]
    if form == "z-lab":
        own = {"mask_token_id": head.mask, "target_layer_ids": after}
        config = layers | {"architectures": ["DFlashDraftModel"], "block_size": head.size, "dflash_config": own}
        config["num_target_layers"] = num_target_layers
    elif form == "DeepSpec":
        own = {"mask_token_id": head.mask, "target_layer_ids": after, "block_size": head.size}
        config = layers | {"architectures": ["Qwen3DSparkModel"]} | own | spark
    else:
        config = {
            "speculators_model_type": form,
            "transformer_layer_config": layers,
            "aux_hidden_state_layer_ids": list(head.states),
            "mask_token_id": head.mask,
            "block_size": head.size,
            "draft_vocab_size": len(head.ids),
            "sample_from_anchor": head.anchor,
            **(spark if form == "dspark" else {}),
        }
    prefix = "model." if form == "DeepSpec" else ""
    tensors = {f"{prefix}{name}": tensor.contiguous() for name, tensor in head.tensors.items()}
    save_file(tensors | changes.pop("tensors", {}), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config | changes))
    return directory


def block_outputs(head: Block, target: PreTrainedModel, tokens: list[int], num_slots: int, states: Tensor) -> Tensor:
    """(num_slots, hidden) float64 outputs of a block behind these tokens, all but the last of which have `states`."""
    w = {name: tensor.double() for name, tensor in head.tensors.items() if tensor.is_floating_point()}
    embedding = w.get("embed_tokens.weight", target.get_input_embeddings().weight.double())
    context = _rms(states @ w["fc.weight"].T, w["hidden_norm.weight"])
    hidden = embedding[[tokens[-1], *[head.mask] * (num_slots - 1)]]
    n = len(context)
    for i, window in enumerate(head.windows):
        own = {name.removeprefix(f"layers.{i}."): one for name, one in w.items() if name.startswith(f"layers.{i}.")}
        x = _rms(hidden, own["input_layernorm.weight"])
        q, k, v = (
            (of @ own[f"self_attn.{name}_proj.weight"].T).view(len(of), -1, head.head_dim).transpose(0, 1)
            for name, of in (("q", x), ("k", torch.cat([context, x])), ("v", torch.cat([context, x])))
        )
        q, k = _rms(q, own["self_attn.q_norm.weight"]), _rms(k, own["self_attn.k_norm.weight"])
        padded = torch.cat([q.new_zeros(q.shape[0], n, head.head_dim), q], 1)
        q, k = _rotated(padded, head.theta)[:, n:], _rotated(k, head.theta)
        k, v = (one.repeat_interleave(head.heads // head.kv_heads, 0) for one in (k, v))
        scores = q @ k.mT / head.head_dim**0.5
        if window is not None:
            distance = torch.arange(n, n + num_slots)[:, None] - torch.arange(n + num_slots)
            scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
        attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(num_slots, -1)
        hidden = hidden + attended @ own["self_attn.o_proj.weight"].T
        hidden = hidden + _mlp(own, hidden)
    return _rms(hidden, w["norm.weight"])


@torch.no_grad()
def block_drafts(
    head: Block, target: PreTrainedModel, tokens: list[int], num_slots: int, states: Tensor
) -> tuple[list[int], list[float], float]:
    """The greedy draft of a block, how sure the head is of each token, where it says so, and by how much the nearest of
    the other ids is less likely: a tie is decided by rounding, which processors do in different orders."""
    w = {name: tensor.double() for name, tensor in head.tensors.items() if tensor.is_floating_point()}
    output = w.get("lm_head.weight", target.get_output_embeddings().weight.double())
    outputs, last = block_outputs(head, target, tokens, num_slots, states), tokens[-1]
    draft, chances, least_gap = list[int](), list[float](), torch.inf
    for row in outputs if head.anchor else outputs[1:]:
        logits = row @ output.T
        before = w["markov_head.markov_w1.weight"][last] if head.markov else row[:0]
        if head.confidence:
            features = torch.cat([row, before])
            logit = w["confidence_head.proj.weight"][0] @ features + w["confidence_head.proj.bias"][0]
            chances.append(float(logit.sigmoid()))
        if head.markov == "gated":
            joined = torch.cat([row, before])
            gate = w["markov_head.gate_proj.weight"] @ joined + w["markov_head.gate_proj.bias"]
            before = gate.sigmoid() * before
        if head.markov:
            logits = logits + w["markov_head.markov_w2.weight"] @ before
        best, second = logits.topk(2).values.tolist()
        last, least_gap = int(head.ids[logits.argmax()]), min(least_gap, best - second)
        draft.append(last)
    return draft, chances, least_gap


def copy_with_mtp(model_dir: Path, directory: Path) -> Path:
    """A copy of a model's directory, with an MTP head whose layer is the model's last one."""
    shutil.copytree(model_dir, directory)
    tensors, config = load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())
    last, size = f"model.layers.{config['num_hidden_layers'] - 1}.", config["hidden_size"]
    tensors |= {f"mtp.layers.0.{n.removeprefix(last)}": t.clone() for n, t in tensors.items() if n.startswith(last)}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = torch.ones(size)
    tensors["mtp.fc.weight"] = 0.3 * torch.randn(size, 2 * size, generator=torch.Generator().manual_seed(0))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
    return directory


_ASSISTANTS: dict[str, tuple[Any, Any, Any]] = {
    "gemma4_text": (Gemma4AssistantConfig, Gemma4TextConfig, Gemma4AssistantForCausalLM),
    "gemma4_unified_text": (Gemma4UnifiedAssistantConfig, Gemma4UnifiedTextConfig, Gemma4UnifiedAssistantForCausalLM),
}


def make_assistant(target: PreTrainedModel, directory: Path, *, num_centroids: int = 0, **text: Any) -> Path:
    """Save a Gemma 4's assistant with random weights, by transformers' class for such targets; without centroids where
    there are 0."""
    own: Any = target.config
    config_class, text_class, model_class = _ASSISTANTS[own.model_type]
    settings: dict[str, Any] = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": own.num_key_value_heads,
        "head_dim": own.per_layer_config[own.layer_types.index("sliding_attention")].head_dim,
        "global_head_dim": own.per_layer_config[own.num_hidden_layers - 1].head_dim,
        "sliding_window": own.sliding_window, "vocab_size": own.vocab_size, "max_position_embeddings": 256,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
    }  # fmt: skip
    config = config_class(
        text_config=text_class(**(settings | text)),
        backbone_hidden_size=own.hidden_size,
        use_ordered_embeddings=bool(num_centroids),
        num_centroids=num_centroids or 2048,
        centroid_intermediate_top_k=3,
    )
    torch.manual_seed(1)
    with _all_layers_share():
        model = model_class(config)
    for name, parameter in model.named_parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + ("norm" in name)
    if num_centroids:
        model.masked_embedding.token_ordering.copy_(torch.randperm(own.vocab_size))
    model.save_pretrained(directory)
    return directory


@contextmanager
def _all_layers_share() -> Iterator[None]:
    """transformers 5.23 cannot make its own assistants: a config that stores no keys and values is an error there."""
    classes: tuple[Any, ...] = (Gemma4TextConfig, Gemma4UnifiedTextConfig)
    theirs = [one.kv_sharing_modes for one in classes]
    for one, own in zip(classes, theirs, strict=True):

        def modes(config: Any, own: Any = own) -> list[str | None]:
            n = config.num_hidden_layers
            found: list[str | None] = ["reuse"] * n if config.num_kv_shared_layers == n else own.fget(config)
            return found

        one.kv_sharing_modes = property(modes)
    try:
        yield
    finally:
        for one, own in zip(classes, theirs, strict=True):
            one.kv_sharing_modes = own


class AssistantReference:
    """Drafts of an assistant by transformers' own class, fed as its `SinglePositionMultiTokenCandidateGenerator`
    does after a prompt."""

    def __init__(self, directory: Path, target: PreTrainedModel) -> None:
        config: Any = target.config
        model_class = _ASSISTANTS[config.model_type][2]
        with _all_layers_share():
            self.assistant = model_class.from_pretrained(directory, dtype=torch.float32).eval()
        self.target = target
        end = config.num_hidden_layers - config.num_kv_shared_layers
        self.stores = {kind: i for i, kind in enumerate(config.layer_types[:end])}

        self.known: list[tuple[list[int], Tensor, dict[str, tuple[Tensor, Tensor]]]] = []

    @torch.no_grad()
    def drafts(self, tokens: list[int], length: int) -> list[int]:
        """The greedy draft after these tokens; of several texts the longest first, of which others are beginnings."""
        n = len(tokens) - 1
        found = next((one for one in self.known if one[0][:n] == tokens[:n]), None) or self._compute(tokens[:n])
        state = found[1][:, n - 1 : n]
        shared = {kind: (keys[:, :, :n], values[:, :, :n]) for kind, (keys, values) in found[2].items()}
        token, draft = tokens[-1], list[int]()
        for _ in range(length):
            embedded = self.target.get_input_embeddings()(torch.tensor([[token]]))
            made = self.assistant(
                inputs_embeds=torch.cat([embedded, state], -1),
                position_ids=torch.tensor([[n]]),
                shared_kv_states=shared,
            )
            state, token = made.last_hidden_state, int(made.logits.argmax())
            draft.append(token)
        return draft

    def _compute(self, tokens: list[int]) -> tuple[list[int], Tensor, dict[str, tuple[Tensor, Tensor]]]:
        decoder: Any = self.target.get_decoder()  # type: ignore[no-untyped-call]
        shared = KVSharingDict()
        modes = [layer.self_attn.store_full_length_kv for layer in decoder.layers]
        for layer in self.stores.values():  # of a model without sharing transformers stores none
            decoder.layers[layer].self_attn.store_full_length_kv = True
        output = decoder(torch.tensor([tokens]), use_cache=False, shared_kv_states=shared)
        for layer, mode in zip(decoder.layers, modes, strict=True):
            layer.self_attn.store_full_length_kv = mode
        self.known.append((tokens, output.last_hidden_state, dict(shared)))
        return self.known[-1]


def some(seen: Seq[tuple[list[int], list[int]]]) -> list[tuple[list[int], list[int]]]:
    """Every third of the drafts and the texts that they are for, the longest texts first; all of them with `--slow`."""
    return sorted(seen, key=lambda one: -len(one[0]))[:: draws(1, 3)]


def hidden_states(target: PreTrainedModel, tokens: list[int], numbers: Seq[int]) -> Tensor:
    """(len(tokens), all beside each other) float64, by transformers' own `output_hidden_states`."""
    with torch.no_grad():
        output = target(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    return torch.cat([output.hidden_states[number][0] for number in numbers], -1).double()


def eagle_drafts(head: Eagle, target: PreTrainedModel, tokens: list[int], length: int, states: Tensor) -> list[int]:
    """The greedy draft after these tokens, all but the last of which have these `hidden_states`."""
    found: list[int] = []
    for logits in _logits(head, target, tokens, states, found):
        if len(found) == length:
            break
        found.append(int(logits.argmax()))
    return found


def peagle_drafts(
    head: Eagle, mask: int, target: PreTrainedModel, tokens: list[int], length: int, states: Tensor
) -> list[int]:
    """The greedy draft of P-EAGLE: behind the last pair those of a mask token and of what stands for its states."""
    w = {name: tensor.double() for name, tensor in head.tensors.items() if tensor.is_floating_point()}
    embedding = w.get("embed_tokens.weight", target.get_input_embeddings().weight.double())
    known = torch.cat([states, w["mask_hidden"].view(1, -1).expand(length - 1, -1)]) @ w["fc.weight"].T
    z = _layers(head, w, embedding[[*tokens[1:], *[mask] * (length - 1)]], known)
    logits = _rms(z, w["norm.weight"])[-length:] @ w["lm_head.weight"].T
    return [int(head.ids[one]) for one in logits.argmax(-1)]


def eagle_logits(
    head: Eagle, target: PreTrainedModel, tokens: list[int], last: int, length: int, states: Tensor
) -> list[Tensor]:
    """(vocab,) logits of the steps of a draft after token `last` that drafts what comes there in the text."""
    drafted: list[int] = []
    found: list[Tensor] = []
    for logits in _logits(head, target, tokens[: last + 1], states[:last], drafted):
        found.append(logits)
        if len(found) == length or last + len(found) == len(tokens):
            break
        drafted.append(tokens[last + len(found)])
    return found


def _logits(
    head: Eagle, target: PreTrainedModel, tokens: list[int], states: Tensor, drafted: list[int]
) -> Iterator[Tensor]:
    """(vocab,) logits of each step of a draft, to which `drafted` has one token added between two steps."""
    w = {name: tensor.double() for name, tensor in head.tensors.items() if tensor.is_floating_point()}
    embedding = w.get("embed_tokens.weight", target.get_input_embeddings().weight.double())
    if "norm_before_fc" in head.flags:
        states = _rms(states, w["input_norm.weight"])
    if "fc_norm" in head.flags:
        parts = states.chunk(len(head.states), -1)
        states = torch.cat([_rms(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
    known = states @ w["fc.weight"].T
    while True:
        z = _layers(head, w, embedding[[*tokens[1:], *drafted]], known)
        normed = _rms(z, w["norm.weight"])
        logits = torch.full((head.vocab,), -torch.inf, dtype=torch.float64)
        logits[head.ids] = normed[-1] @ w["lm_head.weight"].T * head.scale
        yield logits
        known = torch.cat([known, (normed if "norm_output" in head.flags else z)[-1:]])


def _layers(head: Eagle, w: dict[str, Tensor], e: Tensor, g: Tensor) -> Tensor:
    first = {name.removeprefix("layers.0."): one for name, one in w.items() if name.startswith("layers.0.")}
    normed = _rms(g, first["hidden_norm.weight"])
    reads = torch.cat([_rms(e, first["input_layernorm.weight"]), normed], -1)
    hidden = (normed if "norm_before_residual" in head.flags else g) + _attention(head, first, reads)
    hidden = hidden + _mlp(first, hidden)
    for i in range(1, head.num_layers):
        own = {name.removeprefix(f"layers.{i}."): one for name, one in w.items() if name.startswith(f"layers.{i}.")}
        hidden = hidden + _attention(head, own, _rms(hidden, own["input_layernorm.weight"]))
        hidden = hidden + _mlp(own, hidden)
    return hidden


def _attention(head: Eagle, w: dict[str, Tensor], x: Tensor) -> Tensor:
    n, dim = len(x), head.head_dim
    q, k, v = ((x @ w[f"self_attn.{name}_proj.weight"].T).view(n, -1, dim).transpose(0, 1) for name in ("q", "k", "v"))
    if head.model_type == "qwen3":
        q, k = _rms(q, w["self_attn.q_norm.weight"]), _rms(k, w["self_attn.k_norm.weight"])
    q, k = _rotated(q, head.theta), _rotated(k, head.theta)
    k, v = (one.repeat_interleave(head.heads // head.kv_heads, 0) for one in (k, v))
    distance = torch.arange(n)[:, None] - torch.arange(n)
    hidden = (distance < 0) | (distance >= (head.window or n))
    scores = (q @ k.mT / dim**0.5).masked_fill(hidden, -torch.inf)
    attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1)
    return attended @ w["self_attn.o_proj.weight"].T


def _mlp(w: dict[str, Tensor], hidden: Tensor) -> Tensor:
    x = _rms(hidden, w["post_attention_layernorm.weight"])
    return (F.silu(x @ w["mlp.gate_proj.weight"].T) * (x @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _rotated(x: Tensor, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * theta ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
