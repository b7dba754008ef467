// Softmax of scores that come a chunk of keys at a time (Milakov and Gimelshein, arXiv 1805.02867).

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "lanes.h"
#include "vector_functions.h"

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

// 2 to the power of numbers at most 0, to 2 units in the last place; 0 below -126, and NaN for NaN.
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
// Running softmax of a task's rows, head by head: their largest score so far, the sum of exponentials in kLanes parts, and
// the weighted sum of values.
struct Partial {
  float *maximum, *sums, *weighted;  // (rows), (rows, kLanes), (rows, width)
};

// The three parts for `num_rows` rows, one behind the other in num_rows * (1 + kLanes + width) numbers.
inline Partial partial_at(float* numbers, int64_t num_rows) {
  return {numbers, numbers + num_rows, numbers + num_rows * (1 + kLanes)};
}

inline void copy_row(const Partial& from, int64_t row, const Partial& to, int64_t to_row, int64_t width) {
  to.maximum[to_row] = from.maximum[row];
  std::copy_n(from.sums + row * kLanes, kLanes, to.sums + to_row * kLanes);
  std::copy_n(from.weighted + row * width, width, to.weighted + to_row * width);
}

// Scales of a chunk's keys and values in 8 bits; 0 beyond its last key.
struct Scales {
  const float *of_keys, *of_values;
};

// Scores of `count` keys become 2 to the power of (score - maximum) * scale, 0 outside begin..end; the partial sums are
// brought to the same maximum. In 8 bits scores come without their keys' scales, and weights leave with their values' scales.
// Capped scores first become tanh(score * cap_scale). Then each key's bias is added, if there are biases.
template <bool is_rounded, bool is_capped, typename E>
[[gnu::noinline]] void exponentiate(float* scores, E* weights, const Scales& scales, const float* biases, int64_t begin,
                  int64_t end, int64_t count, float scale, float cap_scale, const Partial& out, int64_t r, int64_t width) {
  if constexpr (is_rounded)
    for (int64_t j = 0; j < count; j += kLanes) store(scores + j, load(scores + j) * load(scales.of_keys + j));
  if constexpr (is_capped)
    for (int64_t j = 0; j < count; j += kLanes) store(scores + j, tanh_lanes(load(scores + j) * cap_scale));
  if (biases)
    for (int64_t j = 0; j < count; j += kLanes) store(scores + j, load(scores + j) + load(biases + j));
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

// Adds a part of a task, over later keys, to the total over the keys before.
[[gnu::noinline]] void add_part(const Partial& total, const Partial& part, int64_t num_rows, int64_t width, float scale) {
  for (int64_t row = 0; row < num_rows; ++row) {
    // A part without a visible key. A part with NaN scores has no maximum either, but NaN sums.
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

}  // namespace
