// A weight in few bits as its kernels read it: panels as in products.h, each of them group by group in one stream. A group
// has, for each 4 columns and output, 4 numbers side by side, without sign; then the outputs' scales, and their offsets
// where there are some. Of 4 bits those of the left register's outputs are the lower halves of bytes.
//
//   weight[n, k] = scales[n, g] x (number[n, k] - half) + offsets[n, g]       of e4m3 there is no half
//
// Groups of a kernel are at most 128 columns, so that tokens can be rounded by them, and padded to a multiple of 4.

#pragma once

#include <ATen/core/Tensor.h>

#include <numeric>
#include <vector>

#include "products.h"

constexpr int64_t kMostColumns = 128;

struct PackedWeight {
  enum Kind { kInt8, kInt4, kE4m3 };
  const uint8_t* data;
  Kind kind;
  int64_t groups, size, padded, bytes;  // of a group: columns, those with padding, bytes
  bool half_scales, has_offsets;

  static Kind kind_of(at::ScalarType type) {
    return type == at::kChar ? kInt8 : type == at::kByte ? kInt4 : kE4m3;
  }

  // (panels, groups, bytes) of the values' dtype; all else follows from the shape.
  PackedWeight(const at::Tensor& packed, int64_t K)
      : data(static_cast<const uint8_t*>(packed.const_data_ptr())), kind(kind_of(packed.scalar_type())),
        groups(packed.size(1)), size(K / groups), padded((size + 3) / 4 * 4), bytes(packed.size(2)) {
    const int64_t beside = bytes / kPanel - value_bytes() / kPanel;
    half_scales = beside % 4 != 0, has_offsets = beside > 4;
  }

  int64_t value_bytes() const { return padded * kPanel / (kind == kInt4 ? 2 : 1); }
  int32_t half() const { return kind == kInt8 ? 128 : kind == kInt4 ? 8 : 0; }
  const uint8_t* group(int64_t panel, int64_t g) const { return data + (panel * groups + g) * bytes; }

  void scales(const uint8_t* group, Lanes (&to)[2]) const {
    const uint8_t* from = group + value_bytes();
    for (int i = 0; i < 2; ++i)
      to[i] = half_scales ? widen(reinterpret_cast<const at::Half*>(from) + i * kLanes)
                          : load(reinterpret_cast<const float*>(from) + i * kLanes);
  }
  void offsets(const uint8_t* group, Lanes (&to)[2]) const {
    const uint8_t* from = group + bytes - kPanel * sizeof(float);
    for (int i = 0; i < 2; ++i) to[i] = has_offsets ? load(reinterpret_cast<const float*>(from) + i * kLanes) : Lanes{};
  }
};

// The numbers of 4 columns, of the left register's outputs and of the right one's.
template <PackedWeight::Kind kind>
inline void load_numbers(const uint8_t* values, int64_t k, Words (&to)[2]) {
  if constexpr (kind == PackedWeight::kInt4) {
    const Words both = load<Words>(values + k * (kPanel / 2));
    to[0] = both & 0x0f0f0f0fu, to[1] = both >> 4 & 0x0f0f0f0fu;
  } else {
    to[0] = load<Words>(values + k * kPanel), to[1] = load<Words>(values + k * kPanel + 4 * kLanes);
  }
}

template <PackedWeight::Kind kind>
constexpr int64_t kPerByte = kind == PackedWeight::kInt4 ? 2 : 1;  // numbers

template <typename Call>
void with_kind(PackedWeight::Kind kind, const Call& call) {
  if (kind == PackedWeight::kInt8) call(std::integral_constant<PackedWeight::Kind, PackedWeight::kInt8>());
  else if (kind == PackedWeight::kInt4) call(std::integral_constant<PackedWeight::Kind, PackedWeight::kInt4>());
  else call(std::integral_constant<PackedWeight::Kind, PackedWeight::kE4m3>());
}

// The weight as the products of floats read it: a piece of a panel is widened when it is needed, and used for all tokens.
struct WidenedWeight {
  const PackedWeight& packed;

  // Whole groups, and whole tiles of 32 columns.
  int64_t depth(int64_t) const {
    const int64_t least = std::lcm(packed.size, int64_t{32});
    return std::max<int64_t>(kMostColumns / least, 1) * least;
  }

  template <typename Product>
  static bool reads_in_place(int64_t) { return false; }

  template <typename Product, typename Use>
  void with_piece(int64_t panel, int64_t k, int64_t depth, int64_t, const Use& use) const {
    thread_local std::vector<float> floats;
    floats.resize(depth * kPanel);
    with_kind(packed.kind, [&](auto kind) { widen_groups<kind()>(panel, k, depth, floats.data()); });
    if constexpr (std::is_same_v<typename Product::Piece, float>) {
      use(static_cast<const float*>(floats.data()));
    } else {
      thread_local std::vector<at::BFloat16> pairs;
      pairs.resize(depth * kPanel);
      for (int64_t k = 0; k < depth; k += 2)
        for (int64_t i = 0; i < kPanel; i += kLanes) make_pairs(&floats[k * kPanel + i], &pairs[k * kPanel + 2 * i]);
      use(static_cast<const at::BFloat16*>(pairs.data()));
    }
  }

 private:
  // Of the numbers of a column and the next.
  static void make_pairs(const float* floats, at::BFloat16* to) {
    at::BFloat16 first[kLanes], second[kLanes];
    narrow(load(floats), first);
    narrow(load(floats + kPanel), second);
    const Words pairs = __builtin_convertvector(load<Halves>(first), Words) |
                        __builtin_convertvector(load<Halves>(second), Words) << 16;
    std::memcpy(to, &pairs, sizeof pairs);
  }

  template <PackedWeight::Kind kind>
  static Lanes number(Words byte) {
    if constexpr (kind == PackedWeight::kE4m3) {  // its exponent and fraction have places in a half's
      const Halves half = __builtin_convertvector((byte & 0x7fu) << 7 | (byte & 0x80u) << 8, Halves);
      return widen(reinterpret_cast<const at::Half*>(&half)) * 256.f;
    } else {
      constexpr int32_t half = kind == PackedWeight::kInt8 ? 128 : 8;
      return __builtin_convertvector((Ints)byte - half, Lanes);
    }
  }

  template <PackedWeight::Kind kind>
  void widen_groups(int64_t panel, int64_t first, int64_t depth, float* to) const {
    for (int64_t g = first / packed.size; g < (first + depth) / packed.size; ++g) {
      const uint8_t* group = packed.group(panel, g);
      Lanes scales[2], offsets[2];
      packed.scales(group, scales);
      packed.offsets(group, offsets);
      fetch_ahead(group, packed.bytes);
      for (int64_t k = 0; k < packed.size; k += 4) {
        Words four[2];
        load_numbers<kind>(group, k, four);
        with_rows<4>(std::min<int64_t>(4, packed.size - k), [&](auto count) {
          for (int j = 0; j < count(); ++j, to += kPanel)
            for (int i = 0; i < 2; ++i)
              store(to + i * kLanes, number<kind>(four[i] >> 8 * j & 0xffu) * scales[i] + offsets[i]);
        });
      }
    }
  }
};
