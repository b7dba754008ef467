// Groups of operations on vectors that are carried out as one (`runtime/compiler/vector_groups.py`), in fewer passes over
// memory. Their bits are those of the operations one by one: every intermediate number is rounded, and no product is fused
// with a sum.

#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "vector_functions.h"

namespace {

enum class Rounding : int64_t { kNone, kBFloat16, kHalf };

template <Rounding rounding>
using Rounded = std::conditional_t<rounding == Rounding::kNone, float,
                                   std::conditional_t<rounding == Rounding::kHalf, at::Half, at::BFloat16>>;

template <Rounding rounding>
inline Lanes rounded(Lanes v) {
  if constexpr (rounding == Rounding::kNone) {
    return v;
  } else {
    Rounded<rounding> narrowed[kLanes];
    narrow(v, narrowed);
    return widen(narrowed);
  }
}

// Keeps the compiler from fusing a product with the sum that it is added to, which would round once instead of twice.
inline Lanes product(Lanes a, Lanes b) {
  Lanes v = a * b;
#if defined(__x86_64__)
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#else
  asm("" : "+x"(v));
#endif
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#else
#error "what holds a vector on this processor?"
#endif
  return v;
}

// Calls use(i, count) for each vector of a row. The count is the constant kLanes, and for the rest of the row a number below.
template <typename Use>
inline void for_lanes(int64_t n, const Use& use) {
  int64_t i = 0;
#pragma GCC unroll 2
  for (; i + kLanes <= n; i += kLanes) use(i, std::integral_constant<int64_t, kLanes>());
  if (i < n) use(i, n - i);
}

// The first `count` numbers, and zeros behind them.
template <typename T>
inline Lanes take(const T* p, int64_t count) {
  if (count == kLanes) return widen(p);
  T part[kLanes] = {};
  std::copy_n(p, count, part);
  return widen(part);
}
inline Lanes first(Lanes v, int64_t count) {
  for (int64_t k = count; k < kLanes; ++k) v[k] = 0.0f;
  return v;
}
template <Rounding rounding, typename T>
inline void give(T* p, Lanes v, int64_t count) {
  if constexpr (std::is_same_v<T, float>) v = rounded<rounding>(v);
  if (count == kLanes) return narrow(v, p);
  T part[kLanes];
  narrow(v, part);
  std::copy_n(part, count, p);
}

// The sum of a register's numbers, in order, as in `sum_row` (token_program.h).
inline float total(Lanes parts) {
  float sum = 0;
  for (int64_t k = 0; k < kLanes; ++k) sum += parts[k];
  return sum;
}

template <Rounding rounding, typename Out, typename In>
inline void add_row(Out* out, const In* a, const In* b, int64_t n) {
  for_lanes(n, [&](int64_t i, auto count) { give<rounding>(out + i, take(a + i, count) + take(b + i, count), count); });
}

// weight * (x / root of the mean square). `w_stride` is 0 if all numbers have the same weight.
template <Rounding rounding, typename Out, typename In>
inline void rms_norm_row(Out* out, const In* x, const float* weight, int64_t w_stride, int64_t n, float epsilon,
                         bool rounds_within) {
  Lanes squares = {};
  for_lanes(n, [&](int64_t i, auto count) {
    const Lanes v = take(x + i, count);
    squares += product(v, v);
  });
  const float factor = 1.0f / std::sqrt(total(squares) / static_cast<float>(n) + epsilon);
  for_lanes(n, [&](int64_t i, auto count) {
    const Lanes v = take(x + i, count) * factor, w = w_stride ? take(weight + i, count) : Lanes{} + *weight;
    give<rounding>(out + i, w * (rounds_within ? rounded<rounding>(v) : v), count);
  });
}

// weight * (x - mean) / root of the mean square of x - mean, + bias if there is one.
template <Rounding rounding, typename Out, typename In>
inline void layer_norm_row(Out* out, const In* x, const float* weight, const float* bias, int64_t n, float epsilon) {
  Lanes sum = {}, squares = {};
  for_lanes(n, [&](int64_t i, auto count) { sum += take(x + i, count); });
  const float mean = total(sum) / static_cast<float>(n);
  for_lanes(n, [&](int64_t i, auto count) {
    const Lanes v = first(take(x + i, count) - mean, count);
    squares += product(v, v);
  });
  const float factor = 1.0f / std::sqrt(total(squares) / static_cast<float>(n) + epsilon);
  for_lanes(n, [&](int64_t i, auto count) {
    const Lanes scaled = product((take(x + i, count) - mean) * factor, take(weight + i, count));
    give<rounding>(out + i, bias ? scaled + take(bias + i, count) : scaled, count);
  });
}

// Rotates pairs: number i of the first half with number i of the second half.
template <Rounding rounding, typename Out, typename In>
inline void rotate_row(Out* out, const In* x, const In* cosine, const In* sine, int64_t n) {
  const int64_t half = n / 2;
  for_lanes(half, [&](int64_t i, auto count) {
    const auto turned = [&](Lanes own, Lanes other, int64_t k) {
      const Lanes along = product(own, take(cosine + k, count)), across = product(other, take(sine + k, count));
      give<rounding>(out + k, rounded<rounding>(along) + rounded<rounding>(across), count);
    };
    const Lanes left = take(x + i, count), right = take(x + half + i, count);
    turned(left, -right, i);
    turned(right, left, half + i);
  });
}

template <Rounding rounding, typename Out, typename In, typename Function>
inline void gate_row(Out* out, const In* x, const In* y, int64_t n, Function function) {
  for_lanes(n, [&](int64_t i, auto count) {
    give<rounding>(out + i, rounded<rounding>(function(take(x + i, count))) * take(y + i, count), count);
  });
}

}  // namespace
