// Products of rows of tokens and a packed weight, for what has several weights in one tensor.

#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

struct PackedWeight;

// (count, inputs) tokens, a bias or none, and the place of (count, outputs) products, all of one dtype.
struct Rows {
  at::ScalarType dtype;
  const void *tokens, *bias;
  void* out;
  int64_t count, inputs, outputs;

  template <typename T>
  const T* tokens_as() const { return static_cast<const T*>(tokens); }
  template <typename T>
  const T* bias_as() const { return static_cast<const T*>(bias); }
  template <typename T>
  T* out_as() const { return static_cast<T*>(out); }
};

void multiply_rows(const void* panels, const Rows& rows, int64_t arithmetic);  // of floats, packed by `pack_linear`
void multiply_rows(const PackedWeight& weight, const Rows& rows, int64_t arithmetic, int64_t token_bits);
