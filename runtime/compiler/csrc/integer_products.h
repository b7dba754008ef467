// Products of weights in few bits and tokens that are rounded to 8 bits: exact within a group of columns, whose sums are
// integers; from group to group floats are added in order. A token's result is the same bits whatever other tokens there
// are, by whichever instructions.
//
//   step = largest size of the group's numbers / 127;  rounded[m, k] = x[m, k] / step, to the nearest, of two to the even
//   out[m, n] = bias[n] + sum over groups of (sum over k of rounded[m, k] x (number[n, k] - half)) x (scale[n] x step[m])
//
// A token whose numbers are not all finite has NaN for its result.

#pragma once

#include <cmath>
#include <limits>

#include "packed_weight.h"

// Of a register's numbers, two by two.
template <int n = kLanes, typename V, typename Use>
inline int32_t reduce(V numbers, const Use& use) {
  if constexpr (n == 1) {
    return numbers[0];
  } else {
    typedef int32_t Half __attribute__((vector_size(2 * n)));
    Half halves[2];
    std::memcpy(halves, &numbers, sizeof halves);
    return reduce<n / 2>(use(halves[0], halves[1]), use);
  }
}

// The tokens' numbers, (groups, M, padded): of one group those of all tokens lie side by side.
template <typename T>
struct RoundedTokens {
  static constexpr int64_t kBeyond = 16;  // tokens that a tile may read behind the last
  int64_t M, padded;
  Lines<int8_t> numbers;
  std::unique_ptr<float[]> steps;      // (groups, M)
  std::unique_ptr<int32_t[]> totals;  // (groups, M): a group's numbers, added

  RoundedTokens(const T* tokens, int64_t M, const PackedWeight& weight)
      : M(M), padded(weight.padded), numbers(make_lines<int8_t>((M * weight.groups + kBeyond) * padded)),
        steps(std::make_unique_for_overwrite<float[]>(M * weight.groups)),
        totals(std::make_unique_for_overwrite<int32_t[]>(M * weight.groups)) {
    share_range(M, 16, [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; ++m)
        for (int64_t g = 0; g < weight.groups; ++g)
          round(tokens + (m * weight.groups + g) * weight.size, weight.size, g * M + m);
    });
  }

 private:
  void round(const T* tokens, int64_t size, int64_t place) {
    constexpr int64_t kMost = kMostColumns + kLanes;
    float x[kMost] = {};
    widen(tokens, x, size);
    Ints largest{};  // as bits sizes are in order, and after them infinity and NaN
    for (int64_t i = 0; i < size; i += kLanes) {
      const Ints bits = load<Ints>(x + i) & 0x7fffffff;
      largest = bits > largest ? bits : largest;
    }
    const int32_t bits = reduce(largest, [](auto a, auto b) { return a > b ? a : b; });
    float size_of_largest;
    std::memcpy(&size_of_largest, &bits, sizeof bits);
    float step = size_of_largest / 127;
    int8_t rounded[kMost] = {};
    Ints total{};
    if (bits >= 0x7f800000) step = std::numeric_limits<float>::quiet_NaN();
    else if (step < std::numeric_limits<float>::min()) step = 0;
    else
      for (int64_t i = 0; i < size; i += kLanes) {
        const float kNoFraction = 0x1.8p23f;  // so large that adding it rounds
        const Ints integers = (Ints)(load(x + i) / step + kNoFraction) - 0x4b400000;
        total += integers;
        typedef int8_t Bytes __attribute__((vector_size(kLanes)));
        const Bytes bytes = __builtin_convertvector(integers, Bytes);
        std::memcpy(rounded + i, &bytes, sizeof bytes);
      }
    std::memcpy(&numbers[place * padded], rounded, padded);
    steps[place] = step, totals[place] = reduce(total, [](auto a, auto b) { return a + b; });
  }
};

// sums + the products of each lane's 4 bytes without sign, at most 15 where they are small, and a token's 4 with sign.
template <bool are_small>
inline Ints add_products(Ints sums, Words bytes, int32_t four) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)bytes, _mm512_set1_epi32(four));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)bytes, _mm256_set1_epi32(four));
#elif defined(__AVX2__) && (defined(__AVX512BW__) || !defined(__AVX512F__))
  // Two products together fit 16 bits where one factor has 4 bits: what has 8 is taken in halves.
  const auto add = [&](Words half, int16_t times) {
#if defined(__AVX512BW__)
    sums += (Ints)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)half, _mm512_set1_epi32(four)), _mm512_set1_epi16(times));
#else
    sums += (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)half, _mm256_set1_epi32(four)), _mm256_set1_epi16(times));
#endif
  };
  if constexpr (are_small) {
    add(bytes, 1);
  } else {
    add(bytes & 0x0f0f0f0fu, 1);
    add(bytes >> 4 & 0x0f0f0f0fu, 16);
  }
  return sums;
#else
  for (int j = 0; j < 4; ++j) {
    const int32_t factor = static_cast<int8_t>(four >> 8 * j);
    sums += (Ints)(bytes >> 8 * j & 0xffu) * factor;
  }
  return sums;
#endif
}

// What a group adds to a token's sums, one way for all instructions.
inline Lanes add_group(Lanes sums, Ints integers, Lanes scale, float step, Lanes offset, int32_t total, bool has_offsets) {
  sums += __builtin_convertvector(integers, Lanes) * (scale * step);
  if (has_offsets) sums += offset * (static_cast<float>(total) * step);
  return sums;
}

// sums (rows x kPanel) += of a group, the tokens from `place` on.
template <typename T, int R, PackedWeight::Kind kind>
void add_rows(const RoundedTokens<T>& x, int64_t place, const PackedWeight& weight, const uint8_t* group, bool fetches,
              float* to) {
  const int8_t* tokens = x.numbers.get() + place * x.padded;
  const int64_t padded = x.padded;
  constexpr int32_t half = kind == PackedWeight::kInt8 ? 128 : 8;
  Ints sums[R][2];
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = Ints{} - half * x.totals[place + r];
  for (int64_t k = 0; k < padded; k += 4) {
    Words numbers[2];
    load_numbers<kind>(group, k, numbers);
    if (fetches) fetch_ahead(group + k * kPanel / kPerByte<kind>, 4 * kPanel / kPerByte<kind>);
    for (int r = 0; r < R; ++r) {
      const int32_t four = load<int32_t>(tokens + r * padded + k);
      for (int i = 0; i < 2; ++i) sums[r][i] = add_products<kind == PackedWeight::kInt4>(sums[r][i], numbers[i], four);
    }
  }
  Lanes scales[2], offsets[2];
  weight.scales(group, scales);
  weight.offsets(group, offsets);
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < 2; ++i) {
      float* sum = to + r * kPanel + i * kLanes;
      store(sum, add_group(load(sum), sums[r][i], scales[i], x.steps[place + r], offsets[i], x.totals[place + r],
                           weight.has_offsets));
    }
}

#if defined(__AMX_INT8__)
// A group's numbers with their sign, which the tiles of many tokens read.
template <PackedWeight::Kind kind>
void with_signs(const uint8_t* group, int64_t padded, int8_t* to) {
  constexpr uint32_t half = kind == PackedWeight::kInt8 ? 0x80808080u : 0x08080808u;
  for (int64_t k = 0; k < padded; k += 4, to += 4 * kPanel) {
    Words numbers[2];
    load_numbers<kind>(group, k, numbers);
    fetch_ahead(group + k * kPanel / kPerByte<kind>, 4 * kPanel / kPerByte<kind>);
    for (int i = 0; i < 2; ++i) {
      // Of 8 bits the uppermost is turned; of 4 bits 8 is taken away, from no byte more than it has.
      const Words with_sign = kind == PackedWeight::kInt8 ? numbers[i] ^ half
                                                          : (((numbers[i] | 0x80808080u) - half) ^ 0x80808080u);
      std::memcpy(to + 4 * kLanes * i, &with_sign, sizeof with_sign);
    }
  }
}

// A tile register holds 16 rows of 64 bytes: sums of 16 tokens and 16 outputs, or up to 64 numbers of each of 16 tokens, or
// 4 columns in each row of 16 outputs. A group's numbers are in two or four of them while all tokens are multiplied; see
// InTiles for tiles of floats.

// Steps of a group's columns; 0 where they do not fit tiles.
inline int64_t tile_steps(int64_t padded) {
  const int64_t steps = (padded + 63) / 64;
  return padded % (4 * steps) ? 0 : steps;
}

inline void set_shapes(int64_t width) {
  TileShapes shapes;
  for (int i = 0; i < 2; ++i) shapes.set(i, kTileHeight, 64), shapes.set(2 + i, kTileHeight, width);
  for (int i = 4; i < 8; ++i) shapes.set(i, width / 4, 64);
  shapes.use();
}

inline void load_group(const int8_t* numbers, int64_t steps, int64_t width) {
  asm volatile("" : : : "memory");
  _tile_loadd(4, numbers, 4 * kPanel);
  _tile_loadd(5, numbers + 64, 4 * kPanel);
  if (steps == 1) return;
  _tile_loadd(6, numbers + width * kPanel, 4 * kPanel);
  _tile_loadd(7, numbers + width * kPanel + 64, 4 * kPanel);
}

inline void multiply_tile(const int8_t* tokens, int64_t steps, int64_t width, int32_t* to) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_loadd(2, tokens, steps * width);
  _tile_dpbssd(0, 2, 4);
  _tile_dpbssd(1, 2, 5);
  if (steps == 2) {
    _tile_loadd(3, tokens + width, steps * width);
    _tile_dpbssd(0, 3, 6);
    _tile_dpbssd(1, 3, 7);
  }
  _tile_stored(0, to, 4 * kPanel);
  _tile_stored(1, to + kLanes, 4 * kPanel);
  asm volatile("" : : : "memory");  // nor what they write
}
#endif

template <typename T, PackedWeight::Kind kind>
struct IntegerProducts {
  const RoundedTokens<T> x;
  const PackedWeight& weight;

  IntegerProducts(const T* tokens, int64_t M, const PackedWeight& weight) : x(tokens, M, weight), weight(weight) {}

  // sums (to - from x kPanel) += of all groups of a panel.
  void add(int64_t panel, int64_t from, int64_t to, float* sums) const {
#if defined(__AMX_INT8__)
    if (to - from >= kTileRows && tile_steps(weight.padded) && may_use_tiles()) return add_by_tiles(panel, from, to, sums);
#endif
    const int64_t rows = to - from, tiles = EvenTiles::num_tiles(rows);
    for (int64_t g = 0; g < weight.groups; ++g)
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t row = EvenTiles::first_row(tile, rows);
        with_rows<kTileRows>(EvenTiles::first_row(tile + 1, rows) - row, [&](auto count) {
          add_rows<T, count(), kind>(x, g * x.M + from + row, weight, weight.group(panel, g), tile == 0,
                                     sums + row * kPanel);
        });
      }
  }

#if defined(__AMX_INT8__)
  // Beyond the last token a tile has numbers of others, and what comes of them is dropped. What a tile has stored is read
  // after the next is multiplied: at once it would have to be waited for.
  void add_by_tiles(int64_t panel, int64_t from, int64_t to, float* sums) const {
    alignas(64) int8_t numbers[kMostColumns * kPanel];
    alignas(64) int32_t integers[2][kTileHeight * kPanel];
    const int64_t steps = tile_steps(weight.padded), width = weight.padded / steps;
    const auto finish = [&](int64_t g, int64_t row, const int32_t* integers) {
      Lanes scales[2], offsets[2];
      weight.scales(weight.group(panel, g), scales);
      weight.offsets(weight.group(panel, g), offsets);
      const int64_t place = g * x.M + row;
      float* sum = sums + (row - from) * kPanel;
      for (int64_t r = 0; r < std::min(kTileHeight, to - row); ++r)
        for (int i = 0; i < 2; ++i, sum += kLanes)
          store(sum, add_group(load(sum), load<Ints>(integers + r * kPanel + i * kLanes), scales[i], x.steps[place + r],
                               offsets[i], x.totals[place + r], weight.has_offsets));
    };
    set_shapes(width);
    int64_t group_before = -1, row_before = 0, turn = 0;
    for (int64_t g = 0; g < weight.groups; ++g) {
      with_signs<kind>(weight.group(panel, g), weight.padded, numbers);
      load_group(numbers, steps, width);
      for (int64_t row = from; row < to; row += kTileHeight, turn ^= 1) {
        multiply_tile(x.numbers.get() + (g * x.M + row) * weight.padded, steps, width, integers[turn]);
        if (group_before >= 0) finish(group_before, row_before, integers[turn ^ 1]);
        group_before = g, row_before = row;
      }
    }
    finish(group_before, row_before, integers[turn ^ 1]);
    _tile_release();
  }
#endif
};

// out (M, N) = x (M, K) weight^T + bias, of tokens rounded to 8 bits
template <PackedWeight::Kind kind, typename T>
void multiply_integers(const T* tokens, const PackedWeight& weight, const T* bias, T* out, int64_t M, int64_t N) {
  constexpr int64_t kMostRows = 128;  // whose sums stay in the first-level cache
  const IntegerProducts<T, kind> products(tokens, M, weight);
  const int64_t panels = (N + kPanel - 1) / kPanel;
  const int64_t parts = std::max((M + kMostRows - 1) / kMostRows,
                                 std::clamp<int64_t>(4 * num_threads() / panels, 1, EvenTiles::num_tiles(M)));
  share_tasks(panels * parts, [&](int64_t task) {
    const int64_t panel = task / parts, part = task % parts, first = panel * kPanel, width = std::min(kPanel, N - first);
    const int64_t from = part * M / parts, to = (part + 1) * M / parts;
    float initial[kPanel] = {};
    if (bias) widen(bias + first, initial, width);
    thread_local std::vector<float> sums;
    sums.resize(kMostRows * kPanel);
    for (int64_t r = 0; r < to - from; ++r) std::copy_n(initial, kPanel, sums.data() + r * kPanel);
    products.add(panel, from, to, sums.data());
    Outputs<T>{sums.data(), to - from, width, out + from * N + first, N}.write(to - from);
  });
}
