// Linear attention with decay over states in sequences' slots (`runtime.model.recurrences`): the gated delta rule
// (Yang, Kautz and Hatamizadeh, 2024, https://arxiv.org/abs/2412.06464), Kimi's delta attention, where each number of a key
// has a decay of its own (Kimi Team, 2025, https://arxiv.org/abs/2510.26692), and, without `beta`, Mamba-2's recurrence (Dao
// and Gu, 2024, https://arxiv.org/abs/2405.21060).
//
// A head's state is a matrix S that maps keys to values. It is kept for the beginnings of chunks of positions only.
// Token i of a chunk has key k, query q and the sum g(i) of decays from the chunk's beginning on; it adds
//   u(i) = beta (v - exp(g(i)) k S - sum over j < i of exp(g(i) - g(j)) (k . k(j)) u(j)),   or v without beta,
// and its output
//   o(i) = exp(g(i)) q S + sum over j <= i of exp(g(i) - g(j)) (q . k(j)) u(j).
// If each number of a key has a decay, exp(g(i)) is a factor within q S and k S, and exp(g(i) - g(j)) within the products of
// keys. k, u and g of each token of the last few chunks are kept by position. The first token of a chunk computes the chunk's
// state from the state and the tokens of the chunk before. So a number depends on its position and on the tokens before it,
// and on nothing else; going back to an earlier position undoes nothing.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "lanes.h"
#include "tasks.h"
#include "vector_functions.h"

namespace {

inline float dot(const float* a, const float* b, int64_t count) {
  Lanes sums{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sums += load(a + i) * load(b + i);
  float sum = 0.0f;
  for (int k = 0; k < kLanes; ++k) sum += sums[k];
  for (; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

// to += factor * from
inline void add_scaled(float* to, float factor, const float* from, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(to + i) + factor * load(from + i));
  for (; i < count; ++i) to[i] += factor * from[i];
}

// Two registers' columns of out (rows, columns) += x (rows, depth) times matrix (depth, columns). Every sum is taken in the
// order of depth.
template <int rows>
inline void add_product_tile(const float* x, int64_t x_row, int64_t x_step, const float* matrix, int64_t depth,
                             int64_t columns, float* out) {
  Lanes sums[rows][2];
  for (int r = 0; r < rows; ++r) sums[r][0] = load(out + r * columns), sums[r][1] = load(out + r * columns + kLanes);
  for (int64_t d = 0; d < depth; ++d) {
    const Lanes first = load(matrix + d * columns), second = load(matrix + d * columns + kLanes);
    for (int r = 0; r < rows; ++r) {
      const float factor = x[r * x_row + d * x_step];
      sums[r][0] += factor * first, sums[r][1] += factor * second;
    }
  }
  for (int r = 0; r < rows; ++r) store(out + r * columns, sums[r][0]), store(out + r * columns + kLanes, sums[r][1]);
}

// out (rows, columns) += x times matrix (depth, columns); number (r, d) of x is x[r * x_row + d * x_step].
inline void add_product(const float* x, int64_t x_row, int64_t x_step, int64_t rows, const float* matrix, int64_t depth,
                        int64_t columns, float* out) {
  int64_t c = 0;
  for (; c + 2 * kLanes <= columns; c += 2 * kLanes)
    for (int64_t r = 0; r < rows; r += kTileRows)
      dispatch_rows<kTileRows>(std::min(kTileRows, rows - r), [&](auto of_tile) {
        add_product_tile<of_tile>(x + r * x_row, x_row, x_step, matrix + c, depth, columns, out + r * columns + c);
      });
  for (; c < columns; ++c)
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t d = 0; d < depth; ++d) out[r * columns + c] += x[r * x_row + d * x_step] * matrix[d * columns + c];
}

// One head's part of a chunk: its state, and its tokens' keys, additions u, and sums of decays.
struct Chunk {
  float *state, *keys, *added, *decays;

  Chunk(float* memory, int64_t chunk_size, int64_t key_dim, int64_t value_dim)
      : state(memory), keys(state + key_dim * value_dim), added(keys + chunk_size * key_dim),
        decays(added + chunk_size * value_dim) {}
  static int64_t size(int64_t chunk_size, int64_t key_dim, int64_t value_dim, int64_t num_decays) {
    return key_dim * value_dim + chunk_size * (key_dim + value_dim + num_decays);
  }
};

template <typename T>
struct LinearAttention {
  const T *query, *key, *value;  // (B x Q, Hk, key_dim) twice, (B x Q, H, value_dim)
  const float *decay, *beta;     // (B x Q, H, num_decays) and (B x Q, H); beta may be null
  float* pool;                   // (num_slots, H, num_chunks x Chunk::size)
  T* output;                     // (B x Q, H, value_dim)
  const int64_t *positions, *slots, *state_slots;
  int64_t B, Q, num_key_heads, num_heads, key_dim, value_dim, num_decays, chunk_size, num_chunks;
  float scale;
  bool normalizes;

  void compute_head(int64_t head) const {
    const int64_t per_chunk = Chunk::size(chunk_size, key_dim, value_dim, num_decays);
    for (int64_t b = 0; b < B; ++b) {
      int64_t num_tokens = Q;
      while (num_tokens > 0 && slots[b * Q + num_tokens - 1] == 0) --num_tokens;  // padding
      float* memory = pool + (state_slots[b] * num_heads + head) * num_chunks * per_chunk;
      const auto chunk_at = [&](int64_t number) {
        return Chunk(memory + number % num_chunks * per_chunk, chunk_size, key_dim, value_dim);
      };
      for (int64_t i = 0; i < num_tokens;) {
        const int64_t position = positions[b * Q + i], number = position / chunk_size, first = position % chunk_size;
        const int64_t count = std::min(chunk_size - first, num_tokens - i);
        const Chunk chunk = chunk_at(number);
        if (first == 0 && number == 0) std::fill_n(chunk.state, key_dim * value_dim, 0.0f);
        else if (first == 0) begin(chunk, chunk_at(number - 1));
        compute(chunk, head, b * Q + i, first, count);
        i += count;
      }
      for (int64_t i = num_tokens; i < Q; ++i)
        std::fill_n(output + ((b * Q + i) * num_heads + head) * value_dim, value_dim, T(0.0f));
    }
  }

  // Computes the chunk's state from the chunk before.
  void begin(const Chunk& chunk, const Chunk& before) const {
    thread_local std::vector<float> keys;
    keys.resize(chunk_size * key_dim);
    std::vector<float> factors(key_dim);
    const float* last = before.decays + (chunk_size - 1) * num_decays;
    decayed(nullptr, last, nullptr, factors.data());
    for (int64_t d = 0; d < key_dim; ++d)
      for (int64_t c = 0; c < value_dim; ++c)
        chunk.state[d * value_dim + c] = factors[d] * before.state[d * value_dim + c];
    for (int64_t j = 0; j < chunk_size; ++j)
      decayed(before.keys + j * key_dim, last, before.decays + j * num_decays, keys.data() + j * key_dim);
    add_product(keys.data(), 1, key_dim, key_dim, before.added, chunk_size, value_dim, chunk.state);
  }

  // to = exp(now - then) * from, for each number of a key; a missing `then` counts as 0, and a missing `from` as 1.
  void decayed(const float* from, const float* now, const float* then, float* to) const {
    if (num_decays == 1) {
      const float factor = std::exp(then ? *now - *then : *now);
      for (int64_t d = 0; d < key_dim; ++d) to[d] = from ? factor * from[d] : factor;
      return;
    }
    int64_t d = 0;
    for (; d + kLanes <= key_dim; d += kLanes) {
      const Lanes factor = exp_lanes(then ? load(now + d) - load(then + d) : load(now + d));
      store(to + d, from ? factor * load(from + d) : factor);
    }
    for (; d < key_dim; ++d) {
      const float factor = std::exp(then ? now[d] - then[d] : now[d]);
      to[d] = from ? factor * from[d] : factor;
    }
  }

  // Computes `count` tokens of a row, from number `token` on, which are number `first` and the next of their chunk.
  void compute(const Chunk& chunk, int64_t head, int64_t token, int64_t first, int64_t count) const {
    thread_local std::vector<float> queries, of_state, decayed_keys, decayed_queries;
    queries.resize(chunk_size * key_dim);
    of_state.assign(2 * count * value_dim, 0.0f);
    const int64_t key_head = head / (num_heads / num_key_heads);
    float *of_keys = of_state.data(), *of_queries = of_keys + count * value_dim;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t from = ((token + i) * num_key_heads + key_head) * key_dim;
      float *q = queries.data() + i * key_dim, *k = chunk.keys + (first + i) * key_dim;
      read(query + from, q, scale);
      read(key + from, k, 1.0f);
      const float* own = decay + ((token + i) * num_heads + head) * num_decays;
      float* sums = chunk.decays + (first + i) * num_decays;
      for (int64_t d = 0; d < num_decays; ++d) sums[d] = (first + i ? sums[d - num_decays] : 0.0f) + own[d];
    }
    // A decay that all numbers share is a factor of the whole product (`compute_token`).
    const float *keys = chunk.keys + first * key_dim, *of_state_queries = queries.data();
    if (num_decays > 1) {
      decayed_keys.resize(count * key_dim), decayed_queries.resize(count * key_dim);
      for (int64_t i = 0; i < count; ++i) {
        const float* sums = chunk.decays + (first + i) * num_decays;
        decayed(keys + i * key_dim, sums, nullptr, decayed_keys.data() + i * key_dim);
        decayed(queries.data() + i * key_dim, sums, nullptr, decayed_queries.data() + i * key_dim);
      }
      keys = decayed_keys.data(), of_state_queries = decayed_queries.data();
    }
    if (beta) add_product(keys, key_dim, 1, count, chunk.state, key_dim, value_dim, of_keys);
    add_product(of_state_queries, key_dim, 1, count, chunk.state, key_dim, value_dim, of_queries);
    for (int64_t i = 0; i < count; ++i)
      compute_token(chunk, head, token + i, first + i, queries.data() + i * key_dim, of_keys + i * value_dim,
                    of_queries + i * value_dim);
  }

  void compute_token(const Chunk& chunk, int64_t head, int64_t token, int64_t i, const float* q, float* of_key,
                     float* of_query) const {
    thread_local std::vector<float> decayed_key;
    decayed_key.resize(key_dim);
    const float *k = chunk.keys + i * key_dim, *g = chunk.decays + i * num_decays;
    float *u = chunk.added + i * value_dim, *o = of_query;
    widen(value + (token * num_heads + head) * value_dim, u, value_dim);
    if (num_decays == 1) {
      const float all = std::exp(*g);
      for (int64_t c = 0; c < value_dim; ++c) o[c] *= all;
      if (beta)
        for (int64_t c = 0; c < value_dim; ++c) of_key[c] *= all;
    }
    for (int64_t j = 0; j < i; ++j) {
      const float *k_j = chunk.keys + j * key_dim, *g_j = chunk.decays + j * num_decays, *u_j = chunk.added + j * value_dim;
      float factor = 1.0f;
      if (num_decays == 1) factor = std::exp(*g - *g_j);
      else decayed(k_j, g, g_j, decayed_key.data()), k_j = decayed_key.data();
      if (beta) add_scaled(of_key, factor * dot(k, k_j, key_dim), u_j, value_dim);
      add_scaled(o, factor * dot(q, k_j, key_dim), u_j, value_dim);
    }
    if (beta) {
      const float rate = beta[token * num_heads + head];
      for (int64_t c = 0; c < value_dim; ++c) u[c] = rate * (u[c] - of_key[c]);
    }
    add_scaled(o, dot(q, k, key_dim), u, value_dim);
    T* to = output + (token * num_heads + head) * value_dim;
    int64_t c = 0;
    for (; c + kLanes <= value_dim; c += kLanes) narrow(load(o + c), to + c);
    for (; c < value_dim; ++c) to[c] = static_cast<T>(o[c]);
  }

  // A query or a key in float32, of length 1 if that is asked for, times a factor.
  void read(const T* from, float* to, float factor) const {
    widen(from, to, key_dim);
    if (normalizes) factor *= 1.0f / std::sqrt(dot(to, to, key_dim) + 1e-6f);
    for (int64_t d = 0; d < key_dim; ++d) to[d] *= factor;
  }
};

at::Tensor linear_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const at::Tensor& decay, const std::optional<at::Tensor>& beta, at::Tensor pool,
                            const at::Tensor& positions, const at::Tensor& slots, const at::Tensor& state_slots,
                            int64_t chunk_size, double scale, bool normalizes) {
  const at::Tensor q = query.contiguous(), k = key.contiguous(), v = value.contiguous(), g = decay.contiguous();
  const at::Tensor rates = beta ? beta->contiguous() : at::Tensor();
  at::Tensor output = at::empty_like(v);
  const int64_t B = positions.size(0), Q = positions.size(1), num_heads = pool.size(1);
  const int64_t key_dim = k.size(-1), value_dim = v.size(-1), num_key_heads = k.numel() / (B * Q * key_dim);
  const int64_t num_decays = g.numel() / (B * Q * num_heads);
  const int64_t num_chunks = pool.size(2) / Chunk::size(chunk_size, key_dim, value_dim, num_decays);
  TORCH_CHECK(v.numel() == B * Q * num_heads * value_dim && q.numel() == k.numel() && num_heads % num_key_heads == 0 &&
                  g.numel() == B * Q * num_heads * num_decays && (num_decays == 1 || num_decays == key_dim) &&
                  (!beta || rates.numel() == B * Q * num_heads) && state_slots.size(0) == B &&
                  num_chunks >= 2 && pool.size(2) % num_chunks == 0 && pool.is_contiguous() &&
                  positions.is_contiguous() && slots.is_contiguous(),
              "linear_attention is called with sizes that do not fit");
  const auto call = [&](auto zero) {
    using T = decltype(zero);
    const LinearAttention<T> attention{
        q.const_data_ptr<T>(), k.const_data_ptr<T>(), v.const_data_ptr<T>(), g.const_data_ptr<float>(),
        beta ? rates.const_data_ptr<float>() : nullptr, pool.mutable_data_ptr<float>(), output.mutable_data_ptr<T>(),
        positions.const_data_ptr<int64_t>(), slots.const_data_ptr<int64_t>(), state_slots.const_data_ptr<int64_t>(),
        B, Q, num_key_heads, num_heads, key_dim, value_dim, num_decays, chunk_size, num_chunks, static_cast<float>(scale),
        normalizes};
    share_tasks(num_heads, [&](int64_t head) { attention.compute_head(head); });
  };
  if (v.scalar_type() == at::kFloat) call(float{});
  else if (v.scalar_type() == at::kHalf) call(at::Half{});
  else call(at::BFloat16{});
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(specdec, library) {
  library.def(
      "linear_attention(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? beta, Tensor(a!) pool, Tensor "
      "positions, Tensor slots, Tensor state_slots, int chunk_size, float scale, bool normalizes) -> Tensor");
}
TORCH_LIBRARY_IMPL(specdec, CPU, library) { library.impl("linear_attention", linear_attention); }
