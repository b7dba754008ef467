"""Short convolutions, linear attention with decay and selective scans over states of sequences, in torch.

A token's output of a convolution depends on the inputs of the `kernel_size - 1` tokens before it. Inputs of its own row
are in the step; earlier ones are in the sequence's slot (`runtime.core.states`).

Linear attention is the gated delta rule (Yang, Kautz and Hatamizadeh, 2024, https://arxiv.org/abs/2412.06464). With a
decay for each number of a key it is Kimi's delta attention (Kimi Team, 2025, https://arxiv.org/abs/2510.26692), and
without `beta` the recurrence of Mamba-2 (Dao and Gu, 2024, https://arxiv.org/abs/2405.21060). A head's state S maps
keys to values. It is kept for the beginnings of chunks of positions. For each token of the last few chunks its key, the
sum of decays since its chunk's beginning, and its addition to the state are kept too: `csrc/linear_attention.cpp` has
the equations. So a token's output depends on its position and on the tokens before it, not on the other tokens of its
step, and going back to an earlier position undoes nothing.

A selective scan is Mamba's (Gu and Dao, 2023, https://arxiv.org/abs/2312.00752) and the RG-LRU's (De et al., 2024,
https://arxiv.org/abs/2402.19427): each number of a state decays by itself. The same kinds of numbers are kept;
`csrc/selective_scan.cpp` has the equations.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor


def short_conv(
    inputs: Tensor,  # (1, B x Q, C)
    weight: Tensor,  # (C, kernel_size)
    bias: Tensor | None,
    pool: Tensor,  # (num_slots, length, C), which is written
    positions: Tensor,  # (B, Q) int64
    slot_mapping: Tensor,  # (B, Q) int64, 0 of padding
    state_slots: Tensor,  # (B,) int64, each once, but for the null slot
) -> Tensor:  # (1, B x Q, C)
    """Depthwise causal convolution over each row's tokens and the tokens before them, by torch's own operations."""
    (B, Q), kernel_size, length = positions.shape, weight.shape[1], pool.shape[1]
    rows = inputs.reshape(B, Q, -1)
    ago = torch.arange(kernel_size - 1, 0, -1, device=positions.device)
    earlier = positions[:, :1] - ago
    history = pool[state_slots[:, None], earlier % length].where((earlier >= 0).unsqueeze(-1), 0)
    all_inputs = torch.cat([history, rows], 1).float()
    sums = torch.zeros_like(rows, dtype=torch.float32) if bias is None else bias.float().expand(B, Q, -1)
    for i in range(kernel_size):
        sums = sums + weight[:, i].float() * all_inputs[:, i : i + Q]
    is_kept = (slot_mapping != 0) & (positions > positions.amax(1, keepdim=True) - length)
    pool.index_put_((state_slots[:, None].where(is_kept, 0), positions % length), rows)
    return sums.to(inputs.dtype).view_as(inputs)


def linear_attention(
    parts: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    pool: Tensor,  # (num_slots, H, num_chunks x numbers) float32, which is written
    places: tuple[Tensor, Tensor, Tensor],
    chunk_size: int,
    scale: float,
    *,
    normalizes: bool,
) -> Tensor:  # (1, B x Q, H, Dv)
    """The outputs of all rows' tokens, row by row. Queries and keys get length 1 if `normalizes` is true.

    Parts: query and key [1, B x Q, Hk, D], value [1, B x Q, H, Dv], and in float32 logarithms of decay, [1, B x Q, H]
    or [1, B x Q, H, D], and beta [1, B x Q, H] or None. Places: positions and slot mapping [B, Q], which is 0 for
    padding, and slots of states [B].
    """
    (query, key, value, decay, beta), (positions, slot_mapping, state_slots) = parts, places
    Q, (H, Dv) = positions.shape[1], value.shape[2:]
    queries, keys = (_of_heads(one, H, normalizes=normalizes) for one in (query, key))
    values, output = value[0].float(), torch.zeros_like(value)
    decays = decay[0].reshape(len(values), H, -1)
    rates = torch.ones_like(decays[..., 0]) if beta is None else beta[0]
    for b, slot in enumerate(state_slots.tolist()):
        begin, num_tokens = b * Q, int((slot_mapping[b] != 0).sum())
        chunks = _Chunks(pool[slot], chunk_size, key.shape[3], Dv, decays.shape[2])
        while num_tokens:
            position = int(positions.flatten()[begin])
            count = min(num_tokens, chunk_size - position % chunk_size)
            tokens = slice(begin, begin + count)
            of_tokens = (queries[tokens] * scale, keys[tokens], values[tokens], decays[tokens], rates[tokens])
            of_heads = [one.transpose(0, 1) for one in of_tokens]
            made = chunks.attend(position, of_heads, corrects=beta is not None)
            output[0, tokens] = made.transpose(0, 1).to(value.dtype)
            begin, num_tokens = begin + count, num_tokens - count
    return output


def selective_scan(
    parts: tuple[Tensor, Tensor, Tensor, Tensor],
    decays: Tensor,  # (N, H x W) float32
    pool: Tensor,  # (num_slots, H, num_chunks x numbers) float32, which is written
    places: tuple[Tensor, Tensor, Tensor],
    chunk_size: int,
) -> Tensor:  # (1, B x Q, H x W)
    """The outputs of all rows' tokens, row by row.

    Parts, in float32: additions and steps (by which decays are multiplied) [1, B x Q, H x W], keys and queries [1, B x
    Q, groups x N]. Places: as in `linear_attention`.
    """
    (added, steps, keys, queries), (positions, slot_mapping, state_slots) = parts, places
    Q, H, N = positions.shape[1], pool.shape[1], decays.shape[0]
    own = decays.view(N, H, -1).transpose(0, 1)  # (H, N, W)
    of_heads = [one[0].view(len(one[0]), H, 1, -1) for one in (added, steps)]
    keys, queries = (
        one[0].view(len(one[0]), -1, N).repeat_interleave(H * N // one.shape[-1], 1) for one in (keys, queries)
    )
    output = torch.zeros_like(added)

    def advanced(state: Tensor, key: Tensor, u: Tensor, step: Tensor) -> Tensor:
        return (step * own).exp() * state + u * key

    for b, slot in enumerate(state_slots.tolist()):
        chunks = _Chunks(pool[slot], chunk_size, N, own.shape[2], own.shape[2])
        state = pool.new_zeros(())
        for token in range(b * Q, b * Q + int((slot_mapping[b] != 0).sum())):
            number, first = divmod(int(positions.flatten()[token]), chunk_size)
            if token == b * Q and number + first:  # computed again from the chunk's beginning
                state, *before = chunks.parts(number if first else number - 1)
                for i in range(first or chunk_size):
                    key, u, step = (one[:, i] for one in before)
                    state = advanced(state, key.unsqueeze(2), u.unsqueeze(1), step.unsqueeze(1))
            start, kept_keys, kept_added, kept_steps = chunks.parts(number)
            if first == 0:
                start.copy_(state)
            u, step = (one[token] for one in of_heads)
            kept_keys[:, first], kept_added[:, first], kept_steps[:, first] = keys[token], u[:, 0], step[:, 0]
            state = advanced(state, keys[token].unsqueeze(2), u, step)
            output[0, token] = (queries[token].unsqueeze(2) * state).sum(1).flatten()
    return output


def _of_heads(x: Tensor, num_heads: int, *, normalizes: bool) -> Tensor:
    """Heads [B x Q, H, D] float32, from `x` [1, B x Q, Hk, D]."""
    x = x[0].float().repeat_interleave(num_heads // x.shape[2], dim=1)
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) if normalizes else x


@dataclass
class _Chunks:
    """A slot's numbers, chunk by chunk: the state [H, D, Dv] before the chunk, and for its C tokens the keys, the
    additions to the state, and the sums of decays (`parts`).
    """

    slot: Tensor  # (H, num_chunks x numbers)
    size: int
    key_dim: int
    value_dim: int
    num_decays: int

    def parts(self, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Views: a chunk's state, keys [H, C, D], additions [H, C, Dv] and sums of decays [H, C, num_decays]."""
        D, Dv, C = self.key_dim, self.value_dim, self.size
        sizes = [D * Dv, C * D, C * Dv, C * self.num_decays]
        num_chunks = self.slot.shape[1] // sum(sizes)
        chunk = self.slot.view(-1, num_chunks, sum(sizes))[:, number % num_chunks]
        ends = [0, *accumulate(sizes)]
        state, keys, added, decays = (chunk[:, begin:end] for begin, end in pairwise(ends))
        return state.view(-1, D, Dv), keys.view(-1, C, D), added.view(-1, C, Dv), decays.view(-1, C, self.num_decays)

    def attend(self, position: int, tokens: list[Tensor], *, corrects: bool) -> Tensor:
        """Outputs [H, n, Dv] of n tokens of a chunk, from query, key, value, decay and beta of each head."""
        query, key, value, decay, rates = tokens
        number, first = divmod(position, self.size)
        state, keys, added, decays = self.parts(number)
        if first == 0:
            state.copy_(self._state_after(number - 1))
        end = first + key.shape[1]
        keys[:, first:end] = key
        decays[:, first:end] = decay.cumsum(1) + (decays[:, first - 1 : first] if first else 0)
        own = decays[:, first:end]
        sees = torch.ones(end - first, end, dtype=torch.bool, device=key.device).tril(first)
        factors = (own.unsqueeze(2) - decays[:, None, :end]).exp()  # (H, n, end, num_decays)
        of_queries = self._products(query, keys[:, :end], factors).where(sees, 0)
        if corrects:
            of_keys = self._products(key, keys[:, :end], factors).where(sees, 0) * rates.unsqueeze(-1)
            of_state = (own.exp() * key) @ state
            value = rates.unsqueeze(-1) * (value - of_state) - of_keys[:, :, :first] @ added[:, :first]
            value = torch.linalg.solve_triangular(of_keys[:, :, first:], value, upper=False, unitriangular=True)
        added[:, first:end] = value
        # A token with NaN or infinity makes NaN of the outputs that see it; a product with 0 would spread it to others.
        broken = ~added[:, :end].isfinite().all(-1)
        output = (own.exp() * query) @ state + of_queries @ added[:, :end].where(~broken.unsqueeze(-1), 0)
        return output.masked_fill((sees & broken.unsqueeze(1)).any(-1, keepdim=True), torch.nan)

    def _products(self, x: Tensor, keys: Tensor, factors: Tensor) -> Tensor:
        """Products [H, n, end] of `x` [H, n, D] with `keys` [H, end, D], which have decayed by `factors`."""
        if self.num_decays == 1:
            return x @ keys.transpose(1, 2) * factors[..., 0]
        return (x.unsqueeze(2) * keys.unsqueeze(1) * factors).sum(-1)

    def _state_after(self, number: int) -> Tensor:
        if number < 0:
            return self.slot.new_zeros(())
        state, keys, added, decays = self.parts(number)
        last = decays[:, -1:]
        return last.exp().transpose(1, 2) * state + (keys * (last - decays).exp()).transpose(1, 2) @ added
