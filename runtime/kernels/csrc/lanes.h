// Shared parts of the kernels: vectors of floats, conversion of 16-bit numbers, and run-time dispatch to a template's
// number of rows.

#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Rows of a tile that is two registers wide: its sums, two registers of a weight and a factor fit the vector registers.
#if defined(__AVX512F__)
constexpr int64_t kLanes = 16, kTileRows = 12;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8, kTileRows = 6;
#elif defined(__aarch64__)
constexpr int64_t kLanes = 4, kTileRows = 12;
#else
constexpr int64_t kLanes = 4, kTileRows = 6;
#endif

// The processor has 16 vector registers, all of which a tile of 6 rows needs.
constexpr bool kFewRegisters = kTileRows == 6;

// Matmul kernels (`runtime.checkpoint.config.ARITHMETICS`): float32, or instructions for pairs of bfloat16 or for tiles (AMX) if the
// processor has them. They differ in the last bits.
enum Arithmetic : int64_t { kFloat32, kPairs, kTiles };

typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

template <typename V, typename T>
inline V load(const T* p) { V v; std::memcpy(&v, p, sizeof v); return v; }
inline Lanes load(const float* p) { return load<Lanes>(p); }
inline void store(float* p, Lanes v) { std::memcpy(p, &v, sizeof v); }

inline Lanes widen(const float* p) { return load(p); }
// bfloat16 is the upper half of a float.
inline Lanes widen(const at::BFloat16* p) { return (Lanes)(__builtin_convertvector(load<Halves>(p), Words) << 16); }
inline Lanes widen(const at::Half* p) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_cvtph_ps(load<__m256i>(p));
#elif defined(__AVX2__) && defined(__F16C__)
  return (Lanes)_mm256_cvtph_ps(load<__m128i>(p));
#elif defined(__aarch64__)
  return (Lanes)vcvt_f32_f16(load<float16x4_t>(p));
#else
  // The exponent is moved and its bias changed, twice for infinity and NaN. A denormal number is made normal, and what that
  // adds is subtracted again. No denormal float is computed on the way, which the processor may take for 0.
  const Words half = __builtin_convertvector(load<Halves>(p), Words), bits = (half & 0x7fffu) << 13;
  const Words exponent = bits & 0x0f800000u, moved = bits + 0x38000000u;
  const Words subnormal = (Words)((Lanes)(bits + 0x38800000u) - 0x1p-14f);
  const Words wide = exponent == 0u ? subnormal : exponent == 0x0f800000u ? moved + 0x38000000u : moved;
  return (Lanes)(wide | (half & 0x8000u) << 16);
#endif
}

inline void narrow(Lanes v, float* to) { store(to, v); }
inline void narrow(Lanes v, at::BFloat16* to) {
#if defined(__AVX512BF16__)
  const auto narrowed = _mm512_cvtneps_pbh((__m512)v);
#else
  const Words bits = (Words)v, rounded = bits + 0x7fffu + (bits >> 16 & 1u);  // to the nearest, of two to the even one
  const auto narrowed = __builtin_convertvector((v == v ? rounded : bits | 0x400000u) >> 16, Halves);
#endif
  std::memcpy(to, &narrowed, sizeof narrowed);
}
inline void narrow(Lanes v, at::Half* to) {
#if defined(__AVX512F__)
  const auto narrowed = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__) && defined(__F16C__)
  const auto narrowed = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__)
  const auto narrowed = vcvt_f16_f32((float32x4_t)v);
#else
  at::Half narrowed[kLanes];
  for (int i = 0; i < kLanes; ++i) narrowed[i] = static_cast<at::Half>(v[i]);
#endif
  std::memcpy(to, &narrowed, sizeof narrowed);
}

inline Lanes widen(const int8_t* p) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(p)));
#elif defined(__AVX2__)
  return (Lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(load<int64_t>(p))));
#else
  const Words moved = __builtin_convertvector(load<Bytes>(p), Words) ^ 0x80u;  // 0 to 255, exact beside 2 to the power of 23
  return (Lanes)(moved | 0x4b000000u) - 8388736.0f;
#endif
}
// A denormal number is made normal, as for float16 above. No code is taken for NaN.
inline Lanes widen(const c10::Float8_e4m3fn* p) {
#if defined(__AVX512F__)
  const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load<__m128i>(p)), 7);  // a float16, 256 times too small
  return (Lanes)_mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16(static_cast<int16_t>(0xbfff)))) * 256.0f;
#elif defined(__AVX2__) && defined(__F16C__)
  const __m128i words = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_cvtsi64_si128(load<int64_t>(p))), 7);
  return (Lanes)_mm256_cvtph_ps(_mm_and_si128(words, _mm_set1_epi16(static_cast<int16_t>(0xbfff)))) * 256.0f;
#else
  const Words code = __builtin_convertvector(load<Bytes>(p), Words), bits = (code & 0x7fu) << 20;
  const Words subnormal = (Words)((Lanes)(bits + 0x3c800000u) - 0x1p-6f);
  return (Lanes)((bits < 0x00800000u ? subnormal : bits + 0x3c000000u) | (code & 0x80u) << 24);
#endif
}

// Rounds to nearest, ties to even. The number must be in the format's range.
inline void narrow(Lanes v, int8_t* to) {
  const Bytes narrowed = __builtin_convertvector((Words)(v + 12582912.0f) & 0xffu, Bytes);
  std::memcpy(to, &narrowed, sizeof narrowed);
}
inline void narrow(Lanes v, c10::Float8_e4m3fn* to) {
  const Words bits = (Words)v, size = bits & 0x7fffffffu;
  const Words normal = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - (120u << 3);
  const Words subnormal = (Words)((Lanes)size + 16384.0f) - 0x46800000u;  // in units of 2 to the power of -9
  const Words code = ((Lanes)size < 0x1p-6f ? subnormal : normal) | (bits >> 24 & 0x80u);
  const Bytes narrowed = __builtin_convertvector(code, Bytes);
  std::memcpy(to, &narrowed, sizeof narrowed);
}

template <typename T>
inline void widen(const T* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, widen(from + i));
  if constexpr (std::is_same_v<T, c10::Float8_e4m3fn>) {  // the last numbers too are converted without NaN
    T rest[kLanes] = {};
    std::copy(from + i, from + count, rest);
    const Lanes wide = widen(rest);
    for (int64_t k = i; k < count; ++k) to[k] = wide[k - i];
  } else {
    for (; i < count; ++i) to[i] = static_cast<float>(from[i]);
  }
}

// Fetches into the second-level cache: the first level has few slots for requests, which current reads need. Always inlined:
// GNU's compiler believes that a function which only prefetches has no effect, and may drop its calls.
[[gnu::always_inline]] inline void fetch_line(const void* p) { __builtin_prefetch(p, 0, 2); }
// Into the first-level cache.
[[gnu::always_inline]] inline void prefetch_l1(const void* p) { __builtin_prefetch(p, 0, 3); }

// Calls use(std::integral_constant<int, rows>()), for fewest <= rows <= most.
template <int most, int fewest = 1, typename Use>
inline void dispatch_rows(int64_t rows, const Use& use) {
  if (rows == most) use(std::integral_constant<int, most>());
  else if constexpr (most > fewest) dispatch_rows<most - 1, fewest>(rows, use);
}

// Calls use(std::integral_constant<int, r>()) for 0 <= r < count.
template <int count, typename Use>
inline void unrolled(const Use& use) {
  [&]<int... r>(std::integer_sequence<int, r...>) { (use(std::integral_constant<int, r>()), ...); }
  (std::make_integer_sequence<int, count>());
}
