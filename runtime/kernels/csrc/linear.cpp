// Linear layers on the CPU. `pack_linear` lays a weight (N, K) out as the products read it (products.h): (panels, K, kPanel);
// in bfloat16 (panels, K / 2, kPanel, 2), so that one instruction multiplies both numbers of a pair, where there is one.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "products.h"
#include "rows.h"

namespace {

// Matmul kernels that the processor supports for bfloat16.
std::vector<int64_t> arithmetics() {
  std::vector<int64_t> all{kFloat32};
#if defined(__AVX512BF16__)
  all.push_back(kPairs);
#endif
#if defined(__AMX_BF16__)
  if (may_use_tiles()) all.push_back(kTiles);
#endif
  return all;
}

constexpr int64_t kPackedAtOnce = 64;  // columns of a panel: its lines stay in the cache until they are whole

at::Tensor pack_linear(const at::Tensor& weight) {
  const int64_t N = weight.size(0), K = weight.size(1), panels = (N + kPanel - 1) / kPanel;
  at::Tensor packed = at::empty({panels, K, kPanel}, weight.options()), rows = weight.contiguous();
  with_type(weight.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    constexpr int64_t group = kGroup<T>;
    TORCH_CHECK(K % group == 0, "the weight must have an even number of columns");
    const T* source = rows.const_data_ptr<T>();
    T* target = packed.mutable_data_ptr<T>();
    if (N % kPanel != 0) std::memset(target + (panels - 1) * K * kPanel, 0, K * kPanel * sizeof(T));
    share_range(N, 32, [&](int64_t begin, int64_t end) {
      for (int64_t first = begin, last; first < end; first = last) {
        last = std::min(end, (first / kPanel + 1) * kPanel);
        T* panel = target + first / kPanel * K * kPanel;
        for (int64_t start = 0; start < K; start += kPackedAtOnce)
          for (int64_t n = first; n < last; ++n)
            for (int64_t k = start; k < std::min(K, start + kPackedAtOnce); k += group)
              for (int64_t i = 0; i < group; ++i)
                panel[k * kPanel + n % kPanel * group + i] = source[n * K + k + i];
      }
    });
  });
  return packed;
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                  int64_t num_outputs, int64_t arithmetic) {
  const int64_t K = packed.size(1), M = x.numel() / K;
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = num_outputs;
  at::Tensor out = at::empty(shape, x.options()), rows = x.contiguous();
  const void* start = bias ? bias->const_data_ptr() : nullptr;
  multiply_rows(packed.const_data_ptr(), {x.scalar_type(), rows.const_data_ptr(), start, out.mutable_data_ptr(), M, K,
                                          num_outputs}, arithmetic);
  return out;
}

}  // namespace

void multiply_rows(const void* panels, const Rows& rows, int64_t arithmetic) {
  with_type(rows.dtype, [&](auto zero) {
    using T = decltype(zero);
    multiply_in(arithmetic, rows.tokens_as<T>(), Panels<T>{static_cast<const T*>(panels), rows.inputs}, rows.bias_as<T>(),
                rows.out_as<T>(), rows.count, rows.inputs, rows.outputs);
  });
}

void multiply_few_rows(const void* panels, std::span<const FewRows> parts, const Rows& rows, int64_t arithmetic) {
  with_type(rows.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_product<T>(arithmetic, [&](auto kernel) {
      multiply_few_of_each<typename decltype(kernel)::type>(rows.tokens_as<T>(), static_cast<const T*>(panels), parts,
                                                            rows.bias_as<T>(), rows.out_as<T>(), rows.inputs, rows.outputs);
    });
  });
}

TORCH_LIBRARY_FRAGMENT(specdec, library) {
  library.def("pack_linear(Tensor weight) -> Tensor");
  library.def("linear(Tensor x, Tensor packed, Tensor? bias, int num_outputs, int arithmetic) -> Tensor");
  library.def("panel() -> int", [] { return kPanel; });
  library.def("arithmetics() -> int[]", arithmetics);
}
TORCH_LIBRARY_IMPL(specdec, CPU, library) {
  library.impl("pack_linear", pack_linear);
  library.impl("linear", linear);
}
