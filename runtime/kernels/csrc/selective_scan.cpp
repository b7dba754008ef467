// Recurrences of numbers that decay each by itself, over states in sequences' slots (`runtime.model.recurrences`):
// Mamba's selective scan (Gu and Dao, 2023, https://arxiv.org/abs/2312.00752) and, with one number of a channel, the
// RG-LRU (De et al., 2024, https://arxiv.org/abs/2402.19427).
//
// A channel c has numbers h(n), its state. A token with steps t, additions u, a key k and a query q changes them to
//   h(n) = exp(t(c) a(n, c)) h(n) + u(c) k(n),
// and its output is the sum of q(n) h(n) in the order of n. Groups of channels may have keys and queries of their own
// (Zamba). A slot has the state before each of the last few chunks of positions, and k, u and t of each of their tokens. A
// step computes the state again from its chunk's beginning on, token by token. So a number does not depend on the other
// tokens of its step, and going back to an earlier position undoes nothing.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "lanes.h"
#include "tasks.h"
#include "vector_functions.h"

namespace {

// One head's part of a chunk: the state of its neighbouring channels, and its tokens' keys, additions and steps.
struct ScannedChunk {
  float *state, *keys, *added, *steps;

  ScannedChunk(float* memory, int64_t chunk_size, int64_t state_size, int64_t width)
      : state(memory), keys(state + state_size * width), added(keys + chunk_size * state_size),
        steps(added + chunk_size * width) {}
  static int64_t size(int64_t chunk_size, int64_t state_size, int64_t width) {
    return state_size * width + chunk_size * (state_size + 2 * width);
  }
};

struct SelectiveScan {
  const float *added, *steps, *keys, *queries;  // (B x Q, H x width) twice, (B x Q, groups x state_size) twice
  const float* decays;                          // (state_size, H x width)
  float *pool, *output;                         // (num_slots, H, num_chunks x ScannedChunk::size), (B x Q, H x width)
  const int64_t *positions, *slots, *state_slots;
  int64_t B, Q, num_heads, num_groups, state_size, width, chunk_size, num_chunks;

  void compute_head(int64_t head) const {
    thread_local std::vector<float> numbers;
    numbers.resize(state_size * width);
    float* state = numbers.data();
    const int64_t per_chunk = ScannedChunk::size(chunk_size, state_size, width), channels = num_heads * width;
    for (int64_t b = 0; b < B; ++b) {
      int64_t num_tokens = Q;
      while (num_tokens > 0 && slots[b * Q + num_tokens - 1] == 0) --num_tokens;  // padding
      float* memory = pool + (state_slots[b] * num_heads + head) * num_chunks * per_chunk;
      const auto chunk_at = [&](int64_t number) {
        return ScannedChunk(memory + number % num_chunks * per_chunk, chunk_size, state_size, width);
      };
      for (int64_t i = 0; i < num_tokens; ++i) {
        const int64_t position = positions[b * Q + i], number = position / chunk_size, first = position % chunk_size;
        const int64_t token = b * Q + i, own = token * channels + head * width;
        const int64_t of_group = (token * num_groups + head * num_groups / num_heads) * state_size;
        const ScannedChunk chunk = chunk_at(number);
        if (position == 0) std::fill_n(state, state_size * width, 0.0f);
        else if (i == 0) replay(first ? chunk : chunk_at(number - 1), first ? first : chunk_size, head, state);
        if (first == 0) std::copy_n(state, state_size * width, chunk.state);
        std::copy_n(keys + of_group, state_size, chunk.keys + first * state_size);
        std::copy_n(added + own, width, chunk.added + first * width);
        std::copy_n(steps + own, width, chunk.steps + first * width);
        advance(chunk, first, head, state);
        read(state, queries + of_group, output + own);
      }
      for (int64_t i = num_tokens; i < Q; ++i) std::fill_n(output + (b * Q + i) * channels + head * width, width, 0.0f);
    }
  }

  // Computes the state before token `count` of a chunk.
  void replay(const ScannedChunk& chunk, int64_t count, int64_t head, float* state) const {
    std::copy_n(chunk.state, state_size * width, state);
    for (int64_t i = 0; i < count; ++i) advance(chunk, i, head, state);
  }

  // What is computed again has the bits that it had: it is done by the same instructions.
  __attribute__((noinline)) void advance(const ScannedChunk& chunk, int64_t i, int64_t head, float* state) const {
    const float *key = chunk.keys + i * state_size, *u = chunk.added + i * width, *step = chunk.steps + i * width;
    for (int64_t n = 0; n < state_size; ++n) {
      const float* decay = decays + n * num_heads * width + head * width;
      float* to = state + n * width;
      int64_t c = 0;
      for (; c + kLanes <= width; c += kLanes)
        store(to + c, exp_lanes(load(step + c) * load(decay + c)) * load(to + c) + load(u + c) * key[n]);
      for (; c < width; ++c) to[c] = std::exp(step[c] * decay[c]) * to[c] + u[c] * key[n];
    }
  }

  void read(const float* state, const float* query, float* to) const {
    int64_t c = 0;
    for (; c + kLanes <= width; c += kLanes) {
      Lanes sum{};
      for (int64_t n = 0; n < state_size; ++n) sum += query[n] * load(state + n * width + c);
      store(to + c, sum);
    }
    for (; c < width; ++c) {
      to[c] = 0.0f;
      for (int64_t n = 0; n < state_size; ++n) to[c] += query[n] * state[n * width + c];
    }
  }
};

at::Tensor selective_scan(const at::Tensor& added, const at::Tensor& steps, const at::Tensor& keys,
                          const at::Tensor& queries, const at::Tensor& decays, at::Tensor pool,
                          const at::Tensor& positions, const at::Tensor& slots, const at::Tensor& state_slots,
                          int64_t chunk_size) {
  const at::Tensor u = added.contiguous(), t = steps.contiguous(), k = keys.contiguous(), q = queries.contiguous();
  const at::Tensor a = decays.contiguous();
  at::Tensor output = at::empty_like(u);
  const int64_t B = positions.size(0), Q = positions.size(1), num_heads = pool.size(1);
  const int64_t state_size = a.size(0), width = a.size(1) / num_heads;
  const int64_t num_chunks = pool.size(2) / ScannedChunk::size(chunk_size, state_size, width);
  const int64_t num_groups = k.size(-1) / state_size;
  TORCH_CHECK(a.size(1) == num_heads * width && u.numel() == B * Q * num_heads * width && t.numel() == u.numel() &&
                  num_groups > 0 && num_heads % num_groups == 0 && k.numel() == B * Q * num_groups * state_size && q.numel() == k.numel() && state_slots.size(0) == B &&
                  num_chunks >= 2 && pool.size(2) % num_chunks == 0 && pool.is_contiguous() &&
                  positions.is_contiguous() && slots.is_contiguous(),
              "selective_scan is called with sizes that do not fit");
  const SelectiveScan scan{
      u.const_data_ptr<float>(), t.const_data_ptr<float>(), k.const_data_ptr<float>(), q.const_data_ptr<float>(),
      a.const_data_ptr<float>(), pool.mutable_data_ptr<float>(), output.mutable_data_ptr<float>(),
      positions.const_data_ptr<int64_t>(), slots.const_data_ptr<int64_t>(), state_slots.const_data_ptr<int64_t>(),
      B, Q, num_heads, num_groups, state_size, width, chunk_size, num_chunks};
  share_tasks(num_heads, [&](int64_t head) { scan.compute_head(head); });
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(specdec, library) {
  library.def(
      "selective_scan(Tensor added, Tensor steps, Tensor keys, Tensor queries, Tensor decays, Tensor(a!) pool, Tensor "
      "positions, Tensor slots, Tensor state_slots, int chunk_size) -> Tensor");
}
TORCH_LIBRARY_IMPL(specdec, CPU, library) { library.impl("selective_scan", selective_scan); }
