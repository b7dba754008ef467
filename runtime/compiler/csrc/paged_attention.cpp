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
#include <memory>
#include <type_traits>
#include <vector>

#include "lanes.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kChunk = 128, kRowsPerTask = 36, kSplitsPerThread = 2;
constexpr int64_t kTileRows = 12;  // 24 sums, two pieces of a row and a factor fit 32 registers
constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.4426950408889634f;
typedef int32_t IntLanes __attribute__((vector_size(4 * kLanes)));

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// 2 to the power of numbers at most 0, to 2 units in the last place; 0 below -126.
inline Lanes exp2_lanes(Lanes x) {
  const Lanes shifted = x + 12582912.0f;  // rounds to a whole number, which is then in the lowest bits
  const Lanes r = x - (shifted - 12582912.0f);
  Lanes y = r * 1.535336188319500e-4f + 1.339887440266574e-3f;
  y = y * r + 9.618437357674640e-3f;
  y = y * r + 5.550332471162809e-2f;
  y = y * r + 2.402264791363012e-1f;
  y = y * r + 6.931472028550421e-1f;
  y = y * r + 1.0f;
  const Lanes power = (Lanes)((IntLanes)y + ((IntLanes)shifted << 23));
  return x < -126.0f ? Lanes{} : power;
}

#if defined(__AVX512F__)
inline float largest_of(Lanes v) { return _mm512_reduce_max_ps((__m512)v); }
inline float sum_of(Lanes v) { return _mm512_reduce_add_ps((__m512)v); }
#else
inline float largest_of(Lanes v) {
  float largest = v[0];
  for (int i = 1; i < kLanes; ++i) largest = std::max(largest, v[i]);
  return largest;
}
inline float sum_of(Lanes v) {
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}
#endif

// Rows of keys or values, and what lies like them and is fetched meanwhile, because it is read soon: the values of these
// keys, or the keys of the next chunk.
template <typename T>
struct Piece {
  const T *numbers, *upcoming;
  int64_t stride;

  Piece from_column(int64_t w) const { return {numbers + w, upcoming + w, stride}; }
  const T* row(int64_t k) const { return numbers + k * stride; }
  template <int W>
  void fetch(int64_t k) const {
    for (int i = 0; i < W * kLanes; i += 64 / sizeof(T)) fetch_line(upcoming + k * stride + i);
  }
};

// sum (R x W*16) += A (R x depth) B (depth x W*16), A and B row-major.
template <int R, int W>
inline void accumulate(const float* a, int64_t lda, const Piece<float>& b, int64_t depth, Lanes (&sum)[R][W]) {
  for (int64_t k = 0; k < depth; ++k) {
    b.fetch<W>(k);
    Lanes row[W];
    for (int w = 0; w < W; ++w) row[w] = load(b.row(k) + w * kLanes);
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
inline void accumulate(const at::BFloat16* a, int64_t lda, const Piece<at::BFloat16>& b, int64_t depth,
                       Lanes (&sum)[R][W]) {
  for (int64_t k = 0; k < depth; k += 2) {
    b.fetch<W>(k);
    b.fetch<W>(k + 1);
    __m512bh rows[W];
    for (int w = 0; w < W; w += 2) interleave<W - 1>(b.row(k) + w * kLanes, b.stride, rows + w);
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      std::memcpy(&pair, a + r * lda + k, sizeof pair);
      const auto factors = (__m512bh)_mm512_set1_epi32(pair);
      for (int w = 0; w < W; ++w) sum[r][w] = (Lanes)_mm512_dpbf16_ps((__m512)sum[r][w], rows[w], factors);
    }
  }
}
#endif

// C (R x W*16) = A (R x depth) B (depth x W*16), or C += where `adds`; all row-major.
template <bool adds, int R, int W, typename T>
inline void multiply(const T* a, int64_t lda, const Piece<T>& b, float* c, int64_t ldc, int64_t depth) {
  Lanes sum[R][W];
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < W; ++w) sum[r][w] = adds ? load(c + r * ldc + w * kLanes) : Lanes{};
  accumulate(a, lda, b, depth, sum);
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < W; ++w) store(c + r * ldc + w * kLanes, sum[r][w]);
}

// The same for a width that is any multiple of 16.
template <bool adds, int R, typename T>
void multiply_rows(const T* a, int64_t lda, const Piece<T>& b, float* c, int64_t ldc, int64_t depth, int64_t width) {
  int64_t w = 0;
  if constexpr (R <= 4)  // few rows: more columns, so that sums do not wait for each other
    for (; w + 4 * kLanes <= width; w += 4 * kLanes) multiply<adds, R, 4>(a, lda, b.from_column(w), c + w, ldc, depth);
  for (; w + 2 * kLanes <= width; w += 2 * kLanes) multiply<adds, R, 2>(a, lda, b.from_column(w), c + w, ldc, depth);
  if (w < width) multiply<adds, R, 1>(a, lda, b.from_column(w), c + w, ldc, depth);
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

// Some rows of some neighbouring KV heads of one sequence, over keys first_key..last_key (exclusive) of its blocks.
struct Task {
  int64_t b, first_head, num_heads, first_row, num_rows, first_key, last_key;
};

// Running softmax of a task's rows, head by head: their largest score so far, the sum of exponentials in 16 parts, and
// the weighted sum of values.
struct Partial {
  float *maximum, *sums, *weighted;  // (rows), (rows, 16), (rows, width)
};

// Scores of `count` keys become 2 to the power of (score - maximum) * scale, 0 outside begin..end; the partial sums are
// brought to the same maximum.
template <typename E>
void exponentiate(float* scores, E* weights, int64_t begin, int64_t end, int64_t count, float scale, const Partial& out,
                  int64_t r, int64_t width) {
  std::fill(scores, scores + begin, kNever);
  std::fill(scores + end, scores + count, kNever);
  Lanes largest = load(scores);
  for (int64_t j = kLanes; j < count; j += kLanes) {
    const Lanes v = load(scores + j);
    largest = v > largest ? v : largest;
  }
  const float before = out.maximum[r], maximum = std::max(before, largest_of(largest));
  Lanes sum = load(out.sums + r * kLanes);
  if (maximum > before) {
    const float correction = std::exp2((before - maximum) * scale);
    out.maximum[r] = maximum;
    sum *= correction;
    for (float* d = out.weighted + r * width; d < out.weighted + (r + 1) * width; d += kLanes)
      store(d, load(d) * correction);
  }
  for (int64_t j = 0; j < count; j += kLanes) {
    const Lanes power = exp2_lanes((load(scores + j) - maximum) * scale);
    narrow(power, weights + j);
    sum += power;
  }
  store(out.sums + r * kLanes, sum);
}

// In numbers of type E: T itself, with keys and values read where they lie, or float, into which those of one head are
// copied.
template <typename T, typename E, bool direct>
void attend(const Inputs<T>& in, const Task& task, const Partial& out, int64_t width) {
  const int64_t num_rows = task.num_rows, all_rows = task.num_heads * num_rows;
  thread_local std::vector<E> numbers;
  thread_local std::vector<float> all_scores;
  numbers.resize(all_rows * (in.D + kChunk) + (direct ? 0 : kChunk * (in.D + width)));
  all_scores.resize(all_rows * kChunk);
  E* query = numbers.data();
  E* weights = query + all_rows * in.D;
  E* key_copy = weights + all_rows * kChunk;
  E* value_copy = key_copy + in.D * kChunk;
  float* scores = all_scores.data();
  int64_t positions[kRowsPerTask], lowest = std::numeric_limits<int64_t>::max(), highest = 0;
  for (int64_t row = 0; row < all_rows; ++row) {
    const int64_t head = task.first_head + row / num_rows, r = row % num_rows;
    const int64_t g = (task.first_row + r) / in.Q, token = task.b * in.Q + (task.first_row + r) % in.Q;
    const T* source = in.query + (head * (in.H / in.Hk) + g) * in.query_head + token * in.query_token;
    for (int64_t d = 0; d < in.D; ++d) query[row * in.D + d] = static_cast<E>(source[d]);
    positions[r] = in.positions[token];
    lowest = std::min(lowest, positions[r]);
    highest = std::max(highest, positions[r]);
    out.maximum[row] = kNever;
  }
  std::fill_n(out.sums, all_rows * kLanes, 0.0f);
  std::fill_n(out.weighted, all_rows * width, 0.0f);
  // Tiles of about equal size: 13 rows are 6 and 7.
  const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  // Calls use(rows, first) for the tiles of a head some of whose rows see a key; `rows` is a constant.
  const auto for_tiles = [&](int64_t key, auto use) {
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const int64_t first = tile * num_rows / num_tiles, end = (tile + 1) * num_rows / num_tiles;
      if (*std::max_element(positions + first, positions + end) < key) continue;
      with_rows<kTileRows>(end - first, [&](auto rows) { use(rows, first); });
    }
  };
  const int64_t last_key = std::min(task.last_key, highest + 1);
  int64_t first_key = task.first_key;
  if (in.window > 0) first_key = std::max(first_key, (lowest - in.window + 1) / in.block_size * in.block_size);
  const int64_t blocks_per_chunk = std::max(kChunk / in.block_size, int64_t{1});
  const int64_t chunk = std::min(kChunk, blocks_per_chunk * in.block_size);
  const float scale = in.scale * kLog2E;
  const auto keys_at = [&](int64_t key, int64_t head) {
    const int64_t block = in.block_tables[task.b * in.N + key / in.block_size];
    return in.key_pool + (block * in.Hk + task.first_head + head) * in.D * in.block_size + key % in.block_size;
  };
  const auto values_at = [&](int64_t key, int64_t head) {
    const int64_t block = in.block_tables[task.b * in.N + key / in.block_size];
    return in.value_pool + ((block * in.Hk + task.first_head + head) * in.block_size + key % in.block_size) * in.Dv;
  };
  for (int64_t start = first_key; start < last_key; start += chunk) {
    const int64_t num_keys = std::min(chunk, last_key - start), padded = round_up(num_keys, kLanes);
    // Calls use(k, head, count) for the pieces of the chunk that lie in one block, from its key k on.
    const auto for_blocks = [&](auto use) {
      for (int64_t k = 0; k < num_keys;) {
        const int64_t count = std::min(in.block_size - (start + k) % in.block_size, num_keys - k);
        for (int64_t head = 0; head < task.num_heads; ++head) use(k, head, count);
        k += count;
      }
    };
    const auto for_pieces = [&](auto use) {
      if constexpr (direct) for_blocks(use);
      else use(int64_t{0}, int64_t{0}, num_keys);
    };
    if constexpr (!direct) {
      for_blocks([&](int64_t k, int64_t, int64_t count) {
        const T *keys = keys_at(start + k, 0), *values = values_at(start + k, 0);
        for (int64_t d = 0; d < in.D; ++d) widen(keys + d * in.block_size, key_copy + d * kChunk + k, count);
        for (int64_t j = 0; j < count; ++j) widen(values + j * in.Dv, value_copy + (k + j) * width, in.Dv);
      });
      for (int64_t d = 0; d < in.D; ++d) std::fill_n(key_copy + d * kChunk + num_keys, padded - num_keys, 0.0f);
      for (int64_t j = 0; j < num_keys; ++j) std::fill_n(value_copy + j * width + in.Dv, width - in.Dv, 0.0f);
    }
    for_pieces([&](int64_t k, int64_t head, int64_t count) {
      Piece<E> keys{key_copy, key_copy, kChunk};
      if constexpr (direct) keys = {keys_at(start + k, head), values_at(start + k, head), in.block_size};
      for_tiles(start + k, [&](auto rows, int64_t first) {
        const int64_t row = head * num_rows + first;
        multiply_rows<false, rows()>(query + row * in.D, in.D, keys, scores + row * kChunk + k, kChunk, in.D,
                                     round_up(count, kLanes));
      });
    });
    for (int64_t row = 0; row < all_rows; ++row) {
      const int64_t position = positions[row % num_rows], end = std::min(num_keys, position + 1 - start);
      const int64_t begin = in.window > 0 ? std::max(position - in.window + 1 - start, int64_t{0}) : 0;
      float* row_scores = scores + row * kChunk;
      E* row_weights = weights + row * kChunk;
      if (begin < end) exponentiate(row_scores, row_weights, begin, end, padded, scale, out, row, width);
      else std::fill_n(row_weights, padded, E(0.0f));
    }
    for_pieces([&](int64_t k, int64_t head, int64_t count) {
      Piece<E> values{value_copy, value_copy, width};
      const int64_t next_key = std::min(start + k + chunk, last_key - 1);
      if constexpr (direct) values = {values_at(start + k, head), keys_at(next_key, head), in.Dv};
      // An odd one out has a partner in its block, whose weight is 0.
      const int64_t depth = direct ? count + count % 2 : count;
      for_tiles(start + k, [&](auto rows, int64_t first) {
        const int64_t row = head * num_rows + first;
        multiply_rows<true, rows()>(weights + row * kChunk + k, kChunk, values, out.weighted + row * width, width,
                                    depth, width);
      });
    });
  }
}

// Whether keys and values are multiplied where they lie.
template <typename T>
bool reads_in_place(const Inputs<T>& in) {
  return kMultiplies<T> && in.block_size % kLanes == 0 && in.Dv % kLanes == 0 && in.D % 2 == 0;
}

// Adds up the parts of a task, one for each share of the keys, and writes its output.
template <typename T, typename GetPartial>
void finish(const Inputs<T>& in, const Task& task, int64_t num_splits, int64_t width, const GetPartial& partial) {
  const float scale = in.scale * kLog2E;
  for (int64_t row = 0; row < task.num_heads * task.num_rows; ++row) {
    float maximum = kNever;
    for (int64_t s = 0; s < num_splits; ++s) maximum = std::max(maximum, partial(s).maximum[row]);
    float* total = partial(0).weighted + row * width;
    Lanes sum{};
    for (int64_t s = 0; s < num_splits; ++s) {
      const Partial part = partial(s);
      const float factor = std::exp2((part.maximum[row] - maximum) * scale);
      sum += load(part.sums + row * kLanes) * factor;
      for (int64_t d = 0; d < width; ++d) total[d] = (s ? total[d] : 0) + part.weighted[row * width + d] * factor;
    }
    const int64_t head = task.first_head + row / task.num_rows, r = task.first_row + row % task.num_rows;
    const int64_t token = task.b * in.Q + r % in.Q;
    T* output = in.output + (token * in.H + head * (in.H / in.Hk) + r / in.Q) * in.Dv;
    const float weight = 1 / sum_of(sum);
    for (int64_t d = 0; d < in.Dv; ++d) output[d] = static_cast<T>(total[d] * weight);
  }
}

template <typename T>
void run(const Inputs<T>& in) {
  at::parallel_for(0, in.B * in.Q, 64, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) write_new(in, token);
  });
  const int64_t rows = in.H / in.Hk * in.Q, row_groups = (rows + kRowsPerTask - 1) / kRowsPerTask;
  // Few rows: of several heads at a time, because the K/V of a block's heads lie side by side.
  const int64_t heads = reads_in_place(in) ? std::clamp(kRowsPerTask / rows, int64_t{1}, in.Hk) : 1;
  const int64_t head_groups = (in.Hk + heads - 1) / heads, num_tasks = in.B * head_groups * row_groups;
  // Few tasks: their keys are divided too, and the parts added up at the end.
  const int64_t threads = at::get_num_threads(), num_keys = in.N * in.block_size;
  const int64_t wanted = num_tasks < threads ? kSplitsPerThread * threads / num_tasks : 1;
  const int64_t keys_per_split = round_up((num_keys + wanted - 1) / wanted, std::max(kChunk, in.block_size));
  const int64_t splits = (num_keys + keys_per_split - 1) / keys_per_split;
  const int64_t width = round_up(in.Dv, kLanes), partial_size = kRowsPerTask * (1 + kLanes + width);
  const int64_t num_partials = splits > 1 ? num_tasks * splits : threads;
  const auto buffer = std::make_unique_for_overwrite<float[]>(num_partials * partial_size);
  const auto partial = [&](int64_t i) {
    float* base = buffer.get() + i * partial_size;
    return Partial{base, base + kRowsPerTask, base + kRowsPerTask * (1 + kLanes)};
  };
  const auto make_task = [&](int64_t i, int64_t split) {
    const int64_t row = i % row_groups * kRowsPerTask, head = i / row_groups % head_groups * heads;
    return Task{i / row_groups / head_groups, head, std::min(heads, in.Hk - head), row,
                std::min(kRowsPerTask, rows - row), split * keys_per_split, std::min((split + 1) * keys_per_split, num_keys)};
  };
  const auto attend_fastest = [&](const Task& task, const Partial& out) {
    if constexpr (kMultiplies<T>)
      if (reads_in_place(in)) return attend<T, T, true>(in, task, out, width);
    attend<T, float, false>(in, task, out, width);
  };
  share_tasks(num_tasks * splits, [&](int64_t i) {
    const Task task = make_task(i / splits, i % splits);
    if (splits > 1) return attend_fastest(task, partial(i));
    const Partial own = partial(at::get_thread_num());
    attend_fastest(task, own);
    finish(in, task, 1, width, [&](int64_t) { return own; });
  });
  if (splits > 1)
    for (int64_t i = 0; i < num_tasks; ++i)
      finish(in, make_task(i, 0), splits, width, [&](int64_t split) { return partial(i * splits + split); });
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
