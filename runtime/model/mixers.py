"""Layers that keep a state of earlier tokens instead of keys and values: transformers' modules, over slots of states.

Their forward stays transformers' own. It calls functions for a convolution along the tokens and for the recurrence. If
the step passes `paged`, our functions are called instead, as with attention (`runtime.model.attention`). LFM2, MiniMax
and RecurrentGemma call no such functions, and Mamba computes a product outside them: these get a forward of ours.
"""

import inspect
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from runtime.checkpoint.config import RecurrentShape, StateShape
from runtime.core.states import CHUNK_SIZE
from runtime.model.attention import KERNEL, PagedInputs, Recorded
from runtime.model.recurrences import linear_attention, selective_scan, short_conv
from runtime.model.replaced import NumberedLayer, own_module, replace_function

_MOST_CHANNELS = 64
"""Most channels that a thread scans together."""


@dataclass(frozen=True)
class LayerStates:
    """A layer's states in a step. While shapes are recorded, nothing is computed."""

    paged: PagedInputs | Recorded
    layer: int
    by_kernel: bool

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Causal convolution of each channel: inputs [1, B x Q, C], weights [C, kernel_size]."""
        if isinstance(self.paged, Recorded):
            self.paged.states[self.layer] = StateShape(self.layer, inputs.shape[-1], weight.shape[1] - 1)
            return torch.empty_like(inputs)
        function = torch.ops.specdec.short_conv if self.by_kernel else short_conv
        convolved: Tensor = function(inputs, weight, bias, self.paged.pools_of_state(self.layer)[0], *self._places())
        return convolved

    def attend(self, parts: tuple[Tensor, ...], scale: float, *, normalizes: bool) -> Tensor:
        """Linear attention, in the value's shape, from `parts`: query, key, value, decay, and perhaps beta."""
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
        """Selective scan in float32 from `parts`: channels' additions and step sizes, keys, queries. Decays are [N, C].

        Neighbouring channels share keys and queries, in groups of equal size, one group for each N of a token's keys.
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


class Mixer(NumberedLayer):
    """Base for a module of transformers that keeps a state in the step's paged inputs."""

    def states(self, paged: PagedInputs | Recorded) -> LayerStates:
        return LayerStates(paged, self.layer_idx, self.model_config._attn_implementation == KERNEL)


class OwnMixer(Mixer):
    """A mixer whose `mixed` takes the place of its forward in a step with paged inputs."""

    def forward(self, hidden_states: Tensor, *, paged: PagedInputs | Recorded | None = None, **kwargs: Any) -> Any:
        if paged is None:
            return super().forward(hidden_states, **kwargs)
        return self.mixed(hidden_states, self.states(paged), **kwargs)

    @abstractmethod
    def mixed(self, hidden_states: Tensor, states: LayerStates, **kwargs: Any) -> Any:
        """The output of the module's forward for one row of B x Q tokens [1, B x Q, C]."""


class MambaMixer(OwnMixer):
    """Forward of `MambaMixer` and similar modules, whose step sizes come from a product that none of transformers'
    functions computes. Falcon-Mamba and Jamba also normalise the scan's inputs.
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

    def mixed(self, hidden_states: Tensor, states: LayerStates, **kwargs: Any) -> Tensor:
        x, gate = self._divided(self.in_proj(hidden_states))
        x = self.act(states.convolve(x, self.conv1d.weight.squeeze(1), self.conv1d.bias))
        steps, keys, queries = self._read(x)
        steps, wide, decays = F.softplus(steps.float()), x.float(), -torch.exp(self.A_log.float().flatten(0, -2))
        parts = steps * wide, steps, keys.float(), queries.float()
        scanned = states.scan(parts, decays.t()) + wide * self.D.float().flatten()
        output: Tensor = self.out_proj((scanned * F.silu(gate).float()).to(x.dtype))
        return output

    def _divided(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and gate, [1, B x Q, C] each."""
        x, gate = projected.chunk(2, dim=-1)
        return x, gate

    def _read(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Step sizes [1, B x Q, C], before their softplus, and keys and queries [1, B x Q, N]."""
        read = torch.split(self.x_proj(x), self._sizes(), dim=-1)
        norms = [getattr(self, f"{name}_layernorm", None) for name in ("dt", "b", "c")]
        step, keys, queries = (one if norm is None else norm(one) for one, norm in zip(read, norms, strict=True))
        return self.dt_proj(step), keys, queries

    def _sizes(self) -> list[int]:
        return [self.time_step_rank, self.ssm_state_size, self.ssm_state_size]


def _convolved(
    paged: LayerStates,
    hidden_states: Tensor,  # (1, C, B x Q)
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """Convolution in place of transformers' `causal_conv1d_fn`."""
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
    """Delta rule in place of transformers' `torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`."""
    normalizes = settings.get("use_qk_l2norm_in_kernel", False)
    return paged.attend((query, key, value, g, beta), key.shape[-1] ** -0.5, normalizes=normalizes), None


def _chunk_scan(paged: LayerStates, *inputs: Tensor, **settings: Any) -> Tensor:
    """Scan in place of transformers' `mamba2_chunk_scan`; returns [1, B x Q, H, Dv] in float32. Inputs: hidden states
    [1, B x Q, H, Dv], dt [1, B x Q, H], A [H], B and C [1, B x Q, groups, D].
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


class RecurrentMixer(Mixer):
    """A module whose forward passes its keywords on to `functions`."""

    functions: ClassVar[dict[str, Callable[..., Any]]]
    """Functions of transformers' module by name, and our functions that replace them in a step with paged inputs."""

    def prepare(self, name: str, model: PreTrainedModel) -> None:
        super().prepare(name, model)
        for function, ours in self.functions.items():
            replace_function(own_module(self), function, partial(_with_paged, ours))

    def forward(self, hidden_states: Tensor, *, paged: PagedInputs | Recorded | None = None, **kwargs: Any) -> Any:
        if paged is not None:
            kwargs["paged"] = self.states(paged)
        return super().forward(hidden_states, **kwargs)


class DeltaNet(RecurrentMixer):
    """A gated delta rule after a convolution."""

    functions: ClassVar = {"causal_conv1d_fn": _convolved, "torch_chunk_gated_delta_rule": _delta_rule}


class KimiDelta(RecurrentMixer):
    """Kimi's delta rule, with a decay for each number of a key, after a convolution."""

    functions: ClassVar = {"causal_conv1d_fn": _convolved, "chunk_kimi_delta_attention": _delta_rule}


class Mamba2(RecurrentMixer):
    """Mamba 2's state-space mixer: linear attention with a decay for each head, after a convolution."""

    functions: ClassVar = {"causal_conv1d_fn": _convolved, "mamba2_chunk_scan": _chunk_scan}


def _with_paged(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ours if `paged` is passed, and transformers' otherwise."""
    by_torch = inspect.unwrap(theirs)  # a library for GPUs may have replaced it

    def function(*args: Any, paged: LayerStates | None = None, **kwargs: Any) -> Any:
        if paged is not None:
            return ours(paged, *args, **kwargs)
        return (by_torch if args[0].device.type == "cpu" else theirs)(*args, **kwargs)

    return function
