// Functions of vectors of floats, to a few units in the last place.

#pragma once

#include <cmath>
#include <limits>

#include "lanes.h"

namespace {

// Applies a function of numbers to each pair of two registers. Not inlined: it is a call for each number anyway.
template <typename Function>
[[gnu::noinline]] Lanes each(Lanes a, Lanes b, Function function) {
  for (int k = 0; k < kLanes; ++k) a[k] = function(a[k], b[k]);
  return a;
}

inline Lanes sqrt_lanes(Lanes x) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
  return (Lanes)_mm256_sqrt_ps((__m256)x);
#elif defined(__aarch64__)
  return (Lanes)vsqrtq_f32((float32x4_t)x);
#else
  return each(x, x, [](float a, float) { return std::sqrt(a); });
#endif
}

// (e^r - 1 - r) / r^2 for |r| of at most half of log 2, by the coefficients of Cephes' expf (Moshier).
inline Lanes exp_polynomial(Lanes r) {
  Lanes y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  return y * r + 5.0000001201e-1f;
}

// e to the power of x: 2 to the power of a whole number, times a polynomial of what is left (Cody and Waite, 1980).
// Infinite above 88.72; 0 where numbers are less than normal, or become so.
inline Lanes exp_lanes(Lanes x) {
#if defined(__AVX512F__)
  // Both instructions return NaN for NaN, their second operand.
  const __m512 low = _mm512_max_ps(_mm512_set1_ps(-104.0f), (__m512)x);
  const Lanes high = (Lanes)_mm512_min_ps(_mm512_set1_ps(89.0f), low);
#else
  const Lanes high = x > 89.0f ? Lanes{} + 89.0f : x < -88.0f ? Lanes{} - 88.0f : x;
#endif
  const Lanes whole = high * 1.44269504088896341f + 12582912.0f - 12582912.0f;  // to the nearest: see exp2_lanes
  const Lanes r = high - whole * 0.693359375f + whole * 2.12194440e-4f;
  Lanes y = exp_polynomial(r);
  y = y * r * r + r + 1.0f;
#if defined(__AVX512F__)
  return (Lanes)_mm512_scalef_ps((__m512)y, (__m512)whole);
#else
  // The power is multiplied in two halves: the whole would be infinite for results that are not.
  const Ints power = __builtin_convertvector(whole, Ints), half = power >> 1;
  const Lanes scaled = y * (Lanes)((half + 127) << 23) * (Lanes)((power - half + 127) << 23);
  const Lanes infinite = Lanes{} + std::numeric_limits<float>::infinity();
  return x != x ? x : x > 88.7228317f ? infinite : x < -87.3365447f ? Lanes{} : scaled;
#endif
}

// Cephes' tanhf.
inline Lanes tanh_lanes(Lanes x) {
  const Lanes size = (Lanes)((Words)x & 0x7fffffffu), z = x * x;
  Lanes y = z * -5.70498872745e-3f + 2.06390887954e-2f;
  y = y * z - 5.37397155531e-2f;
  y = y * z + 1.33314422036e-1f;
  y = y * z - 3.33332819422e-1f;
  const Lanes small = y * z * x + x;
  const Lanes large = 1.0f - 2.0f / (exp_lanes(size + size) + 1.0f);
  const Lanes with_sign = (Lanes)((Words)large | ((Words)x & 0x80000000u));
  return size < 0.625f ? small : with_sign;
}

// Abramowitz and Stegun, 7.1.26: off by at most 1.5e-7.
inline Lanes erf_lanes(Lanes x) {
  const Lanes size = (Lanes)((Words)x & 0x7fffffffu), t = 1.0f / (1.0f + 0.3275911f * size);
  Lanes y = t * 1.061405429f - 1.453152027f;
  y = y * t + 1.421413741f;
  y = y * t - 0.284496736f;
  y = y * t + 0.254829592f;
  const Lanes result = 1.0f - y * t * exp_lanes(-size * size);
  return (Lanes)((Words)result | ((Words)x & 0x80000000u));
}

inline Lanes silu_lanes(Lanes x) { return x / (1.0f + exp_lanes(-x)); }
// log(1 + e^x) = max(x, 0) + 2 artanh(z), z = y / (2 + y), y = e^-|x|: z is at most 1/3, so that its series ends soon.
inline Lanes softplus_lanes(Lanes x) {
  const Lanes y = exp_lanes((Lanes)((Words)x | 0x80000000u)), z = y / (2.0f + y), square = z * z;
  Lanes series = square * (1.0f / 15.0f) + 1.0f / 13.0f;
  series = series * square + 1.0f / 11.0f;
  series = series * square + 1.0f / 9.0f;
  series = series * square + 1.0f / 7.0f;
  series = series * square + 1.0f / 5.0f;
  series = series * square + 1.0f / 3.0f;
  series = series * square + 1.0f;
  return (x < 0.0f ? Lanes{} : x) + 2.0f * z * series;
}
inline Lanes gelu_lanes(Lanes x) { return 0.5f * x * (1.0f + erf_lanes(x * 0.70710678118654752f)); }
inline Lanes gelu_tanh_lanes(Lanes x) {
  return 0.5f * x * (1.0f + tanh_lanes(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}

// The C library's, for `each`.
inline float power(float x, float y) { return std::pow(x, y); }
inline float sine(float x, float) { return std::sin(x); }
inline float cosine(float x, float) { return std::cos(x); }
inline float floor_of(float x, float) { return std::floor(x); }
inline float logarithm(float x, float) { return std::log(x); }

}  // namespace
