"""Training of heads with the target frozen: the loss, the drafts that a head would have made, and the loop.

A head is trained as it drafts (the training-time test of arXiv 2503.01840): its step 0 reads the target's hidden states
at every token of a text, and each further step reads the head's own outputs, so that it meets its own errors. In step
k, place j of a row is the pair of token j + 1 + k and the state of the token before it, and predicts token j + 2 + k.
It sees the keys of step 0 up to place j, and the keys of later steps at its own place alone: these are the keys that it
would have when drafting from there. In a head of several MTP layers, step k is layer k, which sees its own keys up to
place j.
"""

import math
import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig

from runtime.drafters.heads.head_model import EagleHead
from runtime.drafters.heads.mtp_head import ChainedMtp, MtpHead, layers_of_mtp, learned_weights
from runtime.engine.draft_vocab import rows_by_id
from runtime.model.attention import capped, weights_beside_sinks

UNROLLED = "specdec_unrolled"
TrainedHead = EagleHead | MtpHead | ChainedMtp
AnyHead = TypeVar("AnyHead", EagleHead, MtpHead, ChainedMtp)
STEP_DECAY = 0.8
"""Weight of a step's loss, relative to the step before."""
_WARM_UP, _LAST_RATE, _MAX_NORM = 0.04, 0.05, 1.0


@dataclass
class Unrolled:
    """Keys and values of the steps so far, by layer, and the places that the present step computes."""

    places: Tensor  # (B or 1, M) int64
    keys: dict[int, list[Tensor]] = field(default_factory=dict)
    values: dict[int, list[Tensor]] = field(default_factory=dict)

    def keep(self, places: Tensor) -> None:
        """Go on with these places [B, M] alone; keys and values of step 0 stay whole."""
        self.places = places
        for of_layers in (self.keys, self.values):
            for layer, (first, *others) in of_layers.items():
                of_layers[layer] = [first, *(one.gather(2, _index(places, one)) for one in others)]


def _index(places: Tensor, of: Tensor) -> Tensor:
    """Places as an index into dimension 2 of a tensor [B, H, T, D]."""
    return places[:, None, :, None].expand(-1, of.shape[1], -1, of.shape[3])


def unrolled_attention(
    module: nn.Module,
    query: Tensor,  # (B, H, M, D)
    key: Tensor,  # (B, Hk, M, D)
    value: Tensor,  # (B, Hk, M, D)
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a step over step 0 and over the query's own place in later steps. Returns [B, M, H, D]."""
    unrolled: Unrolled = kwargs["unrolled"]
    scaling, sliding_window = kwargs.get("scaling"), kwargs.get("sliding_window")
    groups, layer = query.shape[1] // key.shape[1], int(module.layer_idx)  # type: ignore[arg-type]
    keys, values = unrolled.keys.setdefault(layer, []), unrolled.values.setdefault(layer, [])
    keys.append(key.repeat_interleave(groups, 1))
    values.append(value.repeat_interleave(groups, 1))
    scale, size = query.shape[-1] ** -0.5 if scaling is None else scaling, keys[0].shape[2]
    distance = unrolled.places[:, None, :, None] - torch.arange(size, device=query.device)
    hidden = distance < 0
    if sliding_window is not None:
        hidden = hidden | (distance + len(keys) - 1 >= sliding_window)
    scores = (query @ keys[0].mT * scale).masked_fill(hidden, -torch.inf)
    own = [(query * one).sum(-1, keepdim=True) * scale for one in keys[1:]]
    sinks = kwargs.get("s_aux")
    capped_scores = capped(torch.cat([scores, *own], -1).float(), kwargs.get("softcap"))
    weights = weights_beside_sinks(capped_scores, None if sinks is None else sinks.view(1, -1, 1, 1)).to(query.dtype)
    attended = weights[..., :size] @ values[0]
    for i, one in enumerate(values[1:]):
        attended = attended + weights[..., size + i, None] * one
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(UNROLLED, unrolled_attention)


@dataclass(frozen=True)
class Rows:
    """B texts to learn from, padded at the right to N tokens, with the target's results for each token."""

    tokens: Tensor  # (B, N) int64
    states: Tensor  # (B, N, width) hidden states that the head reads
    top_ids: Tensor  # (B, N, K) int64, the target's likeliest tokens in this token's place
    top_probs: Tensor  # (B, N, K) float32, 0 where they are not known
    is_output: Tensor  # (B, N) bool, True for the target's own answer


def have_unrolled_attention(head: AnyHead) -> AnyHead:
    """Give the head `unrolled_attention` in float32, and gradients to its weights, not to the target's."""
    head = head.float()
    for module in head.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            config._attn_implementation = UNROLLED
    head.requires_grad_(requires_grad=isinstance(head, EagleHead))
    if not isinstance(head, EagleHead):
        for weights in map(learned_weights, layers_of_mtp(head)):
            for weight in weights.values():
                weight.requires_grad = True
    return head


def unroll(head: TrainedHead, rows: Rows, num_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Places [B, M] of each step, and the head's outputs [B, M, hidden] there.

    Step 0 has all N - 1 places. Further steps have M places, as many as the row with the most places from which outputs
    are predicted; what is predicted beyond a row's end means nothing. A head of several layers has at most as many
    steps, all with all places.
    """
    if isinstance(head, ChainedMtp):
        yield from _through_layers(head, rows, num_steps)
        return
    num_places = rows.tokens.shape[1] - 1
    unrolled = Unrolled(torch.arange(num_places)[None])
    states = head.reduce(rows.states[:, :-1].to(next(head.parameters()).dtype))
    for step in range(num_steps):
        if step == 1:
            unrolled.keep(_drafting_places(rows, num_steps))
            states = states.gather(1, unrolled.places[..., None].expand(-1, -1, states.shape[-1]))
        positions = unrolled.places + 1 + step
        ids = rows.tokens.gather(1, positions.clamp_max(num_places).expand(len(rows.tokens), -1))
        states = head.outputs_at(ids, states, positions, unrolled=unrolled)
        yield unrolled.places.expand(len(rows.tokens), -1), states


def _through_layers(head: ChainedMtp, rows: Rows, num_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Places and outputs as from `unroll`, for a head of several layers. Each layer has keys of its own, for all tokens
    of a text, so a step is a pass through a layer.
    """
    places = torch.arange(rows.tokens.shape[1] - 1)[None]
    states = rows.states[:, :-1].to(next(head.parameters()).dtype)
    for step, layer in enumerate(layers_of_mtp(head)[:num_steps]):
        positions = places + 1 + step
        ids = rows.tokens.gather(1, positions.clamp_max(places.shape[1]).expand(len(rows.tokens), -1))
        states = layer.outputs_at(ids, states, positions, unrolled=Unrolled(places))
        yield places.expand(len(rows.tokens), -1), states


def _drafting_places(rows: Rows, num_steps: int) -> Tensor:
    """The places [B, M] from which steps after the first predict outputs; a row with fewer has other places too."""
    num_places = rows.tokens.shape[1] - 1
    first = (rows.is_output.int().argmax(1) - 1 - num_steps).clamp_min(0)
    end = num_places - rows.is_output.flip(1).int().argmax(1)
    size = int((end - first).max().clamp_min(1))
    start = torch.minimum(first, torch.full_like(first, num_places - size))
    return start[:, None] + torch.arange(size)


def own_ids(head: TrainedHead, ids: Tensor) -> Tensor:
    """The head's ids for the target's ids, and the draft vocabulary's size for ids that it does not have."""
    return ids if head.draft_ids is None else rows_by_id(head.draft_ids, head.config.vocab_size)[ids]


@dataclass
class Losses:
    """Sums over predicted tokens, by step: cross-entropy in nats, tokens predicted right, and all tokens."""

    loss: list[float]
    num_right: list[int]
    num: list[int]

    @classmethod
    def none(cls, num_steps: int) -> "Losses":
        return cls([0.0] * num_steps, [0] * num_steps, [0] * num_steps)


def losses_of(head: TrainedHead, rows: Rows, num_steps: int, sums: Losses) -> Tensor:
    """Mean cross-entropy with the target's distribution over the draft vocabulary, summed over the steps, each weighted
    by a power of `STEP_DECAY`. Adds to `sums`.

    Only tokens that the head may draft count: tokens of outputs, and in step 0 all tokens for which the target's
    distribution is known, of which only the most probable tokens are.
    """
    total = rows.states.new_zeros((), dtype=torch.float32)
    size, own = head.config.draft_vocab_size, own_ids(head, rows.tokens)
    has_targets = rows.top_probs[..., 0] > 0
    for step, (places, outputs) in enumerate(unroll(head, rows, num_steps)):
        wanted = _shifted(own, places, step, size)
        learned = has_targets if step == 0 else rows.is_output
        is_learned = _shifted(learned, places, step, 0).bool() & (wanted < size)
        found = is_learned.nonzero(as_tuple=True)
        if not len(found[0]):
            continue
        at = (found[0], places[found] + 2 + step)
        ids = own_ids(head, rows.top_ids[at])
        probs = rows.top_probs[at].where(ids < size, 0)
        probs = probs / probs.sum(-1, keepdim=True).clamp_min(1e-6)
        logprobs = head.own_logits(outputs[found]).float().log_softmax(-1)
        each = -(probs * logprobs.gather(-1, ids.clamp_max(size - 1))).sum(-1)
        total = total + STEP_DECAY**step * each.mean()
        sums.loss[step] += float(each.detach().sum())
        sums.num_right[step] += int((logprobs.detach().argmax(-1) == wanted[found]).sum())
        sums.num[step] += len(each)
    return total


def _shifted(tokens: Tensor, places: Tensor, step: int, beyond: int) -> Tensor:
    """Values [B, M], from `tokens` [B, N], of the tokens that a step predicts from these places, or `beyond`."""
    at = places + 2 + step
    found = tokens.gather(1, at.clamp_max(tokens.shape[1] - 1))
    return found.where(at < tokens.shape[1], torch.full_like(found, beyond))


@torch.no_grad()
def accepted_lengths(head: TrainedHead, rows: Rows, max_draft_len: int) -> Tensor:
    """Numbers [B, N - 1] of accepted tokens: for each place j, how many tokens of a greedy draft behind token j + 1 are
    the text's. As long as a draft agrees with the text, the head reads the same tokens as in a real draft. For places
    from which no output is predicted, at most the first token is counted.
    """
    own = own_ids(head, rows.tokens)
    lengths = torch.zeros(rows.tokens.shape[0], rows.tokens.shape[1] - 1, dtype=torch.int64)
    for step, (places, outputs) in enumerate(unroll(head, rows, max_draft_len)):
        is_right = head.own_logits(outputs).argmax(-1) == _shifted(own, places, step, -1)
        agrees = is_right & (lengths.gather(1, places) == step)
        lengths.scatter_add_(1, places, agrees.long())
    return lengths


def steps_of(lengths: Seq[int], first: int, num_tokens: int, draft_len: int) -> int:
    """Number of steps that a target takes for a text's tokens from `first` on, with drafts of at most `draft_len`
    tokens. The first token comes from the context phase. `lengths` is a row of `accepted_lengths`.

    For example, 10 tokens, of which 4 are the prompt, and drafts with always one accepted token: token 4, then 5 and 6,
    7 and 8, and 9, so 4 steps.
    """
    num_steps, last = 1, first
    while last < num_tokens - 1:
        last += 1 + min(draft_len, lengths[last - 1])
        num_steps += 1
    return num_steps


@dataclass(frozen=True)
class Schedule:
    """Length and learning rate of a training; `num_steps` counts optimizer steps."""

    num_steps: int
    learning_rate: float
    num_unrolled: int
    random_seed: int

    def rate(self, step: int) -> float:
        """Learning rate at a step: it rises to its maximum, then falls as a cosine to a twentieth of the maximum."""
        warm_up = max(1, round(_WARM_UP * self.num_steps))
        if step < warm_up:
            return self.learning_rate * (step + 1) / warm_up
        done = (step - warm_up) / max(1, self.num_steps - warm_up)
        return self.learning_rate * (_LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * done)) / 2)


def batches(lengths: Seq[int], num_tokens: int, random_seed: int, epoch: int) -> list[list[int]]:
    """Indices of an epoch's texts in batches of at most `num_tokens` tokens, padding included; a longer text is a batch
    by itself. Texts of similar length are in a batch, and batches are in an order that the seed and epoch decide.
    """
    order = list(range(len(lengths)))
    rng = random.Random(f"{random_seed} {epoch}")
    rng.shuffle(order)
    order.sort(key=lambda i: lengths[i] // 32)
    found: list[list[int]] = [[]]
    for i in order:
        longest = max(lengths[one] for one in [*found[-1], i])
        if found[-1] and longest * (len(found[-1]) + 1) > num_tokens:
            found.append([])
        found[-1].append(i)
    rng.shuffle(found)
    return found


class Trainer:
    """The training's steps; from a `state`, which has all that was learned, they continue to the same end."""

    def __init__(
        self, head: TrainedHead, schedule: Schedule, rows_of: Callable[[int], Rows], *, autocast: bool = False
    ) -> None:
        """Products are computed in bfloat16 if `autocast` is True, while all weights are kept in float32."""
        self.head, self.schedule, self.rows_of = head, schedule, rows_of
        self._autocast = partial(torch.autocast, "cpu", torch.bfloat16, enabled=autocast)
        self.step = 0
        """Number of optimizer steps done; `rows_of` gives the rows of each."""
        self._parameters = [one for one in head.parameters() if one.requires_grad]
        self._optimizer = torch.optim.AdamW(self._parameters, betas=(0.9, 0.95), weight_decay=0.01)

    @property
    def is_done(self) -> bool:
        return self.step >= self.schedule.num_steps

    def train_step(self) -> Losses:
        """One optimizer step."""
        sums = Losses.none(self.schedule.num_unrolled)
        for group in self._optimizer.param_groups:
            group["lr"] = self.schedule.rate(self.step)
        self._optimizer.zero_grad()
        with self._autocast():
            loss = self.losses(sums)
        if loss.requires_grad:  # a batch of texts whose outputs the head never drafts has none
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(self._parameters, _MAX_NORM)
            self._optimizer.step()
        self.step += 1
        return sums

    def losses(self, sums: Losses) -> Tensor:
        """Loss of the present step."""
        return losses_of(self.head, self.rows_of(self.step), self.schedule.num_unrolled, sums)

    def state(self) -> dict[str, Any]:
        learned = {name: one.detach() for name, one in self.head.named_parameters() if one.requires_grad}
        return {"step": self.step, "head": learned, "optimizer": self._optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.head.load_state_dict(state["head"], strict=False)
        self._optimizer.load_state_dict(state["optimizer"])
