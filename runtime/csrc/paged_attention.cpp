// Attention over a paged K/V cache on the CPU. Writes this step's K/V into the pool, then lets every query attend over
// its row's blocks where they lie: nothing is gathered. Softmax is computed online, a chunk of keys at a time
// (Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135).
//
// Keys are stored transposed in their block, (num_blocks, Hk, D, block_size), values as they are, (num_blocks, Hk,
// block_size, Dv), so that both products run along contiguous memory. The query heads of one KV head are rows of one
// product: row g * Q + i is query i of its head g.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "lanes.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kChunk = 128, kRowsPerTask = 64;
constexpr int64_t kTileRows = 12;  // 24 sums, two pieces of a row and a factor fit 32 registers
typedef int32_t IntLanes __attribute__((vector_size(4 * kLanes)));

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// exp of numbers at most 0, to 2 units in the last place; 0 below -87.
inline Lanes exp_lanes(Lanes x) {
  const IntLanes tiny = x < -87.0f;
  x = tiny ? (Lanes{} - 87.0f) : x;
  const Lanes magic = Lanes{} + 12582912.0f;  // adding it rounds to a whole number
  const Lanes n = (x * 1.44269504f + magic) - magic;
  const Lanes r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Lanes y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const IntLanes exponent = (__builtin_convertvector(n, IntLanes) + 127) << 23;
  Lanes scale;
  std::memcpy(&scale, &exponent, sizeof scale);
  return tiny ? Lanes{} : y * scale;
}

// sum (R x W*16) += A (R x depth) B (depth x W*16), A and B row-major.
template <int R, int W>
inline void accumulate(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, Lanes (&sum)[R][W]) {
  for (int64_t k = 0; k < depth; ++k) {
    Lanes row[W];
    for (int w = 0; w < W; ++w) row[w] = load(b + k * ldb + w * kLanes);
    for (int r = 0; r < R; ++r) {
      const float factor = a[r * lda + k];
      for (int w = 0; w < W; ++w) sum[r][w] += row[w] * factor;
    }
  }
}

#if defined(__AVX512BF16__)
// Pairs of two neighbouring rows' numbers: 16 of them, or 32 where `more` than that are wanted.
template <int more>
inline void interleave(const at::BFloat16* p, int64_t ldb, __m512bh* pairs) {
  if constexpr (more > 0) {
    static constexpr auto kOrder = [] {
      std::array<int16_t, 64> order{};
      for (int i = 0; i < 64; ++i) order[i] = i / 2 + i % 2 * 32;
      return order;
    }();
    const __m512i first = _mm512_loadu_si512(p), second = _mm512_loadu_si512(p + ldb);
    pairs[0] = (__m512bh)_mm512_permutex2var_epi16(first, _mm512_loadu_si512(kOrder.data()), second);
    pairs[1] = (__m512bh)_mm512_permutex2var_epi16(first, _mm512_loadu_si512(kOrder.data() + 32), second);
  } else {
    const auto wide = [](const at::BFloat16* q) {
      return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(q)));
    };
    pairs[0] = (__m512bh)_mm512_or_si512(wide(p), _mm512_slli_epi32(wide(p + ldb), 16));
  }
}

// One instruction multiplies two rows of B by a pair of A's: the rows are interleaved as they are read. `depth` is even.
template <int R, int W>
inline void accumulate(const at::BFloat16* a, int64_t lda, const at::BFloat16* b, int64_t ldb, int64_t depth,
                       Lanes (&sum)[R][W]) {
  for (int64_t k = 0; k < depth; k += 2) {
    __m512bh rows[W];
    for (int w = 0; w < W; w += 2) interleave<W - 1>(b + k * ldb + w * kLanes, ldb, rows + w);
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      std::memcpy(&pair, a + r * lda + k, sizeof pair);
      const auto factors = (__m512bh)_mm512_set1_epi32(pair);
      for (int w = 0; w < W; ++w) sum[r][w] = (Lanes)_mm512_dpbf16_ps((__m512)sum[r][w], rows[w], factors);
    }
  }
}
#endif

// C (R x W*16) += A (R x depth) B (depth x W*16), all row-major.
template <int R, int W, typename T>
inline void multiply(const T* a, int64_t lda, const T* b, int64_t ldb, float* c, int64_t ldc, int64_t depth) {
  Lanes sum[R][W];
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < W; ++w) sum[r][w] = load(c + r * ldc + w * kLanes);
  accumulate(a, lda, b, ldb, depth, sum);
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < W; ++w) store(c + r * ldc + w * kLanes, sum[r][w]);
}

template <int R, typename T>
void multiply_rows(const T* a, int64_t lda, const T* b, int64_t ldb, float* c, int64_t ldc, int64_t depth,
                   int64_t width) {
  int64_t w = 0;
  if constexpr (R <= 4)  // few rows: more columns, so that sums do not wait for each other
    for (; w + 4 * kLanes <= width; w += 4 * kLanes) multiply<R, 4>(a, lda, b + w, ldb, c + w, ldc, depth);
  for (; w + 2 * kLanes <= width; w += 2 * kLanes) multiply<R, 2>(a, lda, b + w, ldb, c + w, ldc, depth);
  if (w < width) multiply<R, 1>(a, lda, b + w, ldb, c + w, ldc, depth);
}

// The same for any number of rows; `width` is a multiple of 16.
template <typename T>
void multiply_all(int64_t rows, const T* a, int64_t lda, const T* b, int64_t ldb, float* c, int64_t ldc, int64_t depth,
                  int64_t width) {
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;  // of about equal size: 13 rows are 6 and 7
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t first = tile * rows / tiles;
    with_rows<kTileRows>((tile + 1) * rows / tiles - first, [&](auto count) {
      multiply_rows<count()>(a + first * lda, lda, b, ldb, c + first * ldc, ldc, depth, width);
    });
  }
}

template <typename T>
inline void widen(const T* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i]);
}

// bfloat16 is the upper half of a float; said this way the compiler does 16 at a time.
template <>
inline void widen(const at::BFloat16* from, float* to, int64_t count) {
  const auto* bits = reinterpret_cast<const uint16_t*>(from);
  auto* wide = reinterpret_cast<uint32_t*>(to);
  for (int64_t i = 0; i < count; ++i) wide[i] = static_cast<uint32_t>(bits[i]) << 16;
}

// 16 floats to T.
inline void narrow(Lanes v, float* to) { store(to, v); }
#if defined(__AVX512BF16__)
constexpr bool kHasBFloat16 = true;
inline void narrow(Lanes v, at::BFloat16* to) {
  const auto narrowed = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(to, &narrowed, sizeof narrowed);
}
#else
constexpr bool kHasBFloat16 = false;
#endif

// Whether products can be taken of numbers of this type, or only of floats.
template <typename T>
constexpr bool kMultiplies = std::is_same_v<T, float> || (kHasBFloat16 && std::is_same_v<T, at::BFloat16>);

template <typename T>
struct Inputs {
  const T *query, *key, *value;
  int64_t query_head, query_token, key_head, key_token, value_head, value_token;  // strides
  T *key_pool, *value_pool, *output;
  const int64_t *positions, *slots, *block_tables;
  int64_t B, Q, N, H, Hk, D, Dv, block_size, window;
  float scale;
};

template <typename T>
void write_new(const Inputs<T>& in, int64_t token) {
  const int64_t block = in.slots[token] / in.block_size, offset = in.slots[token] % in.block_size;
  for (int64_t head = 0; head < in.Hk; ++head) {
    T* keys = in.key_pool + (block * in.Hk + head) * in.D * in.block_size + offset;
    const T* key = in.key + head * in.key_head + token * in.key_token;
    for (int64_t d = 0; d < in.D; ++d) keys[d * in.block_size] = key[d];
    T* values = in.value_pool + ((block * in.Hk + head) * in.block_size + offset) * in.Dv;
    std::memcpy(values, in.value + head * in.value_head + token * in.value_token, in.Dv * sizeof(T));
  }
}

// Running softmax of some rows: their largest score so far, the sum of exponentials, and the weighted sum of values.
struct Partial {
  float *maximum, *sum, *weighted;  // (rows), (rows), (rows, width)
};

// Scores of `count` keys become exp((score - maximum) * scale), 0 outside begin..end; the partial sums are brought to the
// same maximum.
template <typename E>
void exponentiate(float* scores, E* weights, int64_t begin, int64_t end, int64_t count, float scale, const Partial& out,
                  int64_t r, int64_t width) {
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  std::fill(scores, scores + begin, kNever);
  std::fill(scores + end, scores + count, kNever);
  Lanes largest = load(scores);
  for (int64_t j = kLanes; j < count; j += kLanes) {
    const Lanes v = load(scores + j);
    largest = v > largest ? v : largest;
  }
  float maximum = out.maximum[r];
  for (int i = 0; i < kLanes; ++i) maximum = std::max(maximum, largest[i]);
  const float correction = std::exp((out.maximum[r] - maximum) * scale);
  Lanes total{};
  for (int64_t j = 0; j < count; j += kLanes) {
    const Lanes e = exp_lanes((load(scores + j) - maximum) * scale);
    narrow(e, weights + j);
    total += e;
  }
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += total[i];
  out.maximum[r] = maximum;
  out.sum[r] = out.sum[r] * correction + sum;
  if (correction == 1.0f) return;
  for (float* d = out.weighted + r * width; d < out.weighted + (r + 1) * width; d += kLanes) store(d, load(d) * correction);
}

// Rows `first_row`.. of row `b`'s KV head `head` over keys first_key..last_key (exclusive) of its blocks, in numbers of
// type E: T itself, with keys and values read where they lie, or float, into which they are copied.
template <typename T, typename E, bool direct>
void attend(const Inputs<T>& in, int64_t b, int64_t head, int64_t first_row, int64_t rows, int64_t first_key,
            int64_t last_key, const Partial& out, int64_t width) {
  thread_local std::vector<E> numbers;
  thread_local std::vector<float> all_scores;
  numbers.resize(rows * in.D + rows * kChunk + (direct ? 0 : in.D * kChunk + kChunk * width));
  all_scores.resize(rows * kChunk);
  E* query = numbers.data();
  E* weights = query + rows * in.D;
  E* key_copy = weights + rows * kChunk;
  E* value_copy = key_copy + in.D * kChunk;
  float* scores = all_scores.data();
  int64_t positions[kRowsPerTask], lowest = std::numeric_limits<int64_t>::max(), highest = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t g = (first_row + r) / in.Q, i = (first_row + r) % in.Q, token = b * in.Q + i;
    const T* source = in.query + (head * (in.H / in.Hk) + g) * in.query_head + token * in.query_token;
    for (int64_t d = 0; d < in.D; ++d) query[r * in.D + d] = static_cast<E>(source[d]);
    positions[r] = in.positions[token];
    lowest = std::min(lowest, positions[r]);
    highest = std::max(highest, positions[r]);
    out.maximum[r] = -std::numeric_limits<float>::infinity();
    out.sum[r] = 0;
    std::fill_n(out.weighted + r * width, width, 0.0f);
  }
  last_key = std::min(last_key, highest + 1);
  if (in.window > 0) first_key = std::max(first_key, (lowest - in.window + 1) / in.block_size * in.block_size);
  const int64_t blocks_per_chunk = std::max(kChunk / in.block_size, int64_t{1});
  const int64_t chunk = std::min(kChunk, blocks_per_chunk * in.block_size);
  for (int64_t start = first_key; start < last_key; start += chunk) {
    const int64_t num_keys = std::min(chunk, last_key - start), padded = round_up(num_keys, kLanes);
    // Calls use(k, keys, values, count) for the pieces of the chunk that lie in one block, from its key k on.
    const auto for_pieces = [&](auto use) {
      for (int64_t k = 0; k < num_keys;) {
        const int64_t block = in.block_tables[b * in.N + (start + k) / in.block_size], offset = (start + k) % in.block_size;
        const int64_t count = std::min(in.block_size - offset, num_keys - k), base = block * in.Hk + head;
        use(k, in.key_pool + base * in.D * in.block_size + offset, in.value_pool + (base * in.block_size + offset) * in.Dv,
            count);
        k += count;
      }
    };
    for (int64_t r = 0; r < rows; ++r) std::fill_n(scores + r * kChunk, padded, 0.0f);
    if constexpr (direct) {
      for_pieces([&](int64_t k, const T* keys, const T*, int64_t count) {
        multiply_all(rows, query, in.D, keys, in.block_size, scores + k, kChunk, in.D, round_up(count, kLanes));
      });
    } else {
      for_pieces([&](int64_t k, const T* keys, const T* values, int64_t count) {
        for (int64_t d = 0; d < in.D; ++d) widen(keys + d * in.block_size, key_copy + d * kChunk + k, count);
        for (int64_t j = 0; j < count; ++j) widen(values + j * in.Dv, value_copy + (k + j) * width, in.Dv);
      });
      for (int64_t d = 0; d < in.D; ++d) std::fill_n(key_copy + d * kChunk + num_keys, padded - num_keys, 0.0f);
      for (int64_t j = 0; j < num_keys; ++j) std::fill_n(value_copy + j * width + in.Dv, width - in.Dv, 0.0f);
      multiply_all(rows, query, in.D, key_copy, kChunk, scores, kChunk, in.D, padded);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t end = std::min(num_keys, positions[r] + 1 - start);
      const int64_t begin = in.window > 0 ? std::max(positions[r] - in.window + 1 - start, int64_t{0}) : 0;
      if (begin < end) exponentiate(scores + r * kChunk, weights + r * kChunk, begin, end, padded, in.scale, out, r, width);
      else std::fill_n(weights + r * kChunk, padded, E(0.0f));
    }
    if constexpr (direct) {
      for_pieces([&](int64_t k, const T*, const T* values, int64_t count) {
        // An odd one out has a partner in its block, whose weight is 0.
        multiply_all(rows, weights + k, kChunk, values, in.Dv, out.weighted, width, count + count % 2, width);
      });
    } else {
      multiply_all(rows, weights, kChunk, value_copy, width, out.weighted, width, num_keys, width);
    }
  }
}

template <typename T, typename... Arguments>
void attend_fastest(const Inputs<T>& in, const Arguments&... arguments) {
  if constexpr (kMultiplies<T>)
    if (in.block_size % kLanes == 0 && in.Dv % kLanes == 0 && in.D % 2 == 0) return attend<T, T, true>(in, arguments...);
  attend<T, float, false>(in, arguments...);
}

template <typename T>
void run(const Inputs<T>& in) {
  at::parallel_for(0, in.B * in.Q, 64, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) write_new(in, token);
  });
  const int64_t rows = in.H / in.Hk * in.Q, groups = (rows + kRowsPerTask - 1) / kRowsPerTask;
  const int64_t width = round_up(in.Dv, kLanes), num_keys = in.N * in.block_size;
  // Few rows and many threads: the keys are divided too, and the parts added up at the end.
  const int64_t tasks = in.B * in.Hk * groups, threads = at::get_num_threads();
  const int64_t splits = std::max(std::min(threads / tasks, num_keys / (4 * kChunk)), int64_t{1});
  const int64_t keys_per_split = round_up((num_keys + splits - 1) / splits, std::max(kChunk, in.block_size));
  std::vector<float> buffer(tasks * splits * kRowsPerTask * (width + 2));
  const auto partial = [&](int64_t task, int64_t split) {
    float* base = buffer.data() + (task * splits + split) * kRowsPerTask * (width + 2);
    return Partial{base, base + kRowsPerTask, base + 2 * kRowsPerTask};
  };
  const auto place = [&](int64_t task, int64_t& b, int64_t& head, int64_t& first, int64_t& count) {
    first = task % groups * kRowsPerTask, head = task / groups % in.Hk, b = task / groups / in.Hk;
    count = std::min(kRowsPerTask, rows - first);
  };
  const auto finish = [&](int64_t task) {
    int64_t b, head, first, count;
    place(task, b, head, first, count);
    for (int64_t r = 0; r < count; ++r) {
      float maximum = -std::numeric_limits<float>::infinity(), sum = 0;
      for (int64_t s = 0; s < splits; ++s) maximum = std::max(maximum, partial(task, s).maximum[r]);
      float* total = partial(task, 0).weighted + r * width;
      for (int64_t s = 0; s < splits; ++s) {
        const Partial part = partial(task, s);
        const float factor = std::exp((part.maximum[r] - maximum) * in.scale);
        sum += part.sum[r] * factor;
        for (int64_t d = 0; d < width; ++d) total[d] = (s ? total[d] : 0) + part.weighted[r * width + d] * factor;
      }
      const int64_t g = (first + r) / in.Q, token = b * in.Q + (first + r) % in.Q;
      T* output = in.output + (token * in.H + head * (in.H / in.Hk) + g) * in.Dv;
      for (int64_t d = 0; d < in.Dv; ++d) output[d] = static_cast<T>(total[d] / sum);
    }
  };
  share_tasks(tasks * splits, [&](int64_t i) {
    int64_t b, head, first, count;
    place(i / splits, b, head, first, count);
    const int64_t key = i % splits * keys_per_split;
    attend_fastest(in, b, head, first, count, key, std::min(key + keys_per_split, num_keys),
                   partial(i / splits, i % splits), width);
    if (splits == 1) finish(i);
  });
  if (splits > 1)
    for (int64_t task = 0; task < tasks; ++task) finish(task);
}

at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, at::Tensor key_pool,
                           at::Tensor value_pool, const at::Tensor& positions, const at::Tensor& slots,
                           const at::Tensor& block_tables, double scale, int64_t window) {
  const int64_t B = slots.size(0), Q = slots.size(1), H = query.size(1), Dv = value_pool.size(3);
  at::Tensor output = at::empty({B * Q, H, Dv}, query.options());
  TORCH_CHECK(query.stride(3) == 1 && key.stride(3) == 1 && value.stride(3) == 1, "heads must be contiguous");
  const auto call = [&](auto zero) {
    using T = decltype(zero);
    run(Inputs<T>{query.const_data_ptr<T>(), key.const_data_ptr<T>(), value.const_data_ptr<T>(), query.stride(1),
                  query.stride(2), key.stride(1), key.stride(2), value.stride(1), value.stride(2),
                  key_pool.mutable_data_ptr<T>(), value_pool.mutable_data_ptr<T>(), output.mutable_data_ptr<T>(),
                  positions.const_data_ptr<int64_t>(), slots.const_data_ptr<int64_t>(),
                  block_tables.const_data_ptr<int64_t>(), B, Q, block_tables.size(1), H, key_pool.size(1),
                  key_pool.size(2), Dv, key_pool.size(3), window, static_cast<float>(scale)});
  };
  if (query.scalar_type() == at::kFloat) call(float{});
  else if (query.scalar_type() == at::kBFloat16) call(at::BFloat16{});
  else call(at::Half{});
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(specdec, library) {
  library.def(
      "paged_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) key_pool, Tensor(b!) value_pool, Tensor "
      "positions, Tensor slots, Tensor block_tables, float scale, int window) -> Tensor");
}
TORCH_LIBRARY_IMPL(specdec, CPU, library) { library.impl("paged_attention", paged_attention); }
