// Products of few rows with keys or values, by registers of floats, by instructions for pairs of bfloat16, or by tiles (AMX).

#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "lanes.h"
#include "tiles.h"

namespace {

// Rows of keys or values; and `upcoming`, rows with the same layout that are fetched meanwhile, because they are read next:
// these keys' values, or the next chunk's keys.
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

// sum (R x W*kLanes) += column k of A (R x depth) times row k of B (depth x W*kLanes), A and B row-major. It is one loop over
// all sums: with two they would go through memory (products.h).
template <int R, int W, typename A, typename B>
inline void add_outer(const A* a, int64_t lda, const Piece<B>& b, int64_t k, Lanes (&sum)[R][W]) {
  b.template fetch<W>(k);
  Lanes row[W];
  for (int w = 0; w < W; ++w) row[w] = widen(b.row(k) + w * kLanes);
#pragma GCC unroll 64
  for (int i = 0; i < R * W; ++i) sum[i / W][i % W] += row[i % W] * static_cast<float>(a[i / W * lda + k]);
}

// sum += A B.
template <int R, int W, typename B>
inline void accumulate(const float* a, int64_t lda, const Piece<B>& b, int64_t depth, Lanes (&sum)[R][W]) {
  for (int64_t k = 0; k < depth; ++k) add_outer(a, lda, b, k, sum);
}

#if defined(__AVX512BF16__)
// Pairs of numbers from two neighbouring rows: one register of pairs, or two if `more` is not 0.
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

// One instruction multiplies two rows of B by a pair of A's numbers: the rows are interleaved as they are read. An odd last
// row is paired with itself, for which A has a 0, since the memory behind it may hold NaN.
template <int R, int W>
inline void accumulate(const at::BFloat16* a, int64_t lda, const Piece<at::BFloat16>& b, int64_t depth,
                       Lanes (&sum)[R][W]) {
  const auto add_pair = [&](int64_t k, int64_t to_partner) {
    __m512bh rows[W];
    for (int w = 0; w < W; w += 2) interleave<W - 1>(b.row(k) + w * kLanes, to_partner, rows + w);
#pragma GCC unroll 64
    for (int i = 0; i < R * W; ++i) {
      const auto factors = (__m512bh)_mm512_set1_epi32(load<int32_t>(a + i / W * lda + k));
      sum[i / W][i % W] = (Lanes)_mm512_dpbf16_ps((__m512)sum[i / W][i % W], rows[i % W], factors);
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

#if defined(__AMX_BF16__)
constexpr int64_t kTileDepth = 32;  // of numbers of 16 bits

// A bfloat16 number kept as a float: widening it for each product would take longer than the product.
struct Widened {
  float value;

  explicit Widened(float number = 0) : value(at::BFloat16(number)) {}
  operator float() const { return value; }
  friend void narrow(Lanes v, Widened* to) {
    at::BFloat16 numbers[kLanes];
    ::narrow(v, numbers);
    store(&to->value, widen(numbers));
  }
};

// sum += A B with the bits of tiles, but without them.
template <int R, int W, typename B>
inline void accumulate_as_tiles(const Widened* a, int64_t lda, const Piece<B>& b, int64_t depth, Lanes (&sum)[R][W]) {
  for (int64_t start = 0; start < depth; start += kTileDepth) {
    Lanes even[R][W] = {}, odd[R][W] = {};
    const int64_t end = std::min(start + kTileDepth, depth);
    int64_t k = start;
    for (; k + 1 < end; k += 2) add_outer(a, lda, b, k, even), add_outer(a, lda, b, k + 1, odd);
    if (k < end) add_outer(a, lda, b, k, even);
    for (int r = 0; r < R; ++r)
      for (int w = 0; w < W; ++w) sum[r][w] += even[r][w] + odd[r][w];
  }
}
#endif

// C (R x W*kLanes) = A (R x depth) B (depth x W*kLanes), or C += if it `adds`; all row-major. Inlined into its caller, which
// knows the rows' distance as a constant, so that their addresses need no registers.
template <Arithmetic arithmetic, int R, int W, typename A, typename B>
[[gnu::always_inline]] inline void multiply(const A* a, int64_t lda, const Piece<B>& b, float* c, int64_t ldc, int64_t depth,
                                            bool adds) {
  Lanes sum[R][W] = {};
  if (adds)
#pragma GCC unroll 64
    for (int i = 0; i < R * W; ++i) sum[i / W][i % W] = load(c + i / W * ldc + i % W * kLanes);
  if constexpr (arithmetic == kTiles) accumulate_as_tiles(a, lda, b, depth, sum);
  else accumulate(a, lda, b, depth, sum);
#pragma GCC unroll 64
  for (int i = 0; i < R * W; ++i) store(c + i / W * ldc + i % W * kLanes, sum[i / W][i % W]);
}

// The same for a width that is any multiple of kLanes.
template <Arithmetic arithmetic, int R, typename A, typename B>
[[gnu::noinline]] void multiply_rows(const A* a, int64_t lda, const Piece<B>& b, float* c, int64_t ldc, int64_t depth,
                                     int64_t width, bool adds) {
  constexpr int kFew = arithmetic == kTiles ? 2 : kTileRows / 3;  // then more columns at a time: sums do not wait
  const auto columns = [&](auto count, int64_t w) {
    multiply<arithmetic, R, count()>(a, lda, b.from_column(w), c + w, ldc, depth, adds);
  };
  int64_t w = 0;
  if constexpr (R <= kFew)
    for (; w + 4 * kLanes <= width; w += 4 * kLanes) columns(std::integral_constant<int, 4>(), w);
  for (; w + 2 * kLanes <= width; w += 2 * kLanes) columns(std::integral_constant<int, 2>(), w);
  if (w < width) columns(std::integral_constant<int, 1>(), w);
}

// Rows of a tile; kTiles here means their bits without them.
template <Arithmetic arithmetic>
constexpr int64_t kMostRows = arithmetic == kTiles ? kFewRows : kTileRows;

// The same for at most kMostRows rows.
template <Arithmetic arithmetic, typename A, typename B>
[[gnu::noinline]] void multiply_some(int64_t rows, const A* a, int64_t lda, const Piece<B>& b, float* c, int64_t ldc,
                                     int64_t depth, int64_t width, bool adds) {
  dispatch_rows<kMostRows<arithmetic>>(rows, [&](auto count) {
    multiply_rows<arithmetic, count()>(a, lda, b, c, ldc, depth, width, adds);
  });
}

#if defined(__AMX_BF16__)
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

// Tile shapes for products of each number of rows: sums in registers 0 to 3, a in 4, b in 5 to 7.
constexpr auto kShapesOfRows = [] {
  std::array<TileShapes, kTileHeight + 1> shapes;
  for (int64_t rows = 0; rows <= kTileHeight; ++rows)
    for (int tile = 0; tile < 8; ++tile) shapes[rows].set(tile, tile <= 4 ? rows : kTileHeight, 64);
  return shapes;
}();

// c (rows x 16 * C) = a (rows x depth) b, or c += where it `adds`; of b pairs of rows, (depth / 2, ldb, 2).
template <bool adds, int C>
inline void multiply_tiles(const at::BFloat16* a, int64_t lda, const at::BFloat16* b, int64_t ldb, float* c, int64_t ldc,
                           int64_t depth) {
  if constexpr (adds) {
    _tile_loadd(0, c, 4 * ldc);
    if constexpr (C > 1) _tile_loadd(1, c + kTileHeight, 4 * ldc);
    if constexpr (C > 2) _tile_loadd(2, c + 2 * kTileHeight, 4 * ldc);
    if constexpr (C > 3) _tile_loadd(3, c + 3 * kTileHeight, 4 * ldc);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
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
template <bool adds>
inline void multiply_tiles(TileRegisters& tiles, const at::BFloat16* a, int64_t lda, const at::BFloat16* b, int64_t ldb, float* c,
                           int64_t ldc, int64_t rows, int64_t depth, int64_t width) {
  tiles.use(kShapesOfRows[rows]);
  int64_t w = 0;
  for (; w + 4 * kTileHeight <= width; w += 4 * kTileHeight)
    multiply_tiles<adds, 4>(a, lda, b + 2 * w, ldb, c + w, ldc, depth);
  dispatch_rows<3>((width - w) / kTileHeight, [&](auto columns) {
    multiply_tiles<adds, columns()>(a, lda, b + 2 * w, ldb, c + w, ldc, depth);
  });
}
#endif

}  // namespace
