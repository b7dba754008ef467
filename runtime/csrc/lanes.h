// What the kernels share: 16 floats in a register, and a template's number of rows chosen at run time.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

constexpr int64_t kLanes = 16;
typedef float Lanes __attribute__((vector_size(4 * kLanes)));

template <typename V, typename T>
inline V load(const T* p) { V v; std::memcpy(&v, p, sizeof v); return v; }
inline Lanes load(const float* p) { return load<Lanes>(p); }
inline void store(float* p, Lanes v) { std::memcpy(p, &v, sizeof v); }

// Calls use(std::integral_constant<int, rows>()), for 1 <= rows <= most.
template <int most, typename Use>
inline void with_rows(int64_t rows, const Use& use) {
  if (rows == most) use(std::integral_constant<int, most>());
  else if constexpr (most > 1) with_rows<most - 1>(rows, use);
}
