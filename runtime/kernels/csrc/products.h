// Products of tokens and a weight that lies in panels of two registers' outputs (32 with AVX-512). They take any number of
// tokens, and are made for few: then reading the weights is most of a step, and they are read once, in order, as fast as
// memory gives them. Sums are float32.
//
// There are several ways to compute products ("arithmetics"): in float32, by instructions for pairs of bfloat16, and by
// instructions for tiles (AMX). A token's bits do not depend on the other tokens, but arithmetics differ in the last bits.

#pragma once

#include <c10/core/ScalarType.h>

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "lanes.h"
#include "rows.h"
#include "tasks.h"
#include "tiles.h"

// Memory aligned to cache lines: otherwise each row of a tile would span two lines and load half as fast.
struct Free {
  void operator()(void* p) const { std::free(p); }
};
template <typename T>
using AlignedBuffer = std::unique_ptr<T[], Free>;
template <typename T>
AlignedBuffer<T> make_aligned(int64_t count) {
  return AlignedBuffer<T>(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64)));
}

constexpr int64_t kPanel = 2 * kLanes;
constexpr int64_t kManyTiles = 3, kPanelsTogether = 4;

// Floats of the piece of a panel that stays in a cache while many tokens are multiplied by it: a short piece in L1 if it fits
// there together with the tokens, as in 48 KB (measured against panels read in place). An L1 of 32 KB is too small: then a
// long piece stays in L2, and a tile's sums are loaded less often (measured against short pieces). The bits are the same.
constexpr int64_t kShortPiece = 8192, kLongPiece = 32768;
inline bool has_room_for_pieces() {
#if defined(_SC_LEVEL1_DCACHE_SIZE)
  const int64_t bytes = sysconf(_SC_LEVEL1_DCACHE_SIZE);
  return bytes <= 0 || bytes >= 48 << 10;  // some systems do not tell
#else
  return true;
#endif
}
inline bool takes_short_pieces = has_room_for_pieces();

// Tokens whose numbers for a short piece stay in the second-level cache beside their sums.
constexpr int64_t kRowsInCache = 15 * kPanel;

// Bytes by which a panel is fetched ahead: less than a page, or the processor's own prefetching does not help. Fewer for panels
// read side by side if a column is two lines, or if there are four panels (all measured).
constexpr int64_t kAhead = 3072, kAheadOfFour = 1024;
template <typename T>
constexpr int64_t kAheadOfTwo = kPanel * sizeof(T) > 64 ? 1024 : kAhead;

template <typename T>
[[gnu::always_inline]] inline void prefetch_l2(const T* p, int64_t count, int64_t ahead = kAhead) {
  for (int64_t byte = 0; byte < count * int64_t{sizeof(T)}; byte += 64)
    fetch_line(reinterpret_cast<const char*>(p) + ahead + byte);
}

// Columns per group: two of a bfloat16 weight form a pair, other weights' columns stand alone.
template <typename T>
constexpr int64_t kGroup = std::is_same_v<T, at::BFloat16> ? 2 : 1;

// Products read a panel in memory, or a piece of a panel in another form, through from_column() and for_pairs().
template <typename T>
inline const T* from_column(const T* panel, int64_t k) { return panel + k * kPanel; }
template <typename P>
inline P from_column(const P& panel, int64_t k) { return panel.from_column(k); }

// Two panels that are read side by side: a thread reads two streams faster than one. In a pair or a column the second panel's
// registers follow the first's; its sums follow the sums of all rows of the first.
template <typename T>
struct TwoPanels {
  const T *first, *second;
  TwoPanels from_column(int64_t k) const { return {first + k * kPanel, second + k * kPanel}; }
};
// Four panels, for one token of float16: while the processor widens numbers, it prefetches less far ahead by itself.
template <typename T>
struct FourPanels {
  const T *first, *second, *third, *fourth;
};
template <typename P>
constexpr int kRegisters = 2;
template <typename T>
constexpr int kRegisters<TwoPanels<T>> = 4;
template <typename T>
constexpr int kRegisters<FourPanels<T>> = 8;

// Tokens of a tile, whose sums fit the registers.
template <typename P>
constexpr int kMostTokens = 2 * kTileRows / kRegisters<P>;
// Most tokens times panels read side by side, since the panels' numbers need registers too.
constexpr int64_t kMostBeside = kFewRegisters ? 4 : kTileRows;

// Calls use(k, left, right) for the pairs of a panel's columns, each as two registers, in order. Always inlined: sums that a
// function refers to would get no registers.
template <typename Use>
[[gnu::always_inline]] inline void for_pairs(const at::BFloat16* panel, int64_t depth, const Use& use) {
  for (int64_t k = 0; k < depth; k += 2, panel += 2 * kPanel) {
    prefetch_l2(panel, 2 * kPanel);
    use(k, load<Words>(panel), load<Words>(panel + kPanel));
  }
}
template <typename Use>
[[gnu::always_inline]] inline void for_pairs(TwoPanels<at::BFloat16> panels, int64_t depth, const Use& use) {
  auto [one, two] = panels;
  for (int64_t k = 0; k < depth; k += 2, one += 2 * kPanel, two += 2 * kPanel) {
    prefetch_l2(one, 2 * kPanel);
    prefetch_l2(two, 2 * kPanel);
    use(k, load<Words>(one), load<Words>(one + kPanel), load<Words>(two), load<Words>(two + kPanel));
  }
}
template <typename P, typename Use>
[[gnu::always_inline]] inline void for_pairs(const P& panel, int64_t depth, const Use& use) { panel.for_pairs(depth, use); }

// The same for columns, as floats.
template <typename P, typename Use>
[[gnu::always_inline]] inline void for_columns(const P& panel, int64_t depth, const Use& use) {
  for_pairs(panel, depth, [&](int64_t k, auto... words) {  // a pair's first number is the lower half of a word
    use(k, (Lanes)(words << 16)...);
    use(k + 1, (Lanes)(words & 0xffff0000u)...);
  });
}
template <typename T, typename Use>
  requires(kGroup<T> == 1)
[[gnu::always_inline]] inline void for_columns(const T* panel, int64_t depth, const Use& use) {
  for (int64_t k = 0; k < depth; ++k, panel += kPanel) {
    prefetch_l2(panel, kPanel);
    use(k, widen(panel), widen(panel + kLanes));
  }
}
template <typename T, typename Use>
  requires(kGroup<T> == 1)
[[gnu::always_inline]] inline void for_columns(TwoPanels<T> panels, int64_t depth, const Use& use) {
  auto [one, two] = panels;
  for (int64_t k = 0; k < depth; ++k, one += kPanel, two += kPanel) {
    prefetch_l2(one, kPanel, kAheadOfTwo<T>);
    prefetch_l2(two, kPanel, kAheadOfTwo<T>);
    use(k, widen(one), widen(one + kLanes), widen(two), widen(two + kLanes));
  }
}

template <typename T, typename Use>
[[gnu::always_inline]] inline void for_columns(FourPanels<T> panels, int64_t depth, const Use& use) {
  auto [one, two, three, four] = panels;
  for (int64_t k = 0; k < depth; ++k, one += kPanel, two += kPanel, three += kPanel, four += kPanel) {
    for (const T* panel : {one, two, three, four}) prefetch_l2(panel, kPanel, kAheadOfFour);
    use(k, widen(one), widen(one + kLanes), widen(two), widen(two + kLanes), widen(three), widen(three + kLanes), widen(four),
        widen(four + kLanes));
  }
}

// A piece of a panel in a cache, widened. Nothing is fetched ahead, and the loop is fastest unrolled; the barriers keep the
// compiler from mixing two columns, which would leave some sums without a register.
struct CachedPiece { const float* columns; };
template <typename Use>
inline void for_columns(const CachedPiece& piece, int64_t depth, const Use& use) {
  const float* columns = piece.columns;
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; ++k, columns += kPanel) {
    use(k, load(columns), load(columns + kLanes));
    asm volatile("");
  }
}

template <typename P>
inline void store_pairs(const P& panel, int64_t depth, at::BFloat16* to) {
  for_pairs(panel, depth, [&](int64_t k, Words left, Words right) {
    std::memcpy(to + k * kPanel, &left, sizeof left);
    std::memcpy(to + (k + 1) * kPanel, &right, sizeof right);
  });
}

// Loads the sums of R rows and each panel that is read: (panels, R, kPanel). A single loop over all sums is unrolled before
// register allocation; with two loops the outer one is unrolled later, and all sums would go through memory.
template <int R, int W>
inline void load_sums(const float* from, Lanes (&sums)[R][W]) {
#pragma GCC unroll 64
  for (int i = 0; i < R * W; ++i) {
    const int r = i / W, w = i % W;
    sums[r][w] = load(from + (w / 2 * R + r) * kPanel + w % 2 * kLanes);
  }
}

template <int R, int W>
inline void store_sums(const Lanes (&sums)[R][W], float* to) {
#pragma GCC unroll 64
  for (int i = 0; i < R * W; ++i) {
    const int r = i / W, w = i % W;
    store(to + (w / 2 * R + r) * kPanel + w % 2 * kLanes, sums[r][w]);
  }
}

// A tile's sums (rows x kPanel), which become its outputs: `width` of them lie in a row of `out`.
template <typename T>
struct Outputs {
  const float* sums;
  int64_t rows, width;
  T* out;
  int64_t stride;

  // Writes the first `count` rows; returns the rows that are left.
  Outputs write(int64_t count) const {
    const float* from = sums;
    T* to = out;
    for (int64_t r = 0; r < count; ++r, from += kPanel, to += stride) {
      T whole[kPanel], *place = width == kPanel ? to : whole;
      narrow(load(from), place);
      narrow(load(from + kLanes), place + kLanes);
      if (place == whole) std::copy_n(whole, width, to);
    }
    return {from, rows - count, width, to, stride};
  }
};

template <typename T>
inline void write_to_places(const FewRows& part, const float* sums, int64_t width, T* out, int64_t stride) {
  for (int64_t r = 0; r < part.count; ++r)
    Outputs<T>{sums + r * kPanel, 1, width, out + (part.places ? part.places[r] : part.token + r) * stride, stride}.write(1);
}

// Each of the three products below holds the tokens in the form that it wants, and has
// - add(): sums (rows x kPanel) += x (rows x depth) panel (depth x kPanel), for the tokens from `row` on and the columns from
//   `k` on; `=` instead of `+=` if they `start`;
// - State: what a thread keeps from one add() to the next. prepare() is told where the next sums will be written, write()
//   writes finished sums, now or during the next products, and finish() writes the rest;
// - with_piece(): calls use(panel) with a piece of a panel in the form that it wants, which `num_tiles` tiles will read;
// - first_row(): the first row of a tile, of the tiles into which M rows are divided.

// Tiles of about equal size: 13 rows are 6 and 7.
struct EvenTiles {
  struct State {
    // Prefetch the output: while its lines arrive one after the other, no later number can be stored.
    template <typename T>
    void prepare(const Outputs<T>& outputs) {
      for (int64_t r = 0; r < outputs.rows; ++r)
        for (int64_t n = 0; n < outputs.width; n += 64 / sizeof(T)) __builtin_prefetch(outputs.out + r * outputs.stride + n, 1);
    }
    template <typename T>
    void write(const Outputs<T>& outputs) { outputs.write(outputs.rows); }
    void finish() {}
  };
  static constexpr int64_t kMostRows = kTileRows;
  static int64_t num_tiles(int64_t M) { return (M + kTileRows - 1) / kTileRows; }
  static int64_t first_row(int64_t tile, int64_t M) { return tile * M / num_tiles(M); }
};

// Numbers from one row of tokens to the next. Rows a multiple of 4,096 bytes apart, such as 2,048 columns of bfloat16, share
// the same few places in the first-level cache, mostly 8, and more rows push each other out. Such rows are copied to lie a
// line further apart.
template <typename E>
int64_t stride_of_rows(int64_t M, int64_t K) {
  return std::min(M, kTileRows) > 8 && K * sizeof(E) % 4096 == 0 ? K + 64 / sizeof(E) : K;
}

// Adds the products of two registers and a factor to two sums. With 16 registers, when columns are widened too, GNU's compiler
// would keep some sums in memory, where they wait for each other; inline assembly leaves it no choice.
[[gnu::always_inline]] inline void multiply_add(Lanes left, Lanes right, const float* factor, Lanes& left_sum, Lanes& right_sum) {
#if defined(__FMA__) && !defined(__AVX512F__)
  Lanes one = left_sum, two = right_sum, factors;
  asm("vbroadcastss %5, %2\n\tvfmadd231ps %3, %2, %0\n\tvfmadd231ps %4, %2, %1"
      : "+x"(one), "+x"(two), "=&x"(factors)
      : "x"(left), "x"(right), "m"(*factor));
  left_sum = one, right_sum = two;
#else
  left_sum += left * *factor;
  right_sum += right * *factor;
#endif
}

// Tokens as floats: row by row, or for kFewestByColumns tokens and more, column by column within a tile, as they are read. The
// products are the same for all dtypes of the tokens.
struct FloatTokens : EvenTiles {
  static constexpr int64_t kFewestByColumns = kFewRegisters ? 4 : (kManyTiles - 1) * kTileRows + 1;
  static constexpr int kFewestOfTile = kFewRegisters ? 3 : kFewestByColumns / kManyTiles;
  const float* x = nullptr;
  int64_t K, stride;
  bool by_columns;

  FloatTokens(int64_t M, int64_t K) : K(K), stride(K), by_columns(M >= kFewestByColumns) {}

  // Not inlined, or some sums would not get a register.
  template <typename P>
  [[gnu::noinline]] void add(int64_t row, int64_t rows, int64_t k, int64_t depth, const P& panel, float* to, bool start,
                             State&) const {
    constexpr int most = kMostTokens<P>;
    if constexpr (kRegisters<P> == 2)  // several panels are read side by side for few tokens only
      if (by_columns)
        return dispatch_rows<most, kFewestOfTile>(rows, [&](auto count) {
          constexpr int R = count();
          add_rows<R, true>(x + row * K + k * R, R, depth, panel, to, start);
        });
    if constexpr (!std::is_same_v<P, CachedPiece>)
      dispatch_rows<most>(rows, [&](auto count) {
        add_rows<count(), false>(x + row * stride + k, stride, depth, panel, to, start);
      });
  }

  // Adds the products of tokens that lie column by column, or in rows that are `stride` numbers apart.
  template <int R, bool are_columns, typename P>
  [[gnu::always_inline]] static void add_rows(const float* factors, int64_t stride, int64_t depth, const P& panel, float* to,
                                              bool start) {
    const int64_t to_row = are_columns ? 1 : stride, to_column = are_columns ? R : 1;
    constexpr int W = kRegisters<P>;
    Lanes sums[R][W] = {};
    if (!start) load_sums(to, sums);
    for_columns(panel, depth, [&](int64_t k, auto... registers) __attribute__((always_inline)) {
      const Lanes column[W] = {registers...};
      if (are_columns) prefetch_l1(factors + k * to_column + 256);  // in memory they follow one another
#pragma GCC unroll 64
      for (int i = 0; i < R * W; i += 2) {
        const float* factor = factors + i / W * to_row + k * to_column;
        Lanes &left = sums[i / W][i % W], &right = sums[i / W][i % W + 1];
        if constexpr (std::is_same_v<P, CachedPiece>) left += column[i % W] * *factor, right += column[i % W + 1] * *factor;
        else multiply_add(column[i % W], column[i % W + 1], factor, left, right);
      }
    });
    store_sums(sums, to);
  }
};

// Float32 arithmetic. Numbers of 16 bits are widened: the tokens once, a panel as it is read, or for many tokens once.
template <typename T>
struct GemmFp32 : FloatTokens {
  static constexpr bool kWidens = !std::is_same_v<T, float>, kReadsInPlace = false;
  std::unique_ptr<float[]> own;

  GemmFp32(const T* tokens, int64_t M, int64_t K) : FloatTokens(M, K) {
    if (!by_columns) stride = stride_of_rows<float>(M, K);
    if constexpr (!kWidens) x = tokens;
    if (!kWidens && !by_columns && stride == K) return;
    own = std::make_unique_for_overwrite<float[]>(M * stride);
    x = own.get();
    if (by_columns) share_tasks(num_tiles(M), [&](int64_t tile) { lay_out(tokens, first_row(tile, M), first_row(tile + 1, M)); });
    else for (int64_t m = 0; m < M; ++m) widen(tokens + m * K, own.get() + m * stride, K);
  }

  // Copies a tile's tokens column by column, a line of each at a time, since their rows may share places in the cache.
  void lay_out(const T* tokens, int64_t row, int64_t end) {
    constexpr int64_t kLine = 16;
    float lines[kTileRows][kLine], *to = own.get() + row * K;
    for (int64_t k = 0; k < K; k += kLine) {
      const int64_t count = std::min(kLine, K - k);
      for (int64_t m = row; m < end; ++m) widen(tokens + m * K + k, lines[m - row], count);
      for (int64_t i = 0; i < count; ++i)
        for (int64_t r = 0; r < end - row; ++r) *to++ = lines[r][i];
    }
  }

  static bool copies_pieces() { return kWidens || takes_short_pieces; }

  static int64_t depth(int64_t num_tiles) {
    return num_tiles < kManyTiles ? 2048 : (takes_short_pieces ? kShortPiece : kLongPiece) / kPanel;
  }

  template <typename Use>
  static void with_piece(const T* panel, int64_t depth, int64_t num_tiles, const Use& use) {
    if (num_tiles < kManyTiles || !copies_pieces()) return use(panel);
    struct alignas(64) Line { float numbers[16]; };
    thread_local std::vector<Line> lines;
    lines.resize((depth * kPanel + 15) / 16);
    float* copy = lines.data()->numbers;
    for_columns(panel, depth, [&](int64_t k, Lanes left, Lanes right) {
      store(copy + k * kPanel, left);
      store(copy + k * kPanel + kLanes, right);
    });
    use(CachedPiece{copy});
  }
};

#if defined(__AVX512BF16__)
struct GemmBf16Dot : EvenTiles {
  static constexpr bool kReadsInPlace = true;
  std::unique_ptr<at::BFloat16[]> own;
  const at::BFloat16* x;
  int64_t stride;

  GemmBf16Dot(const at::BFloat16* tokens, int64_t M, int64_t K) : x(tokens), stride(stride_of_rows<at::BFloat16>(M, K)) {
    if (stride == K) return;
    own = std::make_unique_for_overwrite<at::BFloat16[]>(M * stride);
    x = own.get();
    share_range(M, 64, [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; ++m) std::copy_n(tokens + m * K, K, own.get() + m * stride);
    });
  }

  static int64_t depth(int64_t) { return 2048; }

  template <typename Use>
  static void with_piece(const at::BFloat16* panel, int64_t, int64_t, const Use& use) { use(panel); }

  template <typename P>
  void add(int64_t row, int64_t rows, int64_t k, int64_t depth, const P& panel, float* to, bool start, State&) const {
    dispatch_rows<kMostTokens<P>>(rows, [&](auto count) {
      constexpr int R = count(), W = kRegisters<P>;
      const int64_t to_row = stride;
      const at::BFloat16* factors = x + row * to_row + k;
      Lanes sums[R][W] = {};
      if (!start) load_sums(to, sums);
      for_pairs(panel, depth, [&](int64_t k, auto... words) {
        const Words pairs[W] = {words...};
#pragma GCC unroll 64
        for (int i = 0; i < R * W; ++i) {
          const auto factor = (__m512bh)_mm512_set1_epi32(load<int32_t>(factors + i / W * to_row + k));
          sums[i / W][i % W] = (Lanes)_mm512_dpbf16_ps((__m512)sums[i / W][i % W], (__m512bh)pairs[i % W], factor);
        }
      });
      store_sums(sums, to);
    });
  }
};
#endif

#if defined(__AMX_BF16__)
// Columns of a panel for the tiles, in memory: in place, or copied to one of two buffers in turn, one step before the tiles
// read them, because loads stall on recent stores.
template <typename P>
struct TileColumns {
  static constexpr int64_t kMost = 32;
  P panel;
  alignas(64) at::BFloat16 places[2][kMost * kPanel];

  explicit TileColumns(const P& panel) : panel(panel) {}
  void prepare(int64_t k, int64_t width) {
    store_pairs(from_column(panel, k), width, places[k / kMost % 2]);
    asm volatile("" : : : "memory");
  }
  const at::BFloat16* at(int64_t k) const { return places[k / kMost % 2]; }
};
template <>
struct TileColumns<const at::BFloat16*> {
  const at::BFloat16* panel;

  explicit TileColumns(const at::BFloat16* panel) : panel(panel) {}
  void prepare(int64_t, int64_t) {}
  const at::BFloat16* at(int64_t k) const { return panel + k * kPanel; }
};

// A tile register holds 16 rows of 64 bytes: sums of 16 tokens and 16 outputs, or 32 numbers of each of 16 tokens, or 16
// pairs of columns of 16 outputs, which lie in the panel as the instruction wants them. Four registers hold the sums of 32
// tokens and a panel.
struct GemmAmx {
  static constexpr int64_t kHeight = 16, kWidth = 32, kMostRows = 2 * kHeight;
  static constexpr bool kReadsInPlace = true;
  AlignedBuffer<at::BFloat16> x;  // (blocks of 16 tokens, blocks of 32 columns, 16, 32)
  AlignedBuffer<float> few;  // (M, K), for few tokens instead of x
  int64_t K, num_blocks;

  GemmAmx(const at::BFloat16* tokens, int64_t M, int64_t K) : K(K), num_blocks((K + kWidth - 1) / kWidth) {
    if (M <= kFewRows) {
      few = make_aligned<float>(M * K);
      widen(tokens, few.get(), M * K);
      return;
    }
    x = make_aligned<at::BFloat16>((M + kHeight - 1) / kHeight * kHeight * num_blocks * kWidth);
    share_range(M, 64, [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; ++m)
        for (int64_t k = 0; k < K; k += kWidth)
          std::memcpy(at(m, k), tokens + m * K + k, std::min(kWidth, K - k) * sizeof(at::BFloat16));
    });
  }

  at::BFloat16* at(int64_t m, int64_t k) const {
    return x.get() + ((m / kHeight * num_blocks + k / kWidth) * kHeight + m % kHeight) * kWidth;
  }

  static int64_t depth(int64_t) { return 4096; }  // a piece of a panel stays in the second-level cache
  static int64_t num_tiles(int64_t M) { return (M + 2 * kHeight - 1) / (2 * kHeight); }
  static int64_t first_row(int64_t tile, int64_t M) { return std::min(tile * 2 * kHeight, M); }

  template <typename Use>
  static void with_piece(const at::BFloat16* panel, int64_t, int64_t, const Use& use) { use(panel); }

  template <int B>
  static constexpr TileShapes shapes(int64_t rows, int64_t width) {
    const int64_t height[] = {std::min(rows, kHeight), rows - kHeight};
    TileShapes shapes;
    for (int b = 0; b < B; ++b) shapes.set(4 + b, height[b], width * 2);
    for (int sum = 0; sum < 4; ++sum) shapes.set(sum, height[B == 2 ? sum / 2 : 0], 64);  // or of a second panel
    shapes.set(6, width / 2, 64), shapes.set(7, width / 2, 64);
    return shapes;
  }
  template <int B>
  static constexpr TileShapes kWhole = shapes<B>(B * kHeight, kWidth);

  class State {
   public:
    template <int B>
    void use(int64_t rows, int64_t width) {
      if (rows == B * kHeight && width == kWidth) registers_.use(kWhole<B>);
      else registers_.use(shapes<B>(rows, width));
    }

    void prepare(const Outputs<at::BFloat16>&) {}
    // Writing and multiplying use different parts of the processor: a tile's outputs are written gradually while the next
    // is computed.
    void write(const Outputs<at::BFloat16>& outputs) {
      write_some(waiting_.rows);
      waiting_ = outputs;
    }
    void write_some(int64_t most) {
      if (waiting_.rows) waiting_ = waiting_.write(std::min(most, waiting_.rows));
    }

    void finish() { write_some(waiting_.rows); }

    ~State() { finish(); }

   private:
    TileRegisters registers_;
    Outputs<at::BFloat16> waiting_ = {};
  };

  template <typename P>
  void add(int64_t row, int64_t rows, int64_t k, int64_t depth, const P& panel, float* to, bool start, State& state) const {
    if (few) return add_without_tiles(few.get() + row * K + k, rows, depth, panel, to, start);
    const int64_t whole = depth / kWidth * kWidth, rest = depth - whole;
    const auto add = [&] {
      if constexpr (kRegisters<P> == 4) return add_two_panels;
      else return rows > kHeight ? add_blocks<2, P> : add_blocks<1, P>;
    }();
    const int64_t stride = num_blocks * kHeight * kWidth;
    if (whole) add(at(row, k), stride, rows, whole, kWidth, panel, to, start, state);
    if (rest) add(at(row, k + whole), stride, rows, rest, rest, from_column(panel, whole), to, start && !whole, state);
  }

  // The same bits, added up as tiles do (tiles.h). For few tokens most time goes into loading the panel, and vector registers
  // load faster than tiles.
  template <typename P>
  void add_without_tiles(const float* tokens, int64_t rows, int64_t depth, const P& panel, float* to, bool start) const {
    const FlushDenormals as_tiles_do;
    dispatch_rows<kFewRows>(rows, [&](auto count) {
      constexpr int R = count(), W = kRegisters<P>;
      Lanes sums[R][W] = {};
      if (!start) load_sums(to, sums);
      for (int64_t first = 0; first < depth; first += kWidth) {
        Lanes even[R][W] = {}, odd[R][W] = {};
        for_pairs(from_column(panel, first), std::min(kWidth, depth - first), [&](int64_t k, auto... words) {
          const Lanes left[W] = {(Lanes)(words << 16)...}, right[W] = {(Lanes)(words & 0xffff0000u)...};
          for (int r = 0; r < R; ++r) {
            const float* factors = tokens + r * K + first + k;
            for (int w = 0; w < W; ++w) even[r][w] += left[w] * factors[0], odd[r][w] += right[w] * factors[1];
          }
        });
        for (int r = 0; r < R; ++r)
          for (int w = 0; w < W; ++w) sums[r][w] += even[r][w] + odd[r][w];
      }
      store_sums(sums, to);
    });
  }

  // Products of tokens in one block of 16, or in two; `width` columns at a time.
  template <int B, typename P>
  static void add_blocks(const at::BFloat16* tokens, int64_t stride, int64_t rows, int64_t depth, int64_t width,
                         const P& panel, float* to, bool start, State& state) {
    TileColumns<P> columns(panel);
    columns.prepare(0, width);
    state.template use<B>(rows, width);
    constexpr int64_t kRowBytes = kPanel * sizeof(float);
    float* below = to + kHeight * kPanel;
    if (start) {  // loading sums that were stored just now would have to wait
      _tile_zero(0);
      _tile_zero(1);
      if constexpr (B == 2) _tile_zero(2);
      if constexpr (B == 2) _tile_zero(3);
    } else {
      _tile_loadd(0, to, kRowBytes);
      _tile_loadd(1, to + kLanes, kRowBytes);
      if constexpr (B == 2) _tile_loadd(2, below, kRowBytes);
      if constexpr (B == 2) _tile_loadd(3, below + kLanes, kRowBytes);
    }
    for (int64_t k = 0; k < depth; k += width, tokens += kHeight * kWidth) {
      const at::BFloat16* numbers = columns.at(k);
      if constexpr (B == 1 && std::is_pointer_v<P>) prefetch_l2(numbers, width * kPanel);
      if (k + width < depth) columns.prepare(k + width, width);
      _tile_loadd(4, tokens, 64);
      _tile_loadd(6, numbers, 4 * kPanel);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, numbers + kPanel, 4 * kPanel);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (B == 2) {
        _tile_loadd(5, tokens + stride, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        state.write_some(2);
      }
    }
    _tile_stored(0, to, kRowBytes);
    _tile_stored(1, to + kLanes, kRowBytes);
    if constexpr (B == 2) _tile_stored(2, below, kRowBytes);
    if constexpr (B == 2) _tile_stored(3, below + kLanes, kRowBytes);
  }

  // Products of tokens in one block of 16 with two panels.
  static void add_two_panels(const at::BFloat16* tokens, int64_t, int64_t rows, int64_t depth, int64_t width,
                             const TwoPanels<at::BFloat16>& panels, float* to, bool start, State& state) {
    state.use<1>(rows, width);
    constexpr int64_t kRowBytes = kPanel * sizeof(float);
    float* second = to + rows * kPanel;
    if (start) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else {
      _tile_loadd(0, to, kRowBytes);
      _tile_loadd(1, to + kLanes, kRowBytes);
      _tile_loadd(2, second, kRowBytes);
      _tile_loadd(3, second + kLanes, kRowBytes);
    }
    for (int64_t k = 0; k < depth; k += width, tokens += kHeight * kWidth) {
      const auto [one, two] = panels.from_column(k);
      _tile_loadd(4, tokens, 64);
      prefetch_l2(one, width * kPanel);
      _tile_loadd(6, one, 4 * kPanel);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, one + kPanel, 4 * kPanel);
      _tile_dpbf16ps(1, 4, 7);
      prefetch_l2(two, width * kPanel);
      _tile_loadd(6, two, 4 * kPanel);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, two + kPanel, 4 * kPanel);
      _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, to, kRowBytes);
    _tile_stored(1, to + kLanes, kRowBytes);
    _tile_stored(2, second, kRowBytes);
    _tile_stored(3, second + kLanes, kRowBytes);
  }
};

#endif

// Panels as the products read them.
template <typename T>
struct Panels {
  const T* packed;  // (panels, K, kPanel)
  int64_t K;

  static int64_t depth(int64_t most) { return most; }

  // True if a panel is never copied, and one piece is the whole panel.
  template <typename Product>
  static bool reads_in_place(int64_t K) { return Product::kReadsInPlace && K <= Product::depth(1); }

  // Fetches one of `parts` parts of the piece from a panel's column k on, while another piece is multiplied. With few parts not
  // all of the piece is fetched: so many requests at once would have to wait.
  void fetch_piece(int64_t panel, int64_t k, int64_t depth, int64_t part, int64_t parts) const {
    constexpr int64_t kLine = 64 / sizeof(T);
    const T* from = packed + (panel * K + k) * kPanel;
    const int64_t lines = std::min(std::min(depth, K - k) * kPanel, parts * kShortPiece) / kLine;
    for (int64_t line = part * lines / parts; line < (part + 1) * lines / parts; ++line) fetch_line(from + line * kLine);
  }

  template <typename Product, typename Use>
  void with_piece(const Product& x, int64_t panel, int64_t k, int64_t depth, int64_t num_tiles, const Use& use) const {
    Product::with_piece(packed + (panel * K + k) * kPanel, depth, num_tiles, [&](auto piece) {
      use([&](int64_t row, int64_t rows, float* sums, bool start, auto& state) {
        x.add(row, rows, k, depth, piece, sums, start, state);
      });
    });
  }
};

// Sets a tile's sums to the outputs' biases, or to 0.
template <typename T>
inline void start_sums(const T* bias, int64_t width, int64_t rows, float* sums) {
  float initial[kPanel] = {};
  if (bias) widen(bias, initial, width);
  for (int64_t r = 0; r < rows; ++r) std::copy_n(initial, kPanel, sums + r * kPanel);
}

// out = x weight^T + bias for few tokens of each weight: their sums for `together` panels, which are a task, fit where a
// tile's sums do.
template <typename Product, int together, typename T>
void multiply_few(const T* tokens, const T* weights, std::span<const FewRows> parts, const T* bias, T* out, int64_t K,
                  int64_t N) {
  std::vector<Product> inputs;
  inputs.reserve(parts.size());
  for (const FewRows& part : parts) inputs.emplace_back(tokens + part.token * K, part.count, K);
  const int64_t panels = (N + kPanel - 1) / kPanel, tasks = (panels + together - 1) / together;
  share_tasks(static_cast<int64_t>(parts.size()) * tasks, [&](int64_t task) {
    alignas(64) float all_sums[Product::kMostRows * kPanel];
    typename Product::State state;
    const FewRows& part = parts[task / tasks];
    const Product& x = inputs[task / tasks];
    const T* packed = weights + part.weight_bytes / static_cast<int64_t>(sizeof(T));
    const int64_t M = part.count, begin = together * (task % tasks), end = std::min(begin + together, panels);
    const auto for_panels = [&](auto use) {  // with its number and its sums
      for (int64_t panel = begin; panel < end; ++panel) use(panel, all_sums + (panel - begin) * M * kPanel);
    };
    const auto width = [&](int64_t panel) { return std::min(kPanel, N - panel * kPanel); };
    const auto at = [&](int64_t panel) { return packed + panel * K * kPanel; };
    const auto add = [&](const auto& panel, float* sums) { x.add(0, M, 0, K, panel, sums, !bias, state); };
    if (bias) for_panels([&](int64_t panel, float* sums) { start_sums(bias + panel * kPanel, width(panel), M, sums); });
    const bool beside = end == begin + together && together * M <= kMostBeside;
    if (!beside) for_panels([&](int64_t panel, float* sums) { add(at(panel), sums); });
    else if constexpr (together == 2) add(TwoPanels<T>{at(begin), at(begin + 1)}, all_sums);
    else add(FourPanels<T>{at(begin), at(begin + 1), at(begin + 2), at(begin + 3)}, all_sums);
    for_panels([&](int64_t panel, float* sums) {
      if (part.places) write_to_places(part, sums, width(panel), out + panel * kPanel, N);
      else state.write(Outputs<T>{sums, M, width(panel), out + panel * kPanel, N});
    });
  });
}

template <typename Product, typename T>
void multiply_few_of_each(const T* tokens, const T* weights, std::span<const FewRows> parts, const T* bias, T* out, int64_t K,
                          int64_t N) {
  if constexpr (std::is_same_v<T, at::Half>)
    if (std::all_of(parts.begin(), parts.end(), [](const FewRows& part) { return part.count == 1; }))
      return multiply_few<Product, 4>(tokens, weights, parts, bias, out, K, N);
  multiply_few<Product, 2>(tokens, weights, parts, bias, out, K, N);
}

// The same for any number of tokens, and for a weight that has depth(), the number of columns in a piece of a panel; and
// with_piece(), which calls use(add) with a function that adds the piece's products to the sums of a tile's tokens.
template <typename Product, typename T, typename Weight>
void multiply(const T* tokens, const Weight& weight, const T* bias, T* out, int64_t M, int64_t K, int64_t N) {
  if (!M) return;
  const int64_t panels = (N + kPanel - 1) / kPanel, tiles = Product::num_tiles(M);
  if constexpr (std::is_same_v<Weight, Panels<T>>)
    if (2 * M <= Product::kMostRows && panels >= 4 * num_threads()) {
      const FewRows all{0, 0, M, nullptr};
      return multiply_few_of_each<Product>(tokens, weight.packed, {&all, 1}, bias, out, K, N);
    }
  const Product x(tokens, M, K);
  // A task is one panel, or for many tokens some panels; with many threads, for a part of the tokens.
  const int64_t together = tiles >= kManyTiles ? kPanelsTogether : 1, groups = (panels + together - 1) / together;
  const int64_t parts = std::clamp<int64_t>((4 * num_threads() + groups - 1) / groups, 1, tiles);
  // Number of tiles that take a piece of each of these panels in turn: as many as stay in a cache with short pieces (with long
  // pieces fewer are no faster). One if panels are read whole: its outputs for all panels are then written together, since
  // rows are in different pages, and a TLB miss costs more than the write.
  const int64_t most_tiles = weight.template reads_in_place<Product>(K) ? 1 : kRowsInCache / Product::kMostRows;
  share_tasks(groups * parts, [&](int64_t task) {
    struct alignas(64) Row { float sums[kPanel]; };
    thread_local std::vector<Row> all_sums;
    const int64_t begin = task / parts * together, end = std::min(begin + together, panels);
    const int64_t tile_begin = task % parts * tiles / parts, tile_end = (task % parts + 1) * tiles / parts;
    const int64_t block_tiles = std::min(tile_end - tile_begin, most_tiles);
    const int64_t most = weight.depth(Product::depth(tile_end - tile_begin));
    const int64_t block_rows = block_tiles * Product::kMostRows;
    all_sums.resize(K > most ? together * block_rows : 2 * Product::kMostRows);
    typename Product::State state;
    int64_t turn = 0;  // sums of successive tiles lie in two places: the last tile's may still wait to be written
    for (int64_t block = tile_begin, last; block < tile_end; block = last) {
      last = std::min(block + block_tiles, tile_end);
      const int64_t from = Product::first_row(block, M);
      for (int64_t k = 0; k < K; k += most) {
        const int64_t depth = std::min(most, K - k);
        for (int64_t panel = begin; panel < end; ++panel) {
          const int64_t first = panel * kPanel, width = std::min(kPanel, N - first);
          const int64_t next_panel = panel + 1 < end ? panel + 1 : begin;
          const int64_t next_k = next_panel > begin ? k : k + depth < K ? k + depth : 0;
          const bool goes_on = next_panel > begin || next_k > 0 || last < tile_end;
          weight.with_piece(x, panel, k, depth, last - block, [&](const auto& add) {
            for (int64_t tile = block; tile < last; ++tile) {
              const int64_t row = Product::first_row(tile, M), rows = Product::first_row(tile + 1, M) - row;
              float* sum = all_sums[K > most ? (panel - begin) * block_rows + row - from : turn].sums;
              if (k == 0 && bias) start_sums(bias + first, width, rows, sum);
              const Outputs<T> outputs{sum, rows, width, out + row * N + first, N};
              const bool is_last = k + depth == K;
              if (is_last && together > 1) state.prepare(outputs);
              add(row, rows, sum, k == 0 && !bias, state);
              if constexpr (std::is_same_v<Weight, Panels<T>> && !Product::kReadsInPlace)
                if (together > 1 && goes_on) weight.fetch_piece(next_panel, next_k, most, tile - block, last - block);
              if (!is_last) continue;
              state.write(outputs);
              turn = Product::kMostRows - turn;
            }
          });
        }
      }
      if (K > most) state.finish();  // the next tokens' sums take their place
    }
  });
}

// Calls use(Kernel<Product>()) with the requested matmul kernel, if the processor has it for T.
template <typename Product>
struct Kernel { using type = Product; };
template <typename T, typename Use>
void with_product(int64_t arithmetic, const Use& use) {
  if constexpr (std::is_same_v<T, at::BFloat16>) {
#if defined(__AMX_BF16__)
    if (arithmetic == kTiles && may_use_tiles()) return use(Kernel<GemmAmx>());
#endif
#if defined(__AVX512BF16__)
    if (arithmetic == kPairs) return use(Kernel<GemmBf16Dot>());
#endif
  }
  use(Kernel<GemmFp32<T>>());
}

template <typename T, typename Weight>
void multiply_in(int64_t arithmetic, const T* tokens, const Weight& weight, const T* bias, T* out, int64_t M, int64_t K,
                 int64_t N) {
  with_product<T>(arithmetic, [&](auto kernel) {
    multiply<typename decltype(kernel)::type>(tokens, weight, bias, out, M, K, N);
  });
}

// Calls call(T()) with the dtype's number.
template <typename Call>
void with_type(at::ScalarType type, const Call& call) {
  if (type == at::kFloat) call(float{});
  else if (type == at::kBFloat16) call(at::BFloat16{});
  else call(at::Half{});
}
