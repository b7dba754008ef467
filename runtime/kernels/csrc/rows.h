// Products of rows of tokens and a packed weight, for kernels that have several weights in one tensor (experts).

#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <span>

#include "lanes.h"

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

// Few of these rows, and which of the weights in one tensor they are multiplied by: an expert's tokens.
struct FewRows {
  int64_t weight_bytes;   // from the first weight to this one
  int64_t token, count;   // the first row of tokens, and how many follow one another
  const int64_t* places;  // each row's place in the output; null: the same as among the tokens
};
constexpr int64_t kFewRowsOfFloats = kTileRows / 2, kFewRowsOfIntegers = 32;

// Products of few rows with each of several weights. Threads share the panels of all weights at once, so that memory is
// read without a pause between two weights. The bits are those of multiply_rows().
void multiply_few_rows(const void* panels, std::span<const FewRows> parts, const Rows& rows, int64_t arithmetic);
void multiply_few_rows(const PackedWeight& weight, std::span<const FewRows> parts, const Rows& rows, int64_t token_bits);
