// The pools of keys and values: what attention is given, and how new keys and values are written.
//
// Keys are stored transposed in their block, (num_blocks, Hk, D, block_size), values as they are, (num_blocks, Hk,
// block_size, Dv), so that both products run along contiguous memory. The query heads of one KV head are rows of one
// product.
//
// In 8 bits (int8, or e4m3) each token has two scales for each head, one of its keys and one of its values, (num_blocks,
// Hk, 2, block_size). Scores are multiplied by the first, and weights by the second: the products are of the few bits.

#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "lanes.h"
#include "softmax.h"

namespace {

// Numbers of type T, whose keys and values are stored in type S.
template <typename T, typename S>
struct Inputs {
  const T *query, *key, *value;
  int64_t query_head, query_token, key_head, key_token, value_head, value_token;  // strides
  S *key_pool, *value_pool;
  float* scales;  // null where S is T
  T* output;
  const int64_t *positions, *slots, *block_tables;
  const float* sinks;  // null, or for each query head the logit of a key without a value, which every query sees
  const float* slopes;  // null, or for each query head by which a logit falls with each token between query and key (ALiBi)
  int64_t B, Q, N, H, Hk, D, Dv, block_size;
  int64_t window, attention_chunk;  // 0 for none
  float scale, softcap;             // scores are softcap * tanh(scale * product / softcap); 0: scale * product

  static constexpr bool is_rounded = !std::is_same_v<T, S>;
  const int64_t* table_of(int64_t b) const { return block_tables + b * N; }
  int64_t width() const { return (Dv + kLanes - 1) / kLanes * kLanes; }  // of a row's weighted values
  bool is_capped() const { return softcap > 0; }
  // Weights are powers of 2, whose exponents `exponentiate` has multiplied by `cap_scale` and capped.
  float cap_scale() const { return scale / softcap; }
  float log2_scale() const { return score_unit() * 1.4426950408889634f; }
  float score_unit() const { return is_capped() ? softcap : scale; }
  // The first key that a query at this position sees, which may be negative.
  int64_t first_seen(int64_t position) const {
    if (attention_chunk > 0) return position / attention_chunk * attention_chunk;
    return window > 0 ? position - window + 1 : 0;
  }
  // Scales of a block's keys, or of its values.
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

// Values of keys that a query does not see are multiplied by 0, which removes finite values only. So a token whose key or
// value is not finite is stored with a key of NaN, which makes NaN of the outputs that see it, and a value of 0.
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

// Stores numbers in 8 bits, `stride` apart; returns their scale, by which the largest becomes the format's largest.
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
    // A denormal scale has few bits, and its quotients may exceed the format's range.
    v = v > kLargest ? Lanes{} + kLargest : v < -kLargest ? Lanes{} - kLargest : v;
    S rounded[kLanes];
    narrow(v, rounded);
    for (int64_t k = i; k < std::min(i + kLanes, count); ++k) to[k * stride] = rounded[k - i];
  }
  return scale;
}

// Stores a token's K/V; in 8 bits, numbers that are not finite are marked by a NaN scale of the keys.
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

}  // namespace
