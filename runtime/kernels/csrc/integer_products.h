// Products of weights in few bits and tokens that are rounded to one or two digits of 8 bits: exact within a group of
// columns, whose sums are integers; the groups' floats are added in order. A token's bits depend neither on the other tokens
// nor on the instructions.
//
//   step = largest size of the group's numbers / most;  rounded[m, k] = x[m, k] / step, to the nearest, ties to even
//   out[m, n] = bias[n] + sum over groups of (sum over k of rounded[m, k] x (number[n, k] - half)) x (scale[n] x step[m])
//
// A token whose numbers are not all finite has NaN for its result.

#pragma once

#include <cmath>
#include <limits>

#include "packed_weight.h"

// Reduces a register's numbers pairwise.
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

// These processors have no instruction that adds 4 products of bytes, only instructions that add 2.
#if (defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)) || (defined(__AVX512BW__) && !defined(__AVX512VNNI__))
#define SPECDEC_SUMS_BY_TWO
constexpr bool kSumsByTwo = true;
#else
constexpr bool kSumsByTwo = false;
#endif

// How a token's numbers are stored, and multiplied, for weights of a kind.
// kBytes: a byte for each digit. A number of two digits is 256 x the first + the second.
// kPairs: 16 bits for each number. Of each 4 columns the second and the third are exchanged, because the bytes of a word at even
// places, and those at odd places, are two pairs of 16-bit numbers. 128 columns x 255 x 32,639 are less than 2^31.
enum class TokenForm { kBytes, kPairs };
template <int digits, PackedWeight::Kind kind>
constexpr TokenForm kTokenForm =
    kSumsByTwo && (digits == 2 || kind != PackedWeight::kInt4) ? TokenForm::kPairs : TokenForm::kBytes;

// The tokens' numbers, (groups, M, width): the numbers of all tokens in a group lie side by side.
struct RoundedTokens {
  static constexpr int64_t kBeyond = 16;  // rows of digits that a tile may read behind the last token's
  int64_t M, padded;
  int digits;
  TokenForm form;
  int64_t width;  // bytes of a token's numbers in a group
  AlignedBuffer<int8_t> numbers;
  int32_t half;
  std::unique_ptr<float[]> steps;     // (groups, M)
  std::unique_ptr<int32_t[]> starts;  // (groups, M): -half x the sum of a group's numbers, with which its products' sum starts
  std::unique_ptr<float[]> totals;    // (groups, M): step x the sum of a group's numbers

  RoundedTokens(const Rows& rows, int digits, TokenForm form, const PackedWeight& weight)
      : M(rows.count), padded(weight.padded), digits(digits), form(form),
        width(padded * (form == TokenForm::kPairs ? 2 : digits)),
        numbers(make_aligned<int8_t>(M * weight.groups * width + kBeyond * padded)),
        half(weight.half()), steps(std::make_unique_for_overwrite<float[]>(M * weight.groups)),
        starts(std::make_unique_for_overwrite<int32_t[]>(M * weight.groups)),
        totals(std::make_unique_for_overwrite<float[]>(M * weight.groups)) {
    share_range(M, 16, [&](int64_t begin, int64_t end) {
      with_type(rows.dtype, [&](auto zero) {
        const auto* tokens = rows.tokens_as<decltype(zero)>();
        for (int64_t m = begin; m < end; ++m)
          for (int64_t g = 0; g < weight.groups; ++g)
            round(tokens + (m * weight.groups + g) * weight.size, weight.size, g * M + m);
      });
    });
  }

  const int8_t* at(int64_t place) const { return numbers.get() + place * width; }

 private:
  template <typename T>
  void round(const T* tokens, int64_t size, int64_t place) {
    constexpr int64_t kMost = kMostColumns + kLanes;
    float x[kMost] = {};
    widen(tokens, x, size);
    Ints largest{};  // compared as bits: sizes are in order, then come infinity and NaN
    for (int64_t i = 0; i < size; i += kLanes) {
      const Ints bits = load<Ints>(x + i) & 0x7fffffff;
      largest = bits > largest ? bits : largest;
    }
    const int32_t bits = reduce(largest, [](auto a, auto b) { return a > b ? a : b; });
    float size_of_largest;
    std::memcpy(&size_of_largest, &bits, sizeof bits);
    float step = size_of_largest / (digits == 1 ? 127 : 127 * 256 + 127);
    int8_t rounded[2][kMost] = {};
    int16_t pairs[kMost] = {};
    Ints total{};
    if (bits >= 0x7f800000) step = std::numeric_limits<float>::quiet_NaN();
    else if (step < std::numeric_limits<float>::min()) step = 0;
    else
      for (int64_t i = 0; i < size; i += kLanes) {
        const float kNoFraction = 0x1.8p23f;  // so large that adding it rounds
        const Ints integers = (Ints)(load(x + i) / step + kNoFraction) - 0x4b400000;
        total += integers;
        if (form == TokenForm::kPairs) {
          store_pairs(integers, pairs + i);
          continue;
        }
        const Ints first = digits == 1 ? integers : (integers + 128) >> 8;
        store_digits(first, rounded[0] + i);
        store_digits(integers - first * 256, rounded[1] + i);
      }
    if (form == TokenForm::kPairs) std::memcpy(&numbers[place * width], pairs, width);
    else
      for (int d = 0; d < digits; ++d) std::memcpy(&numbers[place * width + d * padded], rounded[d], padded);
    const int32_t added = reduce(total, [](auto a, auto b) { return a + b; });
    steps[place] = step, starts[place] = -half * added, totals[place] = static_cast<float>(added) * step;
  }

  static void store_pairs(Ints integers, int16_t* to) {
    typedef int16_t Numbers __attribute__((vector_size(2 * kLanes)));
    const Numbers numbers = __builtin_convertvector(integers, Numbers);
    constexpr int kFrom[4] = {0, 2, 1, 3};
    for (int i = 0; i < kLanes; ++i) to[i] = numbers[i / 4 * 4 + kFrom[i % 4]];
  }

  static void store_digits(Ints integers, int8_t* to) {
    typedef int8_t Bytes __attribute__((vector_size(kLanes)));
    const Bytes bytes = __builtin_convertvector(integers, Bytes);
    std::memcpy(to, &bytes, sizeof bytes);
  }
};

#if defined(SPECDEC_SUMS_BY_TWO)
typedef int16_t Shorts __attribute__((vector_size(4 * kLanes)));

// A barrier for the compiler: GNU's would multiply ahead, and then store sums for want of registers.
template <typename V>
inline V keep_in_register(V sums) {
  asm volatile("" : "+v"(sums));
  return sums;
}

// sums + the products of each lane's 2 numbers of 16 bits and a token's 2.
inline Ints add_pairs(Ints sums, Shorts numbers, int32_t two) {
#if defined(__AVX512BW__)
  sums += (Ints)_mm512_madd_epi16((__m512i)numbers, _mm512_set1_epi32(two));
#else
  sums += (Ints)_mm256_madd_epi16((__m256i)numbers, _mm256_set1_epi32(two));
#endif
  return keep_in_register(sums);
}

// sums + the products of each lane's 4 bytes without sign, at most 15, and a token's 4 with sign, two by two.
inline Shorts add_nibbles(Shorts sums, Words bytes, int32_t four) {
#if defined(__AVX512BW__)
  sums += (Shorts)_mm512_maddubs_epi16((__m512i)bytes, _mm512_set1_epi32(four));
#else
  sums += (Shorts)_mm256_maddubs_epi16((__m256i)bytes, _mm256_set1_epi32(four));
#endif
  return keep_in_register(sums);
}
#else
// sums + the products of each lane's 4 bytes without sign and a token's 4 with sign.
inline Ints add_products(Ints sums, Words bytes, int32_t four) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)bytes, _mm512_set1_epi32(four));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)bytes, _mm256_set1_epi32(four));
#else
  for (int j = 0; j < 4; ++j) {
    const int32_t factor = static_cast<int8_t>(four >> 8 * j);
    sums += (Ints)(bytes >> 8 * j & 0xffu) * factor;
  }
  return sums;
#endif
}
#endif

#if defined(__AMX_INT8__)
// Writes a group's numbers with their sign, as the tiles read them for many tokens.
template <PackedWeight::Kind kind>
void with_signs(const uint8_t* group, int64_t padded, int8_t* to) {
  constexpr uint32_t half = kind == PackedWeight::kInt4 ? 0x08080808u : 0x80808080u;
  for (int64_t k = 0; k < padded; k += 4, to += 4 * kPanel) {
    Words numbers[2];
    load_numbers<kind>(group, k, numbers);
    prefetch_l2(group + k * kPanel / kPerByte<kind>, 4 * kPanel / kPerByte<kind>);
    for (int i = 0; i < 2; ++i) {
      // 8-bit values: flip the top bit; 4-bit values: subtract 8 without borrows between bytes.
      const Words with_sign = kind == PackedWeight::kInt4 ? (((numbers[i] | 0x80808080u) - half) ^ 0x80808080u)
                                                          : numbers[i] ^ half;
      std::memcpy(to + 4 * kLanes * i, &with_sign, sizeof with_sign);
    }
  }
}

// A tile register holds 16 rows of 64 bytes: sums of 16 tokens and 16 outputs, or up to 64 numbers of each of 16 tokens, or
// 4 columns in each row of 16 outputs. A group's numbers are in two or four of them while all tokens are multiplied; see
// GemmAmx for tiles of floats.

// Number of steps, of at most 64 columns each, in which tiles take a group; 0 if the columns do not fit tiles.
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

// Loads a group's numbers of two steps, or the numbers of two groups of one step each.
inline void load_numbers(const int8_t* first, const int8_t* second) {
  asm volatile("" : : : "memory");
  _tile_loadd(4, first, 4 * kPanel);
  _tile_loadd(5, first + 64, 4 * kPanel);
  _tile_loadd(6, second, 4 * kPanel);
  _tile_loadd(7, second + 64, 4 * kPanel);
}

inline void store_tile(int32_t* to) {
  _tile_stored(0, to, 4 * kPanel);
  _tile_stored(1, to + kLanes, 4 * kPanel);
  asm volatile("" : : : "memory");  // the operands do not tell the compiler what is written
}

inline void multiply_steps(const int8_t* tokens, int64_t width, int32_t* to) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_loadd(2, tokens, 2 * width);
  _tile_dpbssd(0, 2, 4);
  _tile_dpbssd(1, 2, 5);
  _tile_loadd(3, tokens + width, 2 * width);
  _tile_dpbssd(0, 3, 6);
  _tile_dpbssd(1, 3, 7);
  store_tile(to);
}

inline void multiply_groups(const int8_t* first, const int8_t* second, int64_t width, int32_t (*to)[kTileHeight * kPanel]) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_loadd(2, first, width);
  _tile_dpbssd(0, 2, 4);
  _tile_dpbssd(1, 2, 5);
  store_tile(to[0]);
  _tile_zero(0);
  _tile_zero(1);
  _tile_loadd(3, second, width);
  _tile_dpbssd(0, 3, 6);
  _tile_dpbssd(1, 3, 7);
  store_tile(to[1]);
}
#endif

// Products of tokens with this number of digits.
template <int digits, PackedWeight::Kind kind>
struct IntegerProducts {
  static constexpr TokenForm kForm = kTokenForm<digits, kind>;
  static constexpr int kSums = kForm == TokenForm::kPairs ? 1 : digits;  // of a token, for an output
  const RoundedTokens& x;
  const PackedWeight& weight;

  // sums (to - from x kPanel) += of all groups of a panel.
  void add(int64_t panel, int64_t from, int64_t to, float* sums) const {
#if defined(__AMX_INT8__)
    if ((to - from) * digits >= kTileRows && tile_steps(weight.padded) && may_use_tiles())
      return tile_steps(weight.padded) == 1 ? add_by_tiles<2>(panel, from, to, sums) : add_by_tiles<1>(panel, from, to, sums);
#endif
    const int64_t rows = to - from, tiles = EvenTiles::num_tiles(rows * kSums);
    for (int64_t g = 0; g < weight.groups; ++g)
      for (int64_t tile = 0; tile < tiles; ++tile) add_tile(panel, g, from, tile, rows, sums);
  }

  // The same for few rows and two panels, read side by side: a thread reads two streams faster than one.
  void add_two(int64_t panel, int64_t from, int64_t to, float* sums, float* others) const {
    const int64_t rows = to - from;
    if (EvenTiles::num_tiles(rows * kSums) > 1) return add(panel, from, to, sums), add(panel + 1, from, to, others);
    for (int64_t g = 0; g < weight.groups; ++g) {
      add_tile(panel, g, from, 0, rows, sums);
      add_tile(panel + 1, g, from, 0, rows, others);
    }
  }

 private:
  // Adds a group's products for one of the tiles into which the rows are divided.
  void add_tile(int64_t panel, int64_t g, int64_t from, int64_t tile, int64_t rows, float* sums) const {
    const int64_t tiles = EvenTiles::num_tiles(rows * kSums), row = tile * rows / tiles;
    dispatch_rows<kTileRows / kSums>((tile + 1) * rows / tiles - row, [&](auto count) {
      add_rows<count()>(panel, g, from + row, tile == 0, sums + row * kPanel);
    });
  }

  // Adds the groups from g on to the sums of tokens from `row` on, in the same order for all instructions: each group's
  // products, then its offsets. integers(j, r, i) is a token's integer product in a group.
  template <int count, typename Integers>
  void add_groups(int64_t panel, int64_t g, int64_t row, int64_t rows, const Integers& integers, float* sums) const {
    if (weight.has_offsets) add_groups<count, true>(panel, g, row, rows, integers, sums);
    else add_groups<count, false>(panel, g, row, rows, integers, sums);
  }
  template <int count, bool has_offsets, typename Integers>
  void add_groups(int64_t panel, int64_t g, int64_t row, int64_t rows, const Integers& integers, float* sums) const {
    Lanes scales[count][2], offsets[count][2];
    const float* steps[count];  // the compiler must not read them again after each number that is stored
    const float* totals[count];
    for (int j = 0; j < count; ++j) {
      const int64_t place = (g + j) * x.M + row;
      steps[j] = x.steps.get() + place, totals[j] = x.totals.get() + place;
      weight.scales(weight.group(panel, g + j), scales[j]);
      weight.offsets(weight.group(panel, g + j), offsets[j]);
    }
    for (int64_t r = 0; r < rows; ++r)
      for (int i = 0; i < 2; ++i) {
        float* place = sums + r * kPanel + i * kLanes;
        Lanes sum = load(place);
        for (int j = 0; j < count; ++j) {
          sum += __builtin_convertvector(integers(j, r, i), Lanes) * (scales[j][i] * steps[j][r]);
          if (has_offsets) sum += offsets[j][i] * totals[j][r];
        }
        store(place, sum);
      }
  }

  template <int R>
  void add_rows(int64_t panel, int64_t g, int64_t row, bool fetches, float* to) const {
    const uint8_t* group = weight.group(panel, g);
    const int64_t padded = x.padded, place = g * x.M + row;
    const int8_t* tokens = x.at(place);
    constexpr int last = kSums - 1;
    Ints sums[R][kSums][2];  // in registers: places are constants, and nothing else refers to it
    unrolled<R>([&](auto r) {
      unrolled<2>([&](auto i) {
        if constexpr (kSums == 2) sums[r][0][i] = Ints{};
        sums[r][last][i] = Ints{} + x.starts[place + r];
      });
    });
    const auto load_columns = [&](int64_t k, Words (&to)[2]) {
      load_numbers<kind>(group, k, to);
      if (fetches) prefetch_l2(group + k * kPanel / kPerByte<kind>, 4 * kPanel / kPerByte<kind>);
    };
#if defined(SPECDEC_SUMS_BY_TWO)
    if constexpr (kForm == TokenForm::kPairs) {
      typedef uint16_t Unsigned __attribute__((vector_size(4 * kLanes)));
      for (int64_t k = 0; k < padded; k += 4) {
        Words numbers[2];
        load_columns(k, numbers);
        unrolled<2>([&](auto odd) {
          Shorts pairs[2];
          for (int i = 0; i < 2; ++i) pairs[i] = (Shorts)(odd ? (Words)((Unsigned)numbers[i] >> 8) : numbers[i] & 0x00ff00ffu);
          unrolled<R>([&](auto r) {
            const int32_t two = load<int32_t>(tokens + r * x.width + 2 * k + 4 * odd);
            unrolled<2>([&](auto i) { sums[r][0][i] = add_pairs(sums[r][0][i], pairs[i], two); });
          });
        });
      }
    } else {
      constexpr int64_t kColumnsOf16Bits = 32;  // whose products' sums fit 16 bits
      static_assert(15 * 128 * 2 * kColumnsOf16Bits / 4 <= 32767);
      for (int64_t from = 0; from < padded; from += kColumnsOf16Bits) {
        Shorts pairs[R][2] = {};
        for (int64_t k = from; k < std::min(from + kColumnsOf16Bits, padded); k += 4) {
          Words numbers[2];
          load_columns(k, numbers);
          unrolled<R>([&](auto r) {
            const int32_t four = load<int32_t>(tokens + r * padded + k);
            unrolled<2>([&](auto i) { pairs[r][i] = add_nibbles(pairs[r][i], numbers[i], four); });
          });
        }
        unrolled<R>([&](auto r) {
          unrolled<2>([&](auto i) { sums[r][0][i] = add_pairs(sums[r][0][i], pairs[r][i], 0x00010001); });
        });
      }
    }
#else
    // For few rows each sum has two parts: a product would wait for the product before it.
    constexpr int parts = R * digits <= 2 ? 2 : 1;
    Ints others[R][digits][2] = {};
    const auto add = [&](auto& sums, int64_t k) {
      Words numbers[2];
      load_columns(k, numbers);
      unrolled<R>([&](auto r) {
        unrolled<digits>([&](auto d) {
          const int32_t four = load<int32_t>(tokens + (r * digits + d) * padded + k);
          unrolled<2>([&](auto i) { sums[r][d][i] = add_products(sums[r][d][i], numbers[i], four); });
        });
      });
    };
    int64_t k = 0;
    if constexpr (parts == 2)
      for (; k + 4 < padded; k += 8) add(sums, k), add(others, k + 4);
    for (; k < padded; k += 4) add(sums, k);
    if constexpr (parts == 2)
      unrolled<R>([&](auto r) {
        unrolled<digits>([&](auto d) { unrolled<2>([&](auto i) { sums[r][d][i] += others[r][d][i]; }); });
      });
#endif
    if (fetches)  // the scales too: waiting for a line takes as long as reading a group
      for (int64_t byte = weight.value_bytes(); byte < weight.bytes; byte += 64) fetch_line(group + byte + kAhead);
    Lanes scales[2], offsets[2];
    weight.scales(group, scales);
    weight.offsets(group, offsets);
    const float *steps = x.steps.get() + place, *totals = x.totals.get() + place;
    unrolled<R>([&](auto r) {
      unrolled<2>([&](auto i) {
        const Ints joined = kSums == 1 ? sums[r][0][i] : sums[r][0][i] * 256 + sums[r][last][i];
        float* place = to + r * kPanel + i * kLanes;
        store(place, load(place) + __builtin_convertvector(joined, Lanes) * (scales[i] * steps[r]));
      });
    });
    // One branch for all rows: a branch between a product and its sum would keep them from being fused, unlike elsewhere.
    if (weight.has_offsets)
      unrolled<R>([&](auto r) {
        unrolled<2>([&](auto i) {
          float* place = to + r * kPanel + i * kLanes;
          store(place, load(place) + offsets[i] * totals[r]);
        });
      });
  }

#if defined(__AMX_INT8__)
  // Behind the last token a tile has other numbers, whose products are dropped. Stored sums are read after the next products:
  // reading them at once would have to wait. Groups of one step are taken in pairs.
  template <int together>
  void add_by_tiles(int64_t panel, int64_t from, int64_t to, float* sums) const {
    constexpr int64_t kTokens = kTileHeight / digits;
    alignas(64) int8_t numbers[2 * kMostColumns * kPanel];
    alignas(64) int32_t integers[2][together][kTileHeight * kPanel];
    const int64_t steps = tile_steps(weight.padded), width = weight.padded / steps;
    int8_t* second = numbers + width * kPanel;
    const auto finish = [&](int64_t g, int64_t row, const auto& integers) {
      const auto joined = [&](int j, int64_t r, int i) {
        const int32_t* of_token = integers[j] + r * digits * kPanel + i * kLanes;
        return digits == 1 ? load<Ints>(of_token) : load<Ints>(of_token) * 256 + load<Ints>(of_token + kPanel);
      };
      const int64_t rows = std::min(kTokens, to - row);
      float* of_row = sums + (row - from) * kPanel;
      if (g + together <= weight.groups) add_groups<together>(panel, g, row, rows, joined, of_row);
      else add_groups<1>(panel, g, row, rows, joined, of_row);
    };
    set_shapes(width);
    int64_t group_before = -1, row_before = 0, turn = 0;
    for (int64_t g = 0; g < weight.groups; g += together) {
      const int64_t last = std::min(g + together, weight.groups) - 1;
      with_signs<kind>(weight.group(panel, g), weight.padded, numbers);
      if (last > g) with_signs<kind>(weight.group(panel, last), weight.padded, second);
      load_numbers(numbers, second);
      for (int64_t row = from; row < to; row += kTokens, turn ^= 1) {
        const int8_t* tokens = x.at(g * x.M + row);
        if constexpr (together == 1) multiply_steps(tokens, width, integers[turn][0]);
        else multiply_groups(tokens, x.at(last * x.M + row), width, integers[turn]);
        if (group_before >= 0) finish(group_before, row_before, integers[turn ^ 1]);
        group_before = g, row_before = row;
      }
    }
    finish(group_before, row_before, integers[turn ^ 1]);
    _tile_release();
  }
#endif
};

// Sets a panel's sums of rows to the outputs' biases, or to 0.
[[gnu::noinline]] inline void start_sums(const Rows& rows, int64_t panel, int64_t count, float* sums) {
  with_type(rows.dtype, [&](auto zero) {
    const auto* bias = rows.bias_as<decltype(zero)>();
    const int64_t first = panel * kPanel;
    start_sums(bias ? bias + first : nullptr, std::min(kPanel, rows.outputs - first), count, sums);
  });
}

// Writes the sums of a part's rows for a panel.
[[gnu::noinline]] inline void write_few(const Rows& rows, const FewRows& part, int64_t panel, const float* sums) {
  with_type(rows.dtype, [&](auto zero) {
    const int64_t first = panel * kPanel;
    write_to_places(part, sums, std::min(kPanel, rows.outputs - first), rows.out_as<decltype(zero)>() + first, rows.outputs);
  });
}

// Sums of the rows from..to for the panels begin..end, (panels, most, kPanel).
struct SumsOfPanels {
  int64_t begin, end, from, to, most;
  const float* sums;
};

// Writes them row by row: rows lie in different pages, and a TLB miss costs more than the write.
[[gnu::noinline]] inline void write_panels(const Rows& rows, const SumsOfPanels& of) {
  with_type(rows.dtype, [&](auto zero) {
    using T = decltype(zero);
    Outputs<T> outputs[kPanelsTogether];
    for (int64_t panel = of.begin; panel < of.end; ++panel) {
      const int64_t first = panel * kPanel, width = std::min(kPanel, rows.outputs - first), i = panel - of.begin;
      outputs[i] = {of.sums + i * of.most * kPanel, of.to - of.from, width,
                    rows.out_as<T>() + of.from * rows.outputs + first, rows.outputs};
    }
    for (int64_t r = of.from; r < of.to; ++r)
      for (int64_t i = 0; i < of.end - of.begin; ++i) outputs[i] = outputs[i].write(1);
  });
}

// out = x weight^T + bias, with tokens rounded to so many digits, few for each weight; `form` is the first weight. A task is
// two panels.
template <int digits, PackedWeight::Kind kind>
void multiply_few_integers(const Rows& rows, const PackedWeight& form, std::span<const FewRows> parts) {
  const RoundedTokens rounded(rows, digits, kTokenForm<digits, kind>, form);
  const int64_t panels = (rows.outputs + kPanel - 1) / kPanel, tasks = (panels + 1) / 2;
  share_tasks(static_cast<int64_t>(parts.size()) * tasks, [&](int64_t task) {
    const FewRows& part = parts[task / tasks];
    const int64_t panel = 2 * (task % tasks), end = part.token + part.count, num = std::min<int64_t>(2, panels - panel);
    const PackedWeight weight = form.behind(part.weight_bytes);
    const IntegerProducts<digits, kind> products{rounded, weight};
    alignas(64) float sums[2][kFewRowsOfIntegers * kPanel];
    for (int64_t i = 0; i < num; ++i) start_sums(rows, panel + i, part.count, sums[i]);
    if (num == 2) products.add_two(panel, part.token, end, sums[0], sums[1]);
    else products.add(panel, part.token, end, sums[0]);
    for (int64_t i = 0; i < num; ++i) write_few(rows, part, panel + i, sums[i]);
  });
}

// The same for one weight and any number of tokens.
template <int digits, PackedWeight::Kind kind>
void multiply_integers(const Rows& rows, const PackedWeight& weight) {
  const int64_t M = rows.count;
  if (!M) return;
  constexpr int64_t kMostRows = 256;  // whose sums of a panel stay in the first-level cache
  const int64_t panels = (rows.outputs + kPanel - 1) / kPanel;
  if (M * IntegerProducts<digits, kind>::kSums <= kTileRows && panels >= 4 * num_threads()) {
    const FewRows all{0, 0, M, nullptr};
    return multiply_few_integers<digits, kind>(rows, weight, {&all, 1});
  }
  const RoundedTokens rounded(rows, digits, kTokenForm<digits, kind>, weight);
  const IntegerProducts<digits, kind> products{rounded, weight};
  const int64_t together = M >= kMostRows ? kPanelsTogether : 1;
  const int64_t groups = (panels + together - 1) / together;
  const int64_t parts = std::max((M + kMostRows - 1) / kMostRows,
                                 std::clamp<int64_t>(4 * num_threads() / groups, 1, EvenTiles::num_tiles(M)));
  share_tasks(groups * parts, [&](int64_t task) {
    const int64_t begin = task / parts * together, end = std::min(begin + together, panels), part = task % parts;
    const int64_t from = part * M / parts, to = (part + 1) * M / parts;
    thread_local std::vector<float> all_sums;
    all_sums.resize(together * kMostRows * kPanel);
    for (int64_t panel = begin; panel < end; ++panel) {
      float* sums = all_sums.data() + (panel - begin) * kMostRows * kPanel;
      start_sums(rows, panel, to - from, sums);
      products.add(panel, from, to, sums);
    }
    write_panels(rows, {begin, end, from, to, kMostRows, all_sums.data()});
  });
}
