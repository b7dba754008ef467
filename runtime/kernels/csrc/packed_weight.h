// A weight in few bits as its kernels read it: panels as in products.h, each group by group in one stream. A group has, for
// each 4 columns and output, 4 numbers side by side, without sign; then the outputs' scales, and offsets if there are any.
// With 4 bits, the lower halves of bytes are the numbers of the left register's outputs. Numbers may be codes: then the code
// book, 16 numbers plus 128, comes first.
//
//   weight[n, k] = scales[n, g] x (number[n, k] - half) + offsets[n, g]       half is 0 for e4m3
//
// Groups of a kernel are at most 128 columns, so that tokens can be rounded by them, and padded to a multiple of 4.

#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "products.h"

constexpr int64_t kMostColumns = 128;

struct PackedWeight {
  enum Kind { kInt8, kInt4, kE4m3, kCodes };
  static constexpr int64_t kBookSize = 16;
  const uint8_t* data;
  Kind kind;
  int64_t book_bytes;
  int64_t groups, size, padded, bytes;  // a group's columns, without and with padding, and its bytes
  bool half_scales, has_offsets;

  static Kind kind_of(at::ScalarType type) {
    return type == at::kChar ? kInt8 : type == at::kByte ? kInt4 : type == at::kShort ? kCodes : kE4m3;
  }

  // `packed` is (panels, groups, bytes) in the values' dtype; everything else follows from its shape.
  PackedWeight(const at::Tensor& packed, int64_t K, int64_t first_byte = 0)
      : data(static_cast<const uint8_t*>(packed.const_data_ptr()) + first_byte), kind(kind_of(packed.scalar_type())),
        book_bytes(kind == kCodes ? kBookSize : 0), groups(packed.size(1)), size(K / groups),
        padded((size + 3) / 4 * 4), bytes(packed.size(2) * packed.element_size()) {
    const int64_t beside = (bytes - book_bytes - value_bytes()) / kPanel;
    half_scales = beside % 4 != 0, has_offsets = beside > 4;
  }

  PackedWeight behind(int64_t num_bytes) const {
    PackedWeight other = *this;
    other.data += num_bytes;
    return other;
  }

  // True if tokens are rounded to so many bits before they are multiplied; 0 bits: they are not rounded.
  bool takes_integers(int64_t token_bits) const { return token_bits != 0 && kind != kE4m3; }

  int64_t value_bytes() const { return padded * kPanel / (kind == kInt4 || kind == kCodes ? 2 : 1); }
  int32_t half() const { return kind == kE4m3 ? 0 : kind == kInt4 ? 8 : 128; }
  const uint8_t* group(int64_t panel, int64_t g) const { return data + (panel * groups + g) * bytes + book_bytes; }

  // True if two groups' sums may be added before they are multiplied by scales.
  bool have_same_scales(int64_t panel, int64_t g, int64_t other) const {
    const int64_t values = value_bytes();
    return !has_offsets &&
           !std::memcmp(group(panel, g) + values, group(panel, other) + values, bytes - book_bytes - values);
  }

  void scales(const uint8_t* group, Lanes (&to)[2]) const {
    const uint8_t* from = group + value_bytes();
    for (int i = 0; i < 2; ++i)
      to[i] = half_scales ? widen(reinterpret_cast<const at::Half*>(from) + i * kLanes)
                          : load(reinterpret_cast<const float*>(from) + i * kLanes);
  }
  void offsets(const uint8_t* group, Lanes (&to)[2]) const {
    const uint8_t* from = group + bytes - book_bytes - kPanel * sizeof(float);
    for (int i = 0; i < 2; ++i) to[i] = has_offsets ? load(reinterpret_cast<const float*>(from) + i * kLanes) : Lanes{};
  }
};

// A code book's numbers, for bytes from 0 to 15.
inline Words look_up(const uint8_t* book, Words codes) {
#if defined(__AVX512BW__)
  return (Words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load<__m128i>(book)), (__m512i)codes);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (Words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(book)), (__m256i)codes);
#elif defined(__aarch64__)
  return (Words)vqtbl1q_u8(vld1q_u8(book), (uint8x16_t)codes);
#else
  uint8_t bytes[sizeof(Words)];
  std::memcpy(bytes, &codes, sizeof bytes);
  for (uint8_t& byte : bytes) byte = book[byte];
  return load<Words>(bytes);
#endif
}

// Loads the numbers of 4 columns for the left register's outputs and for the right register's.
template <PackedWeight::Kind kind>
inline void load_numbers(const uint8_t* values, int64_t k, Words (&to)[2]) {
  if constexpr (kind == PackedWeight::kInt4 || kind == PackedWeight::kCodes) {
    const Words both = load<Words>(values + k * (kPanel / 2));
    to[0] = both & 0x0f0f0f0fu, to[1] = both >> 4 & 0x0f0f0f0fu;
    if constexpr (kind == PackedWeight::kCodes)
      for (int i = 0; i < 2; ++i) to[i] = look_up(values - PackedWeight::kBookSize, to[i]);
  } else {
    to[0] = load<Words>(values + k * kPanel), to[1] = load<Words>(values + k * kPanel + 4 * kLanes);
  }
}

template <PackedWeight::Kind kind>
constexpr int64_t kPerByte = kind == PackedWeight::kInt4 || kind == PackedWeight::kCodes ? 2 : 1;  // numbers

template <typename Call>
void with_kind(PackedWeight::Kind kind, const Call& call) {
  if (kind == PackedWeight::kInt8) call(std::integral_constant<PackedWeight::Kind, PackedWeight::kInt8>());
  else if (kind == PackedWeight::kInt4) call(std::integral_constant<PackedWeight::Kind, PackedWeight::kInt4>());
  else if (kind == PackedWeight::kCodes) call(std::integral_constant<PackedWeight::Kind, PackedWeight::kCodes>());
  else call(std::integral_constant<PackedWeight::Kind, PackedWeight::kE4m3>());
}

// A stored number without scale, as a float; bfloat16 holds it exactly.
template <PackedWeight::Kind kind>
inline Lanes number(Words byte) {
  if constexpr (kind == PackedWeight::kE4m3) {
    // Subnormal numbers and 0 are first decoded as normal, then their implicit leading 1 is subtracted: see lanes.h.
    const Lanes size = (Lanes)(((byte & 0x7fu) << 20) + (120u << 23)), less = size * 2.0f - 0x1p-6f;
    return (Lanes)((Words)(less < size ? less : size) | (byte & 0x80u) << 24);
  } else {
    constexpr int32_t half = kind == PackedWeight::kInt4 ? 8 : 128;
    return __builtin_convertvector((Ints)byte - half, Lanes);
  }
}

// A pair of bfloat16 from the numbers of 4 columns: the first and the third, or (`first` 1) the second and the fourth.
template <PackedWeight::Kind kind>
inline Words pairs_of(Words four, int first) {
#if defined(__AVX512BW__)
  if constexpr (kind == PackedWeight::kE4m3) {  // the 8 denormal sizes are looked up
    const __m512i code = first ? _mm512_srli_epi16((__m512i)four, 8) : (__m512i)four;
    const __m512i least = _mm512_broadcast_i32x4(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    const __mmask32 is_least = _mm512_testn_epi16_mask(code, _mm512_set1_epi16(0x78));
    const __m512i fraction = _mm512_slli_epi16((__m512i)((Words)code & 0x007f007fu), 4);
    const __m512i normal = _mm512_add_epi16(fraction, _mm512_set1_epi16(120 << 7));
    const Words size = (Words)_mm512_mask_permutexvar_epi16(normal, is_least, code, least);
    return size | ((Words)code & 0x00800080u) << 8;
  }
#endif
  const Words one = four >> 8 * first & 0xffu, other = four >> (8 * first + 16) & 0xffu;
  return (Words)number<kind>(one) >> 16 | (Words)number<kind>(other);
}

// Tokens in the order of such pairs, (M, groups, columns): in each 4 columns the second and the third are exchanged. A
// group's columns are filled up with zeros to a multiple of `multiple`.
template <typename T>
struct GroupedTokens {
  int64_t columns;
  std::vector<T> numbers;
  std::vector<float> totals;  // (M, groups): sums of the groups' numbers, if the weight has offsets

  GroupedTokens(const T* tokens, int64_t M, int64_t multiple, const PackedWeight& weight)
      : columns((weight.size + multiple - 1) / multiple * multiple), numbers(M * weight.groups * columns),
        totals(weight.has_offsets ? M * weight.groups : 0) {
    share_range(M * weight.groups, 256, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T* from = tokens + i * weight.size;
        T* to = numbers.data() + i * columns;
        const int64_t whole = weight.size / 4 * 4;
        for (int64_t k = 0; k < whole; k += 4)
          to[k] = from[k], to[k + 1] = from[k + 2], to[k + 2] = from[k + 1], to[k + 3] = from[k + 3];
        for (int64_t k = whole; k < weight.size; ++k) to[k % 4 == 1 ? k + 1 : k % 4 == 2 ? k - 1 : k] = from[k];
        for (int64_t k = 0; k < weight.size && weight.has_offsets; ++k) totals[i] += static_cast<float>(from[k]);
      }
    });
  }
};

// A panel's numbers from a column of a group on, as bfloat16.
template <PackedWeight::Kind kind>
struct NarrowPanel {
  const PackedWeight& packed;
  const uint8_t* group;
  int64_t columns, first;  // of a group, as the tokens have them

  NarrowPanel from_column(int64_t k) const {
    const int64_t place = first + k;
    return {packed, group + place / columns * packed.bytes, columns, place % columns};
  }

  template <typename Use>
  void for_pairs(int64_t depth, const Use& use) const {
    const uint8_t* from = group;
    for (int64_t k = 0, i = first; k < depth; from += packed.bytes, i = 0)
      for (; i < columns && k < depth; i += 4, k += 4) {
        Words four[2] = {};
        if (i < packed.padded) load_numbers<kind>(from, i, four);
        prefetch_l2(from + i * kPanel / kPerByte<kind>, 4 * kPanel / kPerByte<kind>);
        use(k, pairs_of<kind>(four[0], 0), pairs_of<kind>(four[1], 0));
        use(k + 2, pairs_of<kind>(four[0], 1), pairs_of<kind>(four[1], 1));
      }
  }
};

// The weight as the products of floats read it: its numbers without scales, by which the sums are multiplied. Groups with the
// same scales, as an output with one scale has, are one sum.
struct WidenedWeight {
  static constexpr int64_t kTogether = 2048;  // columns that fit a second-level cache
  const PackedWeight& packed;
  int64_t columns;
  const float* totals;

  // Depth of a piece, the same for any number of tokens, because sums end with a piece.
  int64_t depth(int64_t) const { return std::max<int64_t>(kTogether / columns, 1) * columns; }

  template <typename Product>
  static bool reads_in_place(int64_t) { return false; }

  template <typename Product, typename Use>
  void with_piece(const Product& x, int64_t panel, int64_t k, int64_t depth, int64_t num_tiles, const Use& use) const {
    const int64_t first = k / columns, last = (k + depth) / columns;
    const auto use_piece = [&](const auto& piece) {
      use([&](int64_t row, int64_t rows, float* sums, bool start, auto& state) {
        alignas(64) float together[Product::kMostRows * kPanel];
        if (start) std::fill_n(sums, rows * kPanel, 0.0f);
        for (int64_t g = first, end; g < last; g = end) {
          for (end = g + 1; end < last && packed.have_same_scales(panel, g, end); ++end) {}
          const auto numbers = from_column(piece, (g - first) * columns);
          x.add(row, rows, g * columns, (end - g) * columns, numbers, together, true, state);
          add_scaled(panel, g, row, rows, together, sums);
        }
      });
    };
    // One tile only: e4m3 is widened during the product, overlapped with the next read.
    if (num_tiles == 1 && packed.kind == PackedWeight::kE4m3) return use_piece(narrow<PackedWeight::kE4m3>(panel, first));
    struct alignas(64) Column { at::BFloat16 numbers[kPanel]; };
    thread_local std::vector<Column> widened;
    widened.resize(depth);
    widen_piece(panel, first, depth, widened[0].numbers);
    use_piece(static_cast<const at::BFloat16*>(widened[0].numbers));
  }

 private:
  [[gnu::noinline]] void widen_piece(int64_t panel, int64_t g, int64_t depth, at::BFloat16* to) const {
    with_kind(packed.kind, [&](auto kind) { store_pairs(narrow<kind()>(panel, g), depth, to); });
  }

  template <PackedWeight::Kind kind>
  NarrowPanel<kind> narrow(int64_t panel, int64_t g) const { return {packed, packed.group(panel, g), columns, 0}; }

  [[gnu::noinline]] void add_scaled(int64_t panel, int64_t g, int64_t row, int64_t rows, const float* from, float* sums) const {
    Lanes scales[2], offsets[2];
    packed.scales(packed.group(panel, g), scales);
    packed.offsets(packed.group(panel, g), offsets);
    for (int64_t r = 0; r < rows; ++r)
      for (int i = 0; i < 2; ++i, from += kLanes, sums += kLanes) {
        Lanes sum = load(sums);
        sum += load(from) * scales[i];
        if (packed.has_offsets) sum += offsets[i] * totals[(row + r) * packed.groups + g];
        store(sums, sum);
      }
  }
};
