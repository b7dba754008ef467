// The greedy choice: of each row the index of the largest number, the first of equal ones; -1 where it is not finite, as in
// a row with NaN.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

#include "lanes.h"
#include "tasks.h"

namespace {

// Looks at four registers of numbers at a time; only where one is larger than all before, at each of them.
template <typename T>
int64_t argmax(const T* row, int64_t size) {
  constexpr int64_t kWide = 4 * kLanes;
  float largest = -std::numeric_limits<float>::infinity();
  int64_t best = 0, i = 0;
  // NaN is larger than any number: a model gone wrong is not to look right.
  const auto look = [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end && !std::isnan(largest); ++j) {
      const float value = static_cast<float>(row[j]);
      if (value > largest || std::isnan(value)) largest = value, best = j;
    }
  };
  for (; i + kWide <= size && !std::isnan(largest); i += kWide) {
    const Lanes bound = Lanes{} + largest;
    auto is_higher = !(widen(row + i) <= bound);
    for (int64_t j = kLanes; j < kWide; j += kLanes) is_higher |= !(widen(row + i + j) <= bound);
    int32_t any = 0;
    for (int lane = 0; lane < kLanes; ++lane) any |= is_higher[lane];
    if (any) look(i, i + kWide);
  }
  look(i, size);
  return std::isfinite(largest) ? best : -1;
}

at::Tensor argmax_of_rows(const at::Tensor& rows) {
  at::Tensor indices = at::empty({rows.size(0)}, rows.options().dtype(at::kLong));
  const auto call = [&](auto zero) {
    using T = decltype(zero);
    const T* numbers = rows.const_data_ptr<T>();
    share_tasks(rows.size(0), [&](int64_t row) {
      indices.mutable_data_ptr<int64_t>()[row] = argmax(numbers + row * rows.stride(0), rows.size(1));
    });
  };
  TORCH_CHECK(rows.dim() == 2 && rows.size(1) > 0 && rows.stride(1) == 1, "rows must be contiguous");
  if (rows.scalar_type() == at::kFloat) call(float{});
  else if (rows.scalar_type() == at::kBFloat16) call(at::BFloat16{});
  else call(at::Half{});
  return indices;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(specdec, library) { library.def("argmax(Tensor rows) -> Tensor"); }
TORCH_LIBRARY_IMPL(specdec, CPU, library) { library.impl("argmax", argmax_of_rows); }
