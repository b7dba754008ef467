// Integers and scales for a weight, as runtime/checkpoint/quant/quantize.py chooses them, with the same bits: a product of
// an integer and a float16 scale is exact in float32, and sums of so few floats are in doubles.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "products.h"

namespace quantizing {
namespace {

constexpr int64_t kHalf = kLanes / 2;
typedef float HalfLanes __attribute__((vector_size(4 * kHalf)));
typedef double Doubles __attribute__((vector_size(8 * kHalf)));  // longer vectors are converted singly

// Sums of numbers in doubles, a sum for each lane.
struct Sums {
  Doubles low{}, high{};

  void add(Lanes v) {
    HalfLanes halves[2];
    std::memcpy(halves, &v, sizeof v);
    low += __builtin_convertvector(halves[0], Doubles), high += __builtin_convertvector(halves[1], Doubles);
  }
  double total() const {
    double sum = 0;
    for (int64_t i = 0; i < kHalf; ++i) sum += low[i];
    for (int64_t i = 0; i < kHalf; ++i) sum += high[i];
    return sum;
  }
};

struct Rounding {
  float lowest, highest;
  std::vector<float> factors;  // the largest number times each of them is a scale to try
  bool first_wins;             // only the first is tried, unless the scale is denormal in float16
  int64_t refinements;

  // The integers nearest to x / scale, within the range; zeros for a scale of 0.
  Lanes nearest(Lanes x, float scale) const {
    Lanes q = x / (scale == 0 ? 1.0f : scale);
    q = q < lowest ? Lanes{} + lowest : q > highest ? Lanes{} + highest : q;
    return (q + 12582912.0f) - 12582912.0f;  // floats near 1.5 x 2^23 are integers: rounds, ties to even
  }
};

// The sum of the squared errors of a group rounded with this scale.
double error_of(const float* x, int64_t count, float scale, const Rounding& rounding) {
  Sums errors;
  for (int64_t k = 0; k < count; k += kLanes) {
    const Lanes v = load(x + k), distance = rounding.nearest(v, scale) * scale - v;
    errors.add(distance * distance);
  }
  return errors.total();
}

// The scale of least squared errors for the integers that `scale` gives.
float fitted(const float* x, int64_t count, float scale, const Rounding& rounding) {
  Sums products, squares;
  for (int64_t k = 0; k < count; k += kLanes) {
    const Lanes v = load(x + k), q = rounding.nearest(v, scale);
    products.add(v * q), squares.add(q * q);
  }
  return static_cast<at::Half>(static_cast<float>(products.total() / std::max(squares.total(), 1.0)));
}

float largest(const float* x, int64_t count) {
  Lanes most{};
  for (int64_t k = 0; k < count; k += kLanes) {
    const Lanes size = (Lanes)((Words)load(x + k) & 0x7fffffffu);
    most = size > most ? size : most;
  }
  float size = 0;
  for (int i = 0; i < kLanes; ++i) size = std::max(size, most[i]);
  for (int64_t k = 0; k < count; ++k)
    if (std::fabs(x[k]) == size) return x[k];
  return 0;
}

// The scale with the least squared error among those that are tried. `x` is filled up with zeros to whole vectors.
float best_scale(const float* x, int64_t count, const Rounding& rounding) {
  const float extreme = largest(x, count), step = std::fabs(extreme) / rounding.highest;
  const bool one = rounding.first_wins && (step >= 0x1p-14f || step == 0);
  float best = 0;
  double least = std::numeric_limits<double>::infinity();
  const auto try_scale = [&](float scale) {
    const double error = error_of(x, count, scale, rounding);
    const bool is_better = error < least;
    if (is_better) best = scale, least = error;
    return is_better;
  };
  for (size_t i = 0; i < (one ? 1 : rounding.factors.size()); ++i)
    try_scale(static_cast<at::Half>(extreme * rounding.factors[i]));
  for (int64_t i = 0; i < rounding.refinements && try_scale(fitted(x, count, best, rounding)); ++i) continue;
  return best;
}

// Returns int8 (outputs, inputs), or uint8 (outputs, inputs / 2) with two numbers of 4 bits plus 8, the first in the lower
// half; and scales, float16 (outputs, groups).
std::tuple<at::Tensor, at::Tensor> quantize_integers(const at::Tensor& weight, bool is_int4, int64_t group_size,
                                                     at::ArrayRef<double> clips, bool first_wins, int64_t refinements) {
  const int64_t N = weight.size(0), K = weight.size(1), groups = K / group_size;
  const int64_t padded = (group_size + kLanes - 1) / kLanes * kLanes;
  Rounding rounding{is_int4 ? -8.0f : -127.0f, is_int4 ? 7.0f : 127.0f, {}, first_wins, refinements};
  for (const double clip : clips) rounding.factors.push_back(static_cast<float>(clip / rounding.lowest));
  const at::Tensor rows = weight.contiguous();
  at::Tensor values = at::empty({N, is_int4 ? K / 2 : K}, weight.options().dtype(is_int4 ? at::kByte : at::kChar));
  at::Tensor scales = at::empty({N, groups}, weight.options().dtype(at::kHalf));
  with_type(weight.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    share_range(N, 16, [&](int64_t begin, int64_t end) {
      std::vector<float> x(padded);
      std::vector<int8_t> row(K + kLanes);
      for (int64_t n = begin; n < end; ++n) {
        for (int64_t g = 0; g < groups; ++g) {
          widen(rows.const_data_ptr<T>() + n * K + g * group_size, x.data(), group_size);
          const float scale = best_scale(x.data(), padded, rounding);
          scales.mutable_data_ptr<at::Half>()[n * groups + g] = scale;
          for (int64_t k = 0; k < padded; k += kLanes)
            narrow(rounding.nearest(load(x.data() + k), scale), row.data() + g * group_size + k);
        }
        if (is_int4) {
          auto* to = values.mutable_data_ptr<uint8_t>() + n * (K / 2);
          for (int64_t k = 0; k < K; k += 2) to[k / 2] = (row[k] + 8) | (row[k + 1] + 8) << 4;
        } else {
          std::memcpy(values.mutable_data_ptr<int8_t>() + n * K, row.data(), K);
        }
      }
    });
  });
  return {values, scales};
}

}  // namespace
}  // namespace quantizing

TORCH_LIBRARY_FRAGMENT(specdec, library) {
  library.def(
      "quantize_integers(Tensor weight, bool is_int4, int group_size, float[] clips, bool first_wins, int refinements) -> "
      "(Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(specdec, CPU, library) {
  library.impl("quantize_integers", quantizing::quantize_integers);
}
