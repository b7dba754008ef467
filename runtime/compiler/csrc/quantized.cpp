// Linear layers whose weights are in few bits, multiplied as floats: a panel's weights become float32 piece by piece, as they
// are read, and a piece is used for all tokens. Memory is read for the few bits only.
//
// Sums are taken in one order for each output, whatever other tokens there are. A plain way to compute them, right for
// every format; there are no layouts made for it.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Float8_e4m3fn.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "lanes.h"
#include "tasks.h"

namespace {

constexpr int64_t kOutputs = 32, kPieceDepth = 256;

// A layer's weight, by the rows of its outputs; see runtime/quantization/weight.py.
struct Quantized {
  const at::Tensor &values, scales;
  std::optional<at::Tensor> zeros, offsets;
  int64_t K, groups;

  Quantized(const at::Tensor& values, const at::Tensor& scales, const std::optional<at::Tensor>& zeros,
            const std::optional<at::Tensor>& offsets)
      : values(values), scales(scales.to(at::kFloat).contiguous()), offsets(offsets),
        K(values.size(1) * (values.scalar_type() == at::kByte ? 2 : 1)), groups(scales.size(1)) {
    if (zeros) this->zeros = zeros->to(at::kFloat).contiguous();
  }

  // Numbers k to k + depth of an output's row, within one group.
  void dequantize(int64_t row, int64_t k, int64_t depth, float* to) const {
    const int64_t place = row * groups + k / (K / groups);
    const float scale = scales.const_data_ptr<float>()[place];
    const float zero = zeros ? zeros->const_data_ptr<float>()[place] : 0;
    const float offset = offsets ? offsets->const_data_ptr<float>()[place] : 0;
    if (values.scalar_type() == at::kByte) {
      const uint8_t* bytes = values.const_data_ptr<uint8_t>() + row * (K / 2);
      const float begin = offsets ? 0 : zero + 8;
      for (int64_t i = 0; i < depth; ++i) {
        const uint8_t byte = bytes[(k + i) / 2];
        to[i] = static_cast<float>((k + i) % 2 ? byte >> 4 : byte & 15) - begin;
      }
    } else if (values.scalar_type() == at::kChar) {
      const int8_t* numbers = values.const_data_ptr<int8_t>() + row * K + k;
      const float begin = offsets ? -128 : zero;
      for (int64_t i = 0; i < depth; ++i) to[i] = static_cast<float>(numbers[i]) - begin;
    } else {
      const auto* numbers = values.const_data_ptr<c10::Float8_e4m3fn>() + row * K + k;
      for (int64_t i = 0; i < depth; ++i) to[i] = static_cast<float>(numbers[i]);
    }
    for (int64_t i = 0; i < depth; ++i) to[i] = to[i] * scale + offset;
  }
};

// sums (M, kOutputs) += x (M, depth) piece (depth, kOutputs)
void add(const float* x, int64_t stride, int64_t M, int64_t depth, const float* piece, float* sums) {
  constexpr int64_t kRegisters = kOutputs / kLanes;
  for (int64_t m = 0; m < M; ++m, sums += kOutputs) {
    Lanes sum[kRegisters];
    for (int64_t i = 0; i < kRegisters; ++i) sum[i] = load(sums + i * kLanes);
    for (int64_t k = 0; k < depth; ++k)
      for (int64_t i = 0; i < kRegisters; ++i) sum[i] += load(piece + k * kOutputs + i * kLanes) * x[m * stride + k];
    for (int64_t i = 0; i < kRegisters; ++i) store(sums + i * kLanes, sum[i]);
  }
}

template <typename T>
void run(const T* tokens, const Quantized& weight, const T* bias, T* out, int64_t M, int64_t N) {
  const int64_t K = weight.K, group_size = K / weight.groups;
  auto x = std::make_unique_for_overwrite<float[]>(M * K);
  widen(tokens, x.get(), M * K);
  share_tasks((N + kOutputs - 1) / kOutputs, [&](int64_t panel) {
    thread_local std::vector<float> sums, piece;
    float row[kPieceDepth];
    const int64_t first = panel * kOutputs, width = std::min(kOutputs, N - first);
    sums.assign(M * kOutputs, 0);
    piece.assign(kPieceDepth * kOutputs, 0);
    if (bias)
      for (int64_t m = 0; m < M; ++m) widen(bias + first, sums.data() + m * kOutputs, width);
    for (int64_t k = 0, depth; k < K; k += depth) {
      depth = std::min({kPieceDepth, K - k, group_size - k % group_size});
      for (int64_t n = 0; n < width; ++n) {
        weight.dequantize(first + n, k, depth, row);
        for (int64_t i = 0; i < depth; ++i) piece[i * kOutputs + n] = row[i];
      }
      add(x.get() + k, K, M, depth, piece.data(), sums.data());
    }
    for (int64_t m = 0; m < M; ++m)
      for (int64_t n = 0; n < width; ++n) out[m * N + first + n] = static_cast<T>(sums[m * kOutputs + n]);
  });
}

at::Tensor quantized_linear(const at::Tensor& x, const at::Tensor& values, const at::Tensor& scales,
                            const std::optional<at::Tensor>& zeros, const std::optional<at::Tensor>& offsets,
                            const std::optional<at::Tensor>& bias) {
  const Quantized weight(values, scales, zeros, offsets);
  const int64_t N = values.size(0), M = x.numel() / weight.K;
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = N;
  at::Tensor out = at::empty(shape, x.options()), rows = x.contiguous();
  const auto call = [&](auto zero) {
    using T = decltype(zero);
    run<T>(rows.const_data_ptr<T>(), weight, bias ? bias->const_data_ptr<T>() : nullptr, out.mutable_data_ptr<T>(), M, N);
  };
  if (x.scalar_type() == at::kFloat) call(float{});
  else if (x.scalar_type() == at::kBFloat16) call(at::BFloat16{});
  else call(at::Half{});
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(specdec, library) {
  library.def(
      "quantized_linear(Tensor x, Tensor values, Tensor scales, Tensor? zeros, Tensor? offsets, Tensor? bias) -> Tensor");
}
TORCH_LIBRARY_IMPL(specdec, CPU, library) { library.impl("quantized_linear", quantized_linear); }
