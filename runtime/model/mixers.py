"""Layers that keep a state of the tokens before, instead of keys and values: transformers' modules, over slots.

Their forward stays transformers' own. What it calls for a convolution along the tokens, and for the recurrence, is ours
where the step hands over `paged`, as attention is by its interface (`runtime.model.attention`). Others get a
forward: those of LFM2, MiniMax and RecurrentGemma have no such functions, and Mamba's has a product beside them.
"""

import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, wraps
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from runtime.checkpoint.config import RecurrentShape, StateShape
from runtime.core.states import CHUNK_SIZE
from runtime.model.attention import KERNEL, PagedInputs, Recorded
from runtime.model.recurrences import linear_attention, selective_scan, short_conv


def place_states(model: PreTrainedModel) -> None:
    """Have the model's layers with a state, if it has any, keep it in the paged inputs of a step.

    Without paged inputs they stay transformers'.
    """
    for name, module in model.named_modules():
        mixer, functions = _MIXERS.get(type(module).__name__, (None, {}))
        if (mixer is not None or type(module).__name__ in _SHARED) and getattr(module, "layer_idx", -1) in (-1, None):
            module.layer_idx = next(int(part) for part in name.split(".") if part.isdecimal())
        if mixer is None or isinstance(module, _Mixer):
            continue
        _place_functions(type(module).__module__, functions)
        module.model_config = model.config
        module.__class__ = _placed(type(module), mixer)  # type: ignore[arg-type]
        if isinstance(module, LightningAttention):
            module.register_buffer("slopes", module.slopes_of_heads(model.device), persistent=False)


@dataclass(frozen=True)
class LayerStates:
    """One layer's states in a step. Where they are recorded, nothing is computed."""

    paged: PagedInputs | Recorded
    layer: int
    by_kernel: bool

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Causal convolution of each channel, of (1, B x Q, C) inputs by (C, kernel_size) weights."""
        if isinstance(self.paged, Recorded):
            self.paged.states[self.layer] = StateShape(self.layer, inputs.shape[-1], weight.shape[1] - 1)
            return torch.empty_like(inputs)
        function = torch.ops.specdec.short_conv if self.by_kernel else short_conv
        convolved: Tensor = function(inputs, weight, bias, self.paged.pools_of_state(self.layer)[0], *self._places())
        return convolved

    def attend(self, parts: tuple[Tensor, ...], scale: float, *, normalizes: bool) -> Tensor:
        """Linear attention of `parts`: query, key, value, decay, and beta of the delta rule. Returns value's shape."""
        query, key, value, decay, *beta = parts
        if isinstance(self.paged, Recorded):
            num_decays = 1 if decay.dim() == 3 else decay.shape[3]
            shape = RecurrentShape(value.shape[2], key.shape[3], value.shape[3], num_decays)
            convolution = self.paged.states.get(self.layer, StateShape(self.layer, 0, 0))
            self.paged.states[self.layer] = replace(convolution, recurrent=shape)
            return torch.empty_like(value)
        pool, places = self.paged.pools_of_state(self.layer)[-1], self._places()
        inputs = (query, key, value, decay.float(), beta[0].float() if beta else None)
        if not self.by_kernel:
            return linear_attention(inputs, pool, places, CHUNK_SIZE, scale, normalizes=normalizes)
        output: Tensor = torch.ops.specdec.linear_attention(*inputs, pool, *places, CHUNK_SIZE, scale, normalizes)
        return output

    def scan(self, parts: tuple[Tensor, Tensor, Tensor, Tensor], decays: Tensor) -> Tensor:
        """Selective scan of `parts`, in float32: additions and steps of channels, keys, queries. Decays: (N, C).

        As many channels side by side share keys and queries as there are channels for each N numbers of a token's.
        """
        state_size, num_channels = decays.shape
        if isinstance(self.paged, Recorded):
            num_groups = parts[2].shape[-1] // state_size
            width = math.gcd(num_channels // num_groups, _MOST_CHANNELS)
            shape = RecurrentShape(num_channels // width, state_size, width, width)
            self.paged.states[self.layer] = replace(self.paged.states[self.layer], recurrent=shape)
            return torch.empty_like(parts[0])
        pool, places = self.paged.pools_of_state(self.layer)[-1], self._places()
        if not self.by_kernel:
            return selective_scan(parts, decays, pool, places, CHUNK_SIZE)
        output: Tensor = torch.ops.specdec.selective_scan(*parts, decays, pool, *places, CHUNK_SIZE)
        return output

    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        paged = cast(PagedInputs, self.paged)
        assert paged.state_slots is not None
        return paged.positions, paged.slot_mapping, paged.state_slots


class _Mixer(nn.Module):
    """One of transformers' modules, with a state in the step's paged inputs."""

    layer_idx: int
    model_config: PreTrainedConfig

    def states(self, paged: PagedInputs | Recorded) -> LayerStates:
        return LayerStates(paged, self.layer_idx, self.model_config._attn_implementation == KERNEL)


class ShortConv(_Mixer):
    """The forward of `Lfm2ShortConv` and its like, of one row of B x Q tokens."""

    in_proj: nn.Linear
    out_proj: nn.Linear
    conv: nn.Conv1d

    def forward(self, hidden_states: Tensor, *, paged: PagedInputs | Recorded | None = None, **kwargs: Any) -> Tensor:
        if paged is None:
            output: Tensor = super().forward(hidden_states, **kwargs)
            return output
        before, after, x = self.in_proj(hidden_states).chunk(3, dim=-1)
        convolved = self.states(paged).convolve(before * x, self.conv.weight.squeeze(1), self.conv.bias)
        mixed: Tensor = self.out_proj(after * convolved)
        return mixed


class LightningAttention(_Mixer):
    """The forward of `MiniMaxLightningAttention`: linear attention whose decay is a constant of each head.

    https://arxiv.org/abs/2405.17381
    """

    qkv_proj: nn.Linear
    out_proj: nn.Linear
    output_gate: nn.Linear
    norm: nn.Module
    act_fn: Callable[[Tensor], Tensor]
    num_attention_heads: int
    num_hidden_layers: int
    slopes: Tensor  # (H,) float32: in 16 bits a decay is off by more with every token
    head_dim: int

    def slopes_of_heads(self, device: torch.device) -> Tensor:
        """`get_slope_rate`, which a model of 16 bits has rounded."""
        factor = 1 - self.layer_idx / (self.num_hidden_layers - 1 + 1e-5) + 1e-5
        exponents = torch.arange(self.num_attention_heads, device=device) + 1
        return 2.0 ** (-8 / self.num_attention_heads * exponents.float()) * factor

    def forward(self, hidden_states: Tensor, *, paged: PagedInputs | Recorded | None = None, **kwargs: Any) -> Any:
        if paged is None:
            return super().forward(hidden_states, **kwargs)
        mixed = self.act_fn(self.qkv_proj(hidden_states))
        mixed = mixed.view(*mixed.shape[:2], -1, 3 * self.head_dim)
        # A constant, of each token: a step has its tokens' numbers in arrays of their own.
        own = mixed[..., 0].float()
        decay = torch.where(own > torch.inf, own, -self.slopes)
        parts = (*mixed.chunk(3, dim=-1), decay)
        attended = self.norm(self.states(paged).attend(parts, 1.0, normalizes=False).flatten(2))
        return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * attended), None


class MambaMixer(_Mixer):
    """The forward of `MambaMixer` and its like, whose step sizes are a product that none of their functions makes.

    Those of Falcon-Mamba and Jamba norm what the scan reads.
    """

    in_proj: nn.Linear
    conv1d: nn.Conv1d
    act: Callable[[Tensor], Tensor]
    x_proj: nn.Linear
    dt_proj: nn.Linear
    out_proj: nn.Linear
    A_log: Tensor  # (C, N), of Zamba (heads, C / heads, N)
    D: Tensor
    time_step_rank: int
    ssm_state_size: int

    def forward(self, hidden_states: Tensor, *, paged: PagedInputs | Recorded | None = None, **kwargs: Any) -> Tensor:
        if paged is None:
            output: Tensor = super().forward(hidden_states, **kwargs)
            return output
        states = self.states(paged)
        x, gate = self._divided(self.in_proj(hidden_states))
        x = self.act(states.convolve(x, self.conv1d.weight.squeeze(1), self.conv1d.bias))
        steps, keys, queries = self._read(x)
        steps, wide, decays = F.softplus(steps.float()), x.float(), -torch.exp(self.A_log.float().flatten(0, -2))
        parts = steps * wide, steps, keys.float(), queries.float()
        scanned = states.scan(parts, decays.t()) + wide * self.D.float().flatten()
        mixed: Tensor = self.out_proj((scanned * F.silu(gate).float()).to(x.dtype))
        return mixed

    def _divided(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and gate, (1, B x Q, C)."""
        x, gate = projected.chunk(2, dim=-1)
        return x, gate

    def _read(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Step sizes, (1, B x Q, C), before their softplus, and (1, B x Q, N) keys and queries."""
        read = torch.split(self.x_proj(x), self._sizes(), dim=-1)
        norms = [getattr(self, f"{name}_layernorm", None) for name in ("dt", "b", "c")]
        step, keys, queries = (one if norm is None else norm(one) for one, norm in zip(read, norms, strict=True))
        return self.dt_proj(step), keys, queries

    def _sizes(self) -> list[int]:
        return [self.time_step_rank, self.ssm_state_size, self.ssm_state_size]


class ZambaMixer(MambaMixer):
    """The forward of `ZambaMambaMixer`, whose heads each have a scan with keys and queries of their own."""

    x_proj_weight: Tensor  # (heads, rank + 2 N, C / heads)
    dt_proj_weight: Tensor  # (heads, C / heads, rank)
    dt_proj_bias: Tensor

    def _divided(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        pairs = projected.view(*projected.shape[:-1], -1, 2)
        return pairs[..., 0], pairs[..., 1]

    def _read(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        steps, keys, queries = [], [], []
        for i, part in enumerate(x.chunk(len(self.x_proj_weight), dim=-1)):
            step, key, query = torch.split(F.linear(part, self.x_proj_weight[i]), self._sizes(), dim=-1)
            steps.append(F.linear(step, self.dt_proj_weight[i], self.dt_proj_bias[i]))
            keys.append(key)
            queries.append(query)
        return torch.cat(steps, -1), torch.cat(keys, -1), torch.cat(queries, -1)


class GriffinBlock(_Mixer):
    """The forward of `RecurrentGemmaRecurrentBlock`: a convolution, and the RG-LRU with gates by blocks."""

    linear_x: nn.Linear
    linear_y: nn.Linear
    linear_out: nn.Linear
    conv_1d: nn.Conv1d
    act_fn: Callable[[Tensor], Tensor]
    rg_lru: Any

    def forward(self, input_states: Tensor, *, paged: PagedInputs | Recorded | None = None, **kwargs: Any) -> Any:
        if paged is None:
            return super().forward(input_states, **kwargs)
        states, unit = self.states(paged), self.rg_lru
        x = states.convolve(self.linear_x(input_states), self.conv_1d.weight.squeeze(1), self.conv_1d.bias)
        input_gate = _by_blocks(x, unit.input_gate_weight, unit.input_gate_bias).sigmoid()
        steps = _by_blocks(x, unit.recurrent_gate_weight, unit.recurrent_gate_bias).sigmoid().float()
        decay = -8.0 * F.softplus(unit.recurrent_param.float())
        position = kwargs["position_ids"].float().unsqueeze(-1)
        kept = torch.exp(2.0 * (steps * decay)) * position.clamp(max=1.0)  # none of what is before the first token
        added = (x * input_gate).float() * torch.sqrt(1.0 + -kept)
        one = position * 0.0 + 1.0  # a channel has one number
        scanned = states.scan((added, steps, one, one), decay.unsqueeze(0)).to(x.dtype)
        return self.linear_out(scanned * self.act_fn(self.linear_y(input_states))), None


def _by_blocks(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Products of (1, B x Q, C) tokens with a matrix of blocks, (H, C / H, C / H) from inputs to outputs."""
    parts = x.chunk(len(weight), dim=-1)
    return torch.cat([F.linear(part, weight[i].t(), bias[i]) for i, part in enumerate(parts)], dim=-1)


class RecurrentMixer(_Mixer):
    """A module whose forward hands its keywords on to the functions of `_MIXERS`."""

    def forward(self, hidden_states: Tensor, *, paged: PagedInputs | Recorded | None = None, **kwargs: Any) -> Tensor:
        if paged is not None:
            kwargs["paged"] = self.states(paged)
        output: Tensor = super().forward(hidden_states, **kwargs)
        return output


@cache
def _placed(module_class: type[nn.Module], mixer: type[_Mixer]) -> type[nn.Module]:
    return type(module_class.__name__, (mixer, module_class), {})


def _convolved(
    paged: LayerStates,
    hidden_states: Tensor,  # (1, C, B x Q)
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """transformers' `causal_conv1d_fn`."""
    convolved = paged.convolve(hidden_states.transpose(1, 2), weight, bias)
    return (convolved if activation is None else ACT2FN[activation](convolved)).transpose(1, 2)


def _delta_rule(
    paged: LayerStates,
    query: Tensor,  # (1, B x Q, Hk, D)
    key: Tensor,
    value: Tensor,  # (1, B x Q, H, Dv)
    g: Tensor,  # (1, B x Q, H), of Kimi's delta attention (1, B x Q, H, D)
    beta: Tensor,
    **settings: Any,
) -> tuple[Tensor, None]:
    """transformers' `torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`."""
    normalizes = settings.get("use_qk_l2norm_in_kernel", False)
    return paged.attend((query, key, value, g, beta), key.shape[-1] ** -0.5, normalizes=normalizes), None


def _chunk_scan(paged: LayerStates, *inputs: Tensor, **settings: Any) -> Tensor:
    """transformers' `mamba2_chunk_scan`: (1, B x Q, H, Dv) in float32.

    Inputs: (1, B x Q, H, Dv) hidden states, (1, B x Q, H) dt, (H,) A, (1, B x Q, groups, D) B and C.
    """
    hidden_states, dt, decay, keys, queries = inputs
    if (bias := settings.get("dt_bias")) is not None:
        dt = dt + bias.to(dt.dtype)
    dt = F.softplus(dt) if settings.get("dt_softplus") else dt
    low, high = settings.get("dt_limit", (0.0, math.inf))
    if low > 0:
        dt = dt.clamp(min=low)
    if not math.isinf(high):
        dt = dt.clamp(max=high)
    x, rates = hidden_states.float(), dt.float()
    parts = queries.float(), keys.float(), x * rates.unsqueeze(-1), decay.float() * rates
    output, skipped = paged.attend(parts, 1.0, normalizes=False), settings.get("D")
    return output if skipped is None else output + skipped.unsqueeze(-1) * x


def _place_functions(module_name: str, functions: dict[str, Callable[..., Any]]) -> None:
    """Have functions of transformers' module, by name, be ours where they get `paged`."""
    module = sys.modules[module_name]
    for name, ours in functions.items():
        theirs = getattr(module, name)
        if not hasattr(theirs, "of_paged"):
            setattr(module, name, _with_paged(theirs, ours))


def _with_paged(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    by_torch = inspect.unwrap(theirs)  # where a library for GPUs stands for it

    @wraps(theirs)
    def function(*args: Any, paged: LayerStates | None = None, **kwargs: Any) -> Any:
        if paged is not None:
            return ours(paged, *args, **kwargs)
        return (by_torch if args[0].device.type == "cpu" else theirs)(*args, **kwargs)

    function.of_paged = ours  # type: ignore[attr-defined]
    return function


_MOST_CHANNELS = 64  # that a thread scans together
_Functions = dict[str, Callable[..., Any]]
_DELTA_NET: _Functions = {"causal_conv1d_fn": _convolved, "torch_chunk_gated_delta_rule": _delta_rule}
_KIMI_DELTA: _Functions = {"causal_conv1d_fn": _convolved, "chunk_kimi_delta_attention": _delta_rule}
_MAMBA_2: _Functions = {"causal_conv1d_fn": _convolved, "mamba2_chunk_scan": _chunk_scan}
_MIXERS: dict[str, tuple[type[_Mixer], _Functions]] = {
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"), (ShortConv, {})),
    **dict.fromkeys(
        ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "OlmoHybridGatedDeltaNet"),
        (RecurrentMixer, _DELTA_NET),
    ),
    **dict.fromkeys(("MambaMixer", "FalconMambaMixer", "JambaMambaMixer"), (MambaMixer, {})),
    "ZambaMambaMixer": (ZambaMixer, {}),
    "RecurrentGemmaRecurrentBlock": (GriffinBlock, {}),
    "MiniMaxLightningAttention": (LightningAttention, {}),
    **dict.fromkeys(("KimiLinearDeltaAttention", "Glm5NextTextLinearAttention"), (RecurrentMixer, _KIMI_DELTA)),
    **dict.fromkeys(
        (
            *("Mamba2Mixer", "NemotronHMamba2Mixer", "BambaMixer", "GraniteMoeHybridMambaLayer", "FalconH1Mixer"),
            "Zamba2MambaMixer",
        ),
        (RecurrentMixer, _MAMBA_2),
    ),
}
"""transformers' classes of mixers, and the functions of their modules that ours stand for."""
_SHARED = {"ZambaAttention", "Zamba2Attention"}
"""Attention with one layer's weights in several, each with keys and values of its own, that is not told which it is."""
