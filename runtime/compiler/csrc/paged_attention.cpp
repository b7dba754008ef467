// Attention over a paged K/V cache on the CPU. Writes this step's K/V into the pool, then lets every query attend over
// its row's blocks where they lie: nothing is gathered. Softmax is computed online, a chunk of keys at a time
// (Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135).
//
// Keys are stored transposed in their block, (num_blocks, Hk, D, block_size), values as they are, (num_blocks, Hk,
// block_size, Dv), so that both products run along contiguous memory. The query heads of one KV head are rows of one
// product: row g * Q + i is query i of its head g.
//
// In 8 bits (int8, or e4m3) each token has two scales for each head, one of its keys and one of its values, (num_blocks,
// Hk, 2, block_size). Scores are multiplied by the first, and weights by the second: the products are of the few bits.

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
#include "tasks.h"
#include "tiles.h"

namespace {

constexpr int64_t kChunk = 128, kRowsPerTask = 36, kTasksPerThread = 2;
// Keys are divided at multiples of this position whatever else is computed: a row's parts, and the order in which they
// are added up, are a function of its position alone, and so are the bits of its output.
constexpr int64_t kSplit = 2 * kChunk;
constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.4426950408889634f;

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// 2 to the power of numbers at most 0, to 2 units in the last place; 0 below -126, and of NaN NaN.
inline Lanes exp2_lanes(Lanes x) {
  const Lanes shifted = x + 12582912.0f;  // rounds to a whole number, which is then in the lowest bits
  const Lanes whole = shifted - 12582912.0f, r = x - whole;
  Lanes y = r * 1.535336188319500e-4f + 1.339887440266574e-3f;
  y = y * r + 9.618437357674640e-3f;
  y = y * r + 5.550332471162809e-2f;
  y = y * r + 2.402264791363012e-1f;
  y = y * r + 6.931472028550421e-1f;
  y = y * r + 1.0f;
#if defined(__AVX512F__)
  const __mmask16 is_normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);  // or NaN
  return (Lanes)_mm512_maskz_scalef_ps(is_normal, (__m512)y, (__m512)whole);
#else
  const Lanes power = (Lanes)((Words)y + ((Words)shifted << 23));
  return x >= -126.0f ? power : Lanes{} > x ? Lanes{} : x;
#endif
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

// sum (R x W*kLanes) += A (R x depth) B (depth x W*kLanes), A and B row-major.
template <int R, int W, typename B>
inline void accumulate(const float* a, int64_t lda, const Piece<B>& b, int64_t depth, Lanes (&sum)[R][W]) {
  for (int64_t k = 0; k < depth; ++k) {
    b.template fetch<W>(k);
    Lanes row[W];
    for (int w = 0; w < W; ++w) row[w] = widen(b.row(k) + w * kLanes);
    for (int r = 0; r < R; ++r) {
      const float factor = a[r * lda + k];
      for (int w = 0; w < W; ++w) sum[r][w] += row[w] * factor;
    }
  }
}

#if defined(__AVX512BF16__)
// Pairs of two neighbouring rows' numbers: one register of them, or two where `more` than that are wanted.
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

// One instruction multiplies two rows of B by a pair of A's: the rows are interleaved as they are read. An odd one out is
// its own partner, for which A has a 0: what lies behind it may be anything.
template <int R, int W>
inline void accumulate(const at::BFloat16* a, int64_t lda, const Piece<at::BFloat16>& b, int64_t depth,
                       Lanes (&sum)[R][W]) {
  const auto add_pair = [&](int64_t k, int64_t to_partner) {
    __m512bh rows[W];
    for (int w = 0; w < W; w += 2) interleave<W - 1>(b.row(k) + w * kLanes, to_partner, rows + w);
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      std::memcpy(&pair, a + r * lda + k, sizeof pair);
      const auto factors = (__m512bh)_mm512_set1_epi32(pair);
      for (int w = 0; w < W; ++w) sum[r][w] = (Lanes)_mm512_dpbf16_ps((__m512)sum[r][w], rows[w], factors);
    }
  };
  for (int64_t k = 0; k + 1 < depth; k += 2) {
    b.fetch<W>(k);
    b.fetch<W>(k + 1);
    add_pair(k, b.stride);
  }
  if (depth % 2) add_pair(depth - 1, 0);
}
#endif

// C (R x W*kLanes) = A (R x depth) B (depth x W*kLanes), or C += where `adds`; all row-major.
template <bool adds, int R, int W, typename A, typename B>
inline void multiply(const A* a, int64_t lda, const Piece<B>& b, float* c, int64_t ldc, int64_t depth) {
  Lanes sum[R][W];
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < W; ++w) sum[r][w] = adds ? load(c + r * ldc + w * kLanes) : Lanes{};
  accumulate(a, lda, b, depth, sum);
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < W; ++w) store(c + r * ldc + w * kLanes, sum[r][w]);
}

// The same for a width that is any multiple of kLanes.
template <bool adds, int R, typename A, typename B>
[[gnu::noinline]] void multiply_rows(const A* a, int64_t lda, const Piece<B>& b, float* c, int64_t ldc, int64_t depth, int64_t width) {
  int64_t w = 0;
  if constexpr (R <= kTileRows / 3)  // few rows: more columns, so that sums do not wait for each other
    for (; w + 4 * kLanes <= width; w += 4 * kLanes) multiply<adds, R, 4>(a, lda, b.from_column(w), c + w, ldc, depth);
  for (; w + 2 * kLanes <= width; w += 2 * kLanes) multiply<adds, R, 2>(a, lda, b.from_column(w), c + w, ldc, depth);
  if (w < width) multiply<adds, R, 1>(a, lda, b.from_column(w), c + w, ldc, depth);
}

#if defined(__AMX_BF16__)
constexpr int64_t kTileDepth = 32;  // of numbers of 16 bits

// Columns of two rows, a multiple of kLanes, as pairs.
template <typename S>
inline void pair_rows(const S* first, const S* second, int64_t count, at::BFloat16* pairs) {
  int64_t i = 0;
  if constexpr (std::is_same_v<S, at::BFloat16>)
    for (; i + 2 * kLanes <= count; i += 2 * kLanes)
      interleave<1>(first + i, second - first, reinterpret_cast<__m512bh*>(pairs + 2 * i));
  for (; i < count; i += kLanes) {
    const Words both = (Words)widen(first + i) >> 16 | ((Words)widen(second + i) & 0xffff0000u);
    std::memcpy(pairs + 2 * i, &both, sizeof both);
  }
}

// c (rows x 16 * C) += a (rows x depth) b; of b pairs of rows, (depth / 2, ldb, 2). The tiles' shapes are set: sums in 0 to
// 3, a in 4, b in 5 to 7.
template <int C>
inline void add_product(const at::BFloat16* a, int64_t lda, const at::BFloat16* b, int64_t ldb, float* c, int64_t ldc,
                        int64_t depth) {
  _tile_loadd(0, c, 4 * ldc);
  if constexpr (C > 1) _tile_loadd(1, c + kTileHeight, 4 * ldc);
  if constexpr (C > 2) _tile_loadd(2, c + 2 * kTileHeight, 4 * ldc);
  if constexpr (C > 3) _tile_loadd(3, c + 3 * kTileHeight, 4 * ldc);
  for (int64_t k = 0; k < depth; k += kTileDepth, b += kTileDepth * ldb) {
    _tile_loadd(4, a + k, 2 * lda);
    _tile_loadd(5, b, 4 * ldb);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (C > 1) { _tile_loadd(6, b + 2 * kTileHeight, 4 * ldb); _tile_dpbf16ps(1, 4, 6); }
    if constexpr (C > 2) { _tile_loadd(7, b + 4 * kTileHeight, 4 * ldb); _tile_dpbf16ps(2, 4, 7); }
    if constexpr (C > 3) { _tile_loadd(5, b + 6 * kTileHeight, 4 * ldb); _tile_dpbf16ps(3, 4, 5); }
  }
  _tile_stored(0, c, 4 * ldc);
  if constexpr (C > 1) _tile_stored(1, c + kTileHeight, 4 * ldc);
  if constexpr (C > 2) _tile_stored(2, c + 2 * kTileHeight, 4 * ldc);
  if constexpr (C > 3) _tile_stored(3, c + 3 * kTileHeight, 4 * ldc);
}

// The same for at most 16 rows, and a width that is any multiple of 16.
inline void add_product(const at::BFloat16* a, int64_t lda, const at::BFloat16* b, int64_t ldb, float* c, int64_t ldc,
                        int64_t rows, int64_t depth, int64_t width) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.set(tile, tile <= 4 ? rows : kTileHeight, 64);
  shapes.use();
  int64_t w = 0;
  for (; w + 4 * kTileHeight <= width; w += 4 * kTileHeight) add_product<4>(a, lda, b + 2 * w, ldb, c + w, ldc, depth);
  with_rows<3>((width - w) / kTileHeight, [&](auto columns) {
    add_product<columns()>(a, lda, b + 2 * w, ldb, c + w, ldc, depth);
  });
  _tile_release();
}
#endif

// Numbers of type T, whose keys and values are stored in type S.
template <typename T, typename S>
struct Inputs {
  const T *query, *key, *value;
  int64_t query_head, query_token, key_head, key_token, value_head, value_token;  // strides
  S *key_pool, *value_pool;
  float* scales;  // null where S is T
  T* output;
  const int64_t *positions, *slots, *block_tables;
  int64_t B, Q, N, H, Hk, D, Dv, block_size, window;
  float scale;

  static constexpr bool is_rounded = !std::is_same_v<T, S>;
  // Of a block's keys, or of its values.
  float* scales_of(int64_t block, int64_t head, bool of_values) const {
    return scales + ((block * Hk + head) * 2 + of_values) * block_size;
  }
};

template <typename T>
bool are_finite(const T* numbers, int64_t count) {
  Lanes sums{};
  float rest = 0;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Lanes v = widen(numbers + i);
    sums += v - v;  // 0, or NaN
  }
  for (; i < count; ++i) {
    const float number = static_cast<float>(numbers[i]);
    rest += number - number;
  }
  return sum_of(sums) + rest == 0;
}

// Values of keys that a query does not see are multiplied by 0, which leaves no trace of finite ones. So a token whose key
// or value is not finite has a key of NaN, whose score, and what comes of it, is NaN for whoever sees it, and a value of 0.
template <typename T>
void write_new(const Inputs<T, T>& in, int64_t token) {
  const int64_t block = in.slots[token] / in.block_size, offset = in.slots[token] % in.block_size;
  for (int64_t head = 0; head < in.Hk; ++head) {
    T* keys = in.key_pool + (block * in.Hk + head) * in.D * in.block_size + offset;
    const T* key = in.key + head * in.key_head + token * in.key_token;
    const T* value = in.value + head * in.value_head + token * in.value_token;
    T* values = in.value_pool + ((block * in.Hk + head) * in.block_size + offset) * in.Dv;
    if (are_finite(key, in.D) && are_finite(value, in.Dv)) {
      for (int64_t d = 0; d < in.D; ++d) keys[d * in.block_size] = key[d];
      std::memcpy(values, value, in.Dv * sizeof(T));
    } else {
      for (int64_t d = 0; d < in.D; ++d) keys[d * in.block_size] = std::numeric_limits<T>::quiet_NaN();
      std::fill_n(values, in.Dv, T(0.0f));
    }
  }
}

// Numbers as they are stored, `stride` apart, and their scale: the largest is the largest that there is.
template <typename T, typename S>
float round_to(const T* numbers, int64_t count, S* to, int64_t stride) {
  constexpr float kLargest = std::is_same_v<S, int8_t> ? 127.0f : 448.0f;
  const auto piece = [&](int64_t i) {
    if (i + kLanes <= count) return widen(numbers + i);
    float rest[kLanes] = {};
    for (int64_t k = i; k < count; ++k) rest[k - i] = static_cast<float>(numbers[k]);
    return load(rest);
  };
  Lanes largest{};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Lanes size = (Lanes)((Words)piece(i) & 0x7fffffffu);
    largest = size > largest ? size : largest;
  }
  const float scale = largest_of(largest) / kLargest;
  const float divisor = scale > 0 ? scale : std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < count; i += kLanes) {
    Lanes v = piece(i) / divisor;
    // A scale that is hardly more than 0 has few bits.
    v = v > kLargest ? Lanes{} + kLargest : v < -kLargest ? Lanes{} - kLargest : v;
    S rounded[kLanes];
    narrow(v, rounded);
    for (int64_t k = i; k < std::min(i + kLanes, count); ++k) to[k * stride] = rounded[k - i];
  }
  return scale;
}

// In 8 bits the scale of the keys is NaN.
template <typename T, typename S>
void write_new(const Inputs<T, S>& in, int64_t token) {
  const int64_t block = in.slots[token] / in.block_size, offset = in.slots[token] % in.block_size;
  for (int64_t head = 0; head < in.Hk; ++head) {
    S* keys = in.key_pool + (block * in.Hk + head) * in.D * in.block_size + offset;
    S* values = in.value_pool + ((block * in.Hk + head) * in.block_size + offset) * in.Dv;
    const T* key = in.key + head * in.key_head + token * in.key_token;
    const T* value = in.value + head * in.value_head + token * in.value_token;
    float &of_key = in.scales_of(block, head, false)[offset], &of_value = in.scales_of(block, head, true)[offset];
    if (are_finite(key, in.D) && are_finite(value, in.Dv)) {
      of_key = round_to(key, in.D, keys, in.block_size);
      of_value = round_to(value, in.Dv, values, 1);
    } else {
      of_key = std::numeric_limits<float>::quiet_NaN();
      of_value = 0;
    }
  }
}

// Keys that are looked at together.
inline int64_t chunk_of(int64_t block_size) {
  return std::min(kChunk, std::max(kChunk / block_size, int64_t{1}) * block_size);
}

// Some rows of some neighbouring KV heads of one sequence.
struct Task {
  int64_t b, first_head, num_heads, first_row, num_rows;
};

// Keys `begin` to `end`, exclusive, of a task's sequence.
struct Share {
  int64_t begin, end;
};

// Running softmax of a task's rows, head by head: their largest score so far, the sum of exponentials in kLanes parts, and
// the weighted sum of values.
struct Partial {
  float *maximum, *sums, *weighted;  // (rows), (rows, kLanes), (rows, width)
};

// Scales of a chunk's keys and values in 8 bits; 0 beyond its last key.
struct Scales {
  const float *of_keys, *of_values;
};

// Scores of `count` keys become 2 to the power of (score - maximum) * scale, 0 outside begin..end; the partial sums are
// brought to the same maximum. In 8 bits scores come without their keys' scales, and weights leave with their values'.
template <bool is_rounded, typename E>
[[gnu::noinline]] void exponentiate(float* scores, E* weights, const Scales& scales, int64_t begin, int64_t end, int64_t count,
                  float scale, const Partial& out, int64_t r, int64_t width) {
  if constexpr (is_rounded)
    for (int64_t j = 0; j < count; j += kLanes) store(scores + j, load(scores + j) * load(scales.of_keys + j));
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
    if constexpr (is_rounded) narrow(power * load(scales.of_values + j), weights + j);
    else narrow(power, weights + j);
    sum += power;
  }
  store(out.sums + r * kLanes, sum);
}

// Positions of a task's rows, and the keys of its share that some of them see.
struct Seen {
  int64_t positions[kRowsPerTask], chunk, first_key, last_key;

  template <typename T, typename S>
  Seen(const Inputs<T, S>& in, const Task& task, const Share& share) : chunk(chunk_of(in.block_size)) {
    for (int64_t r = 0; r < task.num_rows; ++r) positions[r] = in.positions[task.b * in.Q + (task.first_row + r) % in.Q];
    const auto [lowest, highest] = std::minmax_element(positions, positions + task.num_rows);
    first_key = share.begin, last_key = std::min(share.end, *highest + 1);
    if (in.window > 0) first_key = std::max(first_key, (*lowest - in.window + 1) / chunk * chunk);
  }
};

// A row of a task's query after the other, as numbers of type E; 0 from D to `stride`.
template <typename E, typename T, typename S>
void gather_query(const Inputs<T, S>& in, const Task& task, E* query, int64_t stride) {
  for (int64_t row = 0; row < task.num_heads * task.num_rows; ++row, query += stride) {
    const int64_t head = task.first_head + row / task.num_rows, r = task.first_row + row % task.num_rows;
    const T* source = in.query + (head * (in.H / in.Hk) + r / in.Q) * in.query_head +
                      (task.b * in.Q + r % in.Q) * in.query_token;
    for (int64_t d = 0; d < in.D; ++d) query[d] = static_cast<E>(source[d]);
    std::fill(query + in.D, query + stride, E(0.0f));
  }
}

// Calls use(k, block, offset, count) for the pieces of a chunk that lie in one block, from the chunk's key k on.
template <typename T, typename S, typename Use>
inline void for_blocks(const Inputs<T, S>& in, const Task& task, int64_t start, int64_t num_keys, const Use& use) {
  for (int64_t k = 0; k < num_keys;) {
    const int64_t offset = (start + k) % in.block_size, count = std::min(in.block_size - offset, num_keys - k);
    use(k, in.block_tables[task.b * in.N + (start + k) / in.block_size], offset, count);
    k += count;
  }
}

// Scores of one head's rows of a task for a chunk of keys become weights, (rows, kChunk) both.
template <typename E, typename T, typename S>
void weigh(const Inputs<T, S>& in, const Task& task, const Seen& seen, int64_t head, int64_t start, int64_t num_keys,
           float* scores, E* weights, const Partial& out, int64_t width) {
  constexpr bool is_rounded = Inputs<T, S>::is_rounded;
  const int64_t padded = round_up(num_keys, kLanes);
  float of_keys[is_rounded ? kChunk : 1] = {}, of_values[is_rounded ? kChunk : 1] = {};
  if constexpr (is_rounded)
    for_blocks(in, task, start, num_keys, [&](int64_t k, int64_t block, int64_t offset, int64_t count) {
      std::copy_n(in.scales_of(block, task.first_head + head, false) + offset, count, of_keys + k);
      std::copy_n(in.scales_of(block, task.first_head + head, true) + offset, count, of_values + k);
    });
  for (int64_t r = 0; r < task.num_rows; ++r, scores += kChunk, weights += kChunk) {
    const int64_t end = std::min(num_keys, seen.positions[r] + 1 - start);
    const int64_t begin = in.window > 0 ? std::max(seen.positions[r] - in.window + 1 - start, int64_t{0}) : 0;
    if (begin < end)
      exponentiate<is_rounded>(scores, weights, Scales{of_keys, of_values}, begin, end, padded, in.scale * kLog2E, out,
                               head * task.num_rows + r, width);
    else std::fill_n(weights, padded, E(0.0f));
  }
}

// In numbers of type E. Keys and values are read where they lie, or those of one head are copied into floats: for many
// rows, so that they are widened once, and where they do not lie as vectors want them. The bits are the same.
template <typename E, bool direct, typename T, typename S>
void attend(const Inputs<T, S>& in, const Task& task, const Seen& seen, const Partial& out, int64_t width) {
  using Number = std::conditional_t<direct, S, float>;
  const int64_t num_rows = task.num_rows, all_rows = task.num_heads * num_rows;
  thread_local std::vector<E> numbers;
  thread_local std::vector<float> all_scores, copies;
  numbers.resize(all_rows * (in.D + kChunk));
  all_scores.resize(all_rows * kChunk);
  if constexpr (!direct) copies.resize(kChunk * (in.D + width));
  E* query = numbers.data();
  E* weights = query + all_rows * in.D;
  float* key_copy = copies.data();
  float* value_copy = key_copy + in.D * kChunk;
  float* scores = all_scores.data();
  gather_query(in, task, query, in.D);
  // Tiles of about equal size: 13 rows are 6 and 7.
  const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  // Calls use(rows, first) for the tiles of a head some of whose rows see a key; `rows` is a constant.
  const auto for_tiles = [&](int64_t key, auto use) {
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const int64_t first = tile * num_rows / num_tiles, end = (tile + 1) * num_rows / num_tiles;
      if (*std::max_element(seen.positions + first, seen.positions + end) < key) continue;
      with_rows<kTileRows>(end - first, [&](auto rows) { use(rows, first); });
    }
  };
  const auto keys_at = [&](int64_t block, int64_t offset, int64_t head) {
    return in.key_pool + (block * in.Hk + task.first_head + head) * in.D * in.block_size + offset;
  };
  const auto values_at = [&](int64_t block, int64_t offset, int64_t head) {
    return in.value_pool + ((block * in.Hk + task.first_head + head) * in.block_size + offset) * in.Dv;
  };
  for (int64_t start = seen.first_key; start < seen.last_key; start += seen.chunk) {
    const int64_t num_keys = std::min(seen.chunk, seen.last_key - start), padded = round_up(num_keys, kLanes);
    // Calls use(k, head, count, block, offset) for what is multiplied at a time.
    const auto for_pieces = [&](auto use) {
      if constexpr (direct)
        for_blocks(in, task, start, num_keys, [&](int64_t k, int64_t block, int64_t offset, int64_t count) {
          for (int64_t head = 0; head < task.num_heads; ++head) use(k, head, count, block, offset);
        });
      else use(int64_t{0}, int64_t{0}, num_keys, int64_t{0}, int64_t{0});
    };
    if constexpr (!direct) {
      for_blocks(in, task, start, num_keys, [&](int64_t k, int64_t block, int64_t offset, int64_t count) {
        const S *keys = keys_at(block, offset, 0), *values = values_at(block, offset, 0);
        for (int64_t d = 0; d < in.D; ++d) widen(keys + d * in.block_size, key_copy + d * kChunk + k, count);
        for (int64_t j = 0; j < count; ++j) widen(values + j * in.Dv, value_copy + (k + j) * width, in.Dv);
      });
      for (int64_t d = 0; d < in.D; ++d) std::fill_n(key_copy + d * kChunk + num_keys, padded - num_keys, 0.0f);
      for (int64_t j = 0; j < num_keys; ++j) std::fill_n(value_copy + j * width + in.Dv, width - in.Dv, 0.0f);
    }
    for_pieces([&](int64_t k, int64_t head, int64_t count, int64_t block, int64_t offset) {
      Piece<Number> keys;
      if constexpr (!direct) keys = {key_copy, key_copy, kChunk};
      else keys = {keys_at(block, offset, head), values_at(block, offset, head), in.block_size};
      for_tiles(start + k, [&](auto rows, int64_t first) {
        const int64_t row = head * num_rows + first;
        multiply_rows<false, rows()>(query + row * in.D, in.D, keys, scores + row * kChunk + k, kChunk, in.D,
                                     round_up(count, kLanes));
      });
    });
    for (int64_t head = 0; head < task.num_heads; ++head)
      weigh(in, task, seen, head, start, num_keys, scores + head * num_rows * kChunk, weights + head * num_rows * kChunk,
            out, width);
    for_pieces([&](int64_t k, int64_t head, int64_t count, int64_t block, int64_t offset) {
      Piece<Number> values;
      const int64_t next_key = std::min(start + k + seen.chunk, seen.last_key - 1);
      const int64_t next_block = in.block_tables[task.b * in.N + next_key / in.block_size];
      if constexpr (!direct) values = {value_copy, value_copy, width};
      else values = {values_at(block, offset, head), keys_at(next_block, next_key % in.block_size, head), in.Dv};
      for_tiles(start + k, [&](auto rows, int64_t first) {
        const int64_t row = head * num_rows + first;
        multiply_rows<true, rows()>(weights + row * kChunk + k, kChunk, values, out.weighted + row * width, width,
                                    count, width);
      });
    });
  }
}

#if defined(__AMX_BF16__)
// In tiles, for which pairs of rows are copied: head by head, so that the copies stay in the first-level cache.
template <typename T, typename S>
void attend_in_tiles(const Inputs<T, S>& in, const Task& task, const Seen& seen, const Partial& out, int64_t width) {
  const int64_t num_rows = task.num_rows, depth = round_up(in.D, kTileDepth);
  struct alignas(64) Line { at::BFloat16 numbers[kTileDepth]; };  // else a tile's rows would lie in two lines each
  struct alignas(64) Scores { float of_keys[kChunk]; };
  thread_local std::vector<Line> lines;
  thread_local std::vector<Scores> all_scores;
  const int64_t all_rows = task.num_heads * num_rows;
  lines.resize((all_rows * depth + num_rows * kChunk + std::max(depth, width) * kChunk) / kTileDepth);
  all_scores.resize(num_rows);
  at::BFloat16 *query = lines.data()->numbers, *weights = query + all_rows * depth, *pairs = weights + num_rows * kChunk;
  float* scores = all_scores.data()->of_keys;
  gather_query(in, task, query, depth);
  const int64_t num_tiles = (num_rows + kTileHeight - 1) / kTileHeight;
  const auto for_tiles = [&](int64_t key, auto use) {
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const int64_t first = tile * num_rows / num_tiles, end = (tile + 1) * num_rows / num_tiles;
      if (*std::max_element(seen.positions + first, seen.positions + end) >= key) use(first, end - first);
    }
  };
  for (int64_t start = seen.first_key; start < seen.last_key; start += seen.chunk) {
    const int64_t num_keys = std::min(seen.chunk, seen.last_key - start), padded = round_up(num_keys, kTileDepth);
    for (int64_t head = 0; head < task.num_heads; ++head) {
      const int64_t pool_head = task.first_head + head;
      for_blocks(in, task, start, num_keys, [&](int64_t k, int64_t block, int64_t offset, int64_t count) {
        const S* keys = in.key_pool + (block * in.Hk + pool_head) * in.D * in.block_size + offset;
        for (int64_t d = 0; d < in.D; d += 2)
          pair_rows(keys + d * in.block_size, keys + (d + 1) * in.block_size, round_up(count, kLanes), pairs + d * kChunk + 2 * k);
      });
      std::fill(pairs + in.D * kChunk, pairs + depth * kChunk, at::BFloat16(0.0f));
      std::fill_n(scores, num_rows * kChunk, 0.0f);
      for_tiles(start, [&](int64_t first, int64_t rows) {
        add_product(query + (head * num_rows + first) * depth, depth, pairs, kChunk, scores + first * kChunk, kChunk, rows,
                    depth, round_up(num_keys, kTileHeight));
      });
      std::fill_n(weights, num_rows * kChunk, at::BFloat16(0.0f));
      weigh(in, task, seen, head, start, num_keys, scores, weights, out, width);
      for_blocks(in, task, start, num_keys, [&](int64_t k, int64_t block, int64_t offset, int64_t count) {
        const S* values = in.value_pool + ((block * in.Hk + pool_head) * in.block_size + offset) * in.Dv;
        // An odd one out is its own partner, which has a weight of 0: what lies behind it may be anything.
        for (int64_t j = 0; j < count; j += 2)
          pair_rows(values + j * in.Dv, values + std::min(j + 1, count - 1) * in.Dv, in.Dv, pairs + (k + j) * width);
      });
      std::fill(pairs + round_up(num_keys, 2) * width, pairs + padded * width, at::BFloat16(0.0f));
      for_tiles(start, [&](int64_t first, int64_t rows) {
        add_product(weights + first * kChunk, kChunk, pairs, width, out.weighted + (head * num_rows + first) * width, width,
                    rows, padded, width);
      });
    }
  }
}
#endif

// Whether keys and values lie as vectors want them.
template <typename T, typename S>
bool reads_in_place(const Inputs<T, S>& in) {
  return in.block_size % kLanes == 0 && in.Dv % kLanes == 0 && in.D % 2 == 0;
}

template <Arithmetic arithmetic, typename T, typename S>
void attend_fastest(const Inputs<T, S>& in, const Task& task, const Share& share, const Partial& out, int64_t width) {
  const int64_t all_rows = task.num_heads * task.num_rows;
  std::fill_n(out.maximum, all_rows, kNever);
  std::fill_n(out.sums, all_rows * kLanes, 0.0f);
  std::fill_n(out.weighted, all_rows * width, 0.0f);
  const Seen seen(in, task, share);
  if (seen.first_key >= seen.last_key) return;
  if (!reads_in_place(in)) return attend<float, false>(in, task, seen, out, width);
#if defined(__AMX_BF16__)
  if constexpr (arithmetic == kTiles) return attend_in_tiles(in, task, seen, out, width);
#endif
#if defined(__AVX512BF16__)
  if constexpr (arithmetic == kPairs) return attend<at::BFloat16, true>(in, task, seen, out, width);
#endif
  if (!std::is_same_v<S, float> && task.num_rows > 2 * kTileRows) attend<float, false>(in, task, seen, out, width);
  else attend<float, true>(in, task, seen, out, width);
}

// Adds a part of a task, over later keys, to those before it.
[[gnu::noinline]] void add_part(const Partial& total, const Partial& part, int64_t num_rows, int64_t width, float scale) {
  for (int64_t row = 0; row < num_rows; ++row) {
    // A part without a key. One of NaN scores has no maximum either, but sums, which are NaN.
    if (part.maximum[row] == kNever && sum_of(load(part.sums + row * kLanes)) == 0) continue;
    const float maximum = std::max(total.maximum[row], part.maximum[row]);
    const float before = std::exp2((total.maximum[row] - maximum) * scale);
    const float factor = std::exp2((part.maximum[row] - maximum) * scale);
    const auto add = [&](float* to, const float* from, int64_t count) {
      for (int64_t i = 0; i < count; i += kLanes) store(to + i, load(to + i) * before + load(from + i) * factor);
    };
    total.maximum[row] = maximum;
    add(total.sums + row * kLanes, part.sums + row * kLanes, kLanes);
    add(total.weighted + row * width, part.weighted + row * width, width);
  }
}

// Writes a task's output.
template <typename T, typename S>
void finish(const Inputs<T, S>& in, const Task& task, const Partial& total, int64_t width) {
  for (int64_t row = 0; row < task.num_heads * task.num_rows; ++row) {
    const int64_t head = task.first_head + row / task.num_rows, r = task.first_row + row % task.num_rows;
    const int64_t token = task.b * in.Q + r % in.Q;
    T* output = in.output + (token * in.H + head * (in.H / in.Hk) + r / in.Q) * in.Dv;
    const float weight = 1 / sum_of(load(total.sums + row * kLanes));
    for (int64_t d = 0; d < in.Dv; ++d) output[d] = static_cast<T>(total.weighted[row * width + d] * weight);
  }
}

template <Arithmetic arithmetic, typename T, typename S>
void run(const Inputs<T, S>& in) {
  share_range(in.B * in.Q, 64, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) write_new(in, token);
  });
  const int64_t threads = num_threads(), num_keys = in.N * in.block_size;
  const int64_t keys_per_share = round_up(kSplit, chunk_of(in.block_size));
  const int64_t num_shares = (num_keys + keys_per_share - 1) / keys_per_share;
  const int64_t rows = in.H / in.Hk * in.Q, row_groups = (rows + kRowsPerTask - 1) / kRowsPerTask;
  // Few rows: of several heads at a time, because the K/V of a block's heads lie side by side.
  int64_t heads = reads_in_place(in) ? std::clamp(kRowsPerTask / rows, int64_t{1}, in.Hk) : 1;
  const auto count_tasks = [&] { return in.B * ((in.Hk + heads - 1) / heads) * row_groups; };
  while (heads > 1 && count_tasks() * num_shares < threads) heads = (heads + 1) / 2;
  const int64_t head_groups = (in.Hk + heads - 1) / heads, num_tasks = count_tasks();
  // Few tasks: threads share their keys too, and the parts are added up at the end.
  const bool divides = num_shares > 1 && num_tasks < kTasksPerThread * threads;
  const int64_t width = round_up(in.Dv, kLanes), partial_size = kRowsPerTask * (1 + kLanes + width);
  const auto buffer =
      std::make_unique_for_overwrite<float[]>((divides ? num_tasks * num_shares : 2 * threads) * partial_size);
  const auto partial = [&](int64_t i) {
    float* base = buffer.get() + i * partial_size;
    return Partial{base, base + kRowsPerTask, base + kRowsPerTask * (1 + kLanes)};
  };
  const auto make_task = [&](int64_t i) {
    const int64_t row = i % row_groups * kRowsPerTask, head = i / row_groups % head_groups * heads;
    return Task{i / row_groups / head_groups, head, std::min(heads, in.Hk - head), row,
                std::min(kRowsPerTask, rows - row)};
  };
  const auto attend_share = [&](const Task& task, int64_t share, const Partial& out) {
    const int64_t begin = share * keys_per_share;
    attend_fastest<arithmetic>(in, task, Share{begin, std::min(begin + keys_per_share, num_keys)}, out, width);
  };
  const auto add = [&](const Task& task, const Partial& total, const Partial& part) {
    add_part(total, part, task.num_heads * task.num_rows, width, in.scale * kLog2E);
  };
  if (divides) {
    share_tasks(num_tasks * num_shares,
                [&](int64_t i) { attend_share(make_task(i / num_shares), i % num_shares, partial(i)); });
    for (int64_t i = 0; i < num_tasks; ++i) {
      const Task task = make_task(i);
      for (int64_t share = 1; share < num_shares; ++share)
        add(task, partial(i * num_shares), partial(i * num_shares + share));
      finish(in, task, partial(i * num_shares), width);
    }
    return;
  }
  share_tasks(num_tasks, [&](int64_t i, int64_t thread) {
    const Task task = make_task(i);
    const Partial total = partial(2 * thread), part = partial(2 * thread + 1);
    attend_share(task, 0, total);
    for (int64_t share = 1; share < num_shares; ++share) {
      attend_share(task, share, part);
      add(task, total, part);
    }
    finish(in, task, total, width);
  });
}

at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, at::Tensor key_pool,
                           at::Tensor value_pool, const at::Tensor& positions, const at::Tensor& slots,
                           const at::Tensor& block_tables, double scale, int64_t window,
                           int64_t arithmetic, std::optional<at::Tensor> scales) {
  const int64_t B = slots.size(0), Q = slots.size(1), H = query.size(1), Dv = value_pool.size(3);
  at::Tensor output = at::empty({B * Q, H, Dv}, query.options());
  TORCH_CHECK(query.stride(3) == 1 && key.stride(3) == 1 && value.stride(3) == 1, "heads must be contiguous");
  const auto stored = key_pool.scalar_type();
  TORCH_CHECK(scales.has_value() == (stored == at::kChar || stored == at::kFloat8_e4m3fn), "8 bits have scales");
  const auto call = [&](auto chosen, auto zero, auto kept) {
    using T = decltype(zero);
    using S = decltype(kept);
    run<chosen()>(Inputs<T, S>{query.const_data_ptr<T>(), key.const_data_ptr<T>(), value.const_data_ptr<T>(),
                  query.stride(1), query.stride(2), key.stride(1), key.stride(2), value.stride(1), value.stride(2),
                  key_pool.mutable_data_ptr<S>(), value_pool.mutable_data_ptr<S>(),
                  scales ? scales->mutable_data_ptr<float>() : nullptr, output.mutable_data_ptr<T>(),
                  positions.const_data_ptr<int64_t>(), slots.const_data_ptr<int64_t>(),
                  block_tables.const_data_ptr<int64_t>(), B, Q, block_tables.size(1), H, key_pool.size(1),
                  key_pool.size(2), Dv, key_pool.size(3), window, static_cast<float>(scale)});
  };
  const auto call_with = [&](auto chosen, auto zero) {
    if (stored == at::kChar) call(chosen, zero, int8_t{});
    else if (stored == at::kFloat8_e4m3fn) call(chosen, zero, c10::Float8_e4m3fn{});
    else call(chosen, zero, zero);
  };
  constexpr std::integral_constant<Arithmetic, kFloat32> in_float32;
  if (query.scalar_type() == at::kFloat) call_with(in_float32, float{});
  else if (query.scalar_type() == at::kHalf) call_with(in_float32, at::Half{});
#if defined(__AMX_BF16__)
  else if (arithmetic == kTiles && may_use_tiles())
    call_with(std::integral_constant<Arithmetic, kTiles>(), at::BFloat16{});
#endif
#if defined(__AVX512BF16__)
  else if (arithmetic == kPairs && !scales)  // numbers of 8 bits are multiplied in float32
    call(std::integral_constant<Arithmetic, kPairs>(), at::BFloat16{}, at::BFloat16{});
#endif
  else call_with(in_float32, at::BFloat16{});
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(specdec, library) {
  library.def(
      "paged_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) key_pool, Tensor(b!) value_pool, Tensor "
      "positions, Tensor slots, Tensor block_tables, float scale, int window, int arithmetic, *, Tensor(c!)? scales=None) -> Tensor");
}
TORCH_LIBRARY_IMPL(specdec, CPU, library) { library.impl("paged_attention", paged_attention); }
