// Linear layers on the CPU. `pack_linear` lays a weight (N, K) out as the products read it (products.h): (panels, K, 32); in
// bfloat16 (panels, K / 2, 32, 2), so that both numbers of a pair are multiplied by one instruction where there is one.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "products.h"

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

at::Tensor pack_linear(const at::Tensor& weight) {
  const int64_t N = weight.size(0), K = weight.size(1), panels = (N + kPanel - 1) / kPanel;
  at::Tensor packed = at::zeros({panels, K, kPanel}, weight.options()), rows = weight.contiguous();
  with_type(weight.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    constexpr int64_t group = kGroup<T>;
    TORCH_CHECK(K % group == 0, "the weight must have an even number of columns");
    const T* source = rows.const_data_ptr<T>();
    T* target = packed.mutable_data_ptr<T>();
    share_range(N, 32, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n)
        for (int64_t k = 0; k < K; ++k)
          target[(n / kPanel * K + k / group * group) * kPanel + n % kPanel * group + k % group] = source[n * K + k];
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
  with_type(x.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    multiply_in(arithmetic, rows.const_data_ptr<T>(), Panels<T>{packed.const_data_ptr<T>(), K},
                bias ? bias->const_data_ptr<T>() : nullptr, out.mutable_data_ptr<T>(), M, K, num_outputs);
  });
  return out;
}

// Products of experts, whose weights are packed one below the other, each in whole panels. Row s of the output is
// chosen[s]'s of its token: of every token there are as many rows. An expert takes all of its tokens at once, and a token's
// bits are those of a linear layer: they do not depend on which others it has.
at::Tensor experts_linear(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& chosen, int64_t num_outputs,
                          int64_t arithmetic) {
  const int64_t K = packed.size(1), N = num_outputs, panels = (N + kPanel - 1) / kPanel;
  const int64_t num_experts = packed.size(0) / panels, num_rows = chosen.numel(), num_tokens = x.numel() / K;
  at::Tensor out = at::empty({num_rows, N}, x.options()), ids = chosen.contiguous(), tokens = x.contiguous();
  if (!num_rows) return out;
  const int64_t* expert_of = ids.const_data_ptr<int64_t>();
  const int64_t rows_of_token = num_rows / num_tokens;
  std::vector<int64_t> ends(num_experts + 1), row_at(num_rows);
  for (int64_t s = 0; s < num_rows; ++s) {
    TORCH_CHECK(0 <= expert_of[s] && expert_of[s] < num_experts, "there is no such expert: ", expert_of[s]);
    ++ends[expert_of[s] + 1];
  }
  for (int64_t e = 0; e < num_experts; ++e) ends[e + 1] += ends[e];
  std::vector<int64_t> next(ends.begin(), ends.end() - 1);
  for (int64_t s = 0; s < num_rows; ++s) row_at[next[expert_of[s]]++] = s;
  at::Tensor inputs = at::empty({num_rows, K}, x.options()), products = at::empty({num_rows, N}, x.options());
  with_type(x.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const T* of_tokens = tokens.const_data_ptr<T>();
    const T* weight = packed.const_data_ptr<T>();
    T* in = inputs.mutable_data_ptr<T>();
    T* made = products.mutable_data_ptr<T>();
    T* rows = out.mutable_data_ptr<T>();
    constexpr int64_t part = 16;
    share_range(num_rows, part, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) std::copy_n(of_tokens + row_at[i] / rows_of_token * K, K, in + i * K);
    });
    for (int64_t e = 0; e < num_experts; ++e)
      if (const int64_t begin = ends[e], count = ends[e + 1] - begin; count)
        multiply_in(arithmetic, in + begin * K, Panels<T>{weight + e * panels * K * kPanel, K},
                    static_cast<const T*>(nullptr), made + begin * N, count, K, N);
    share_range(num_rows, part, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) std::copy_n(made + i * N, N, rows + row_at[i] * N);
    });
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(specdec, library) {
  library.def("pack_linear(Tensor weight) -> Tensor");
  library.def("linear(Tensor x, Tensor packed, Tensor? bias, int num_outputs, int arithmetic) -> Tensor");
  library.def("experts_linear(Tensor x, Tensor packed, Tensor chosen, int num_outputs, int arithmetic) -> Tensor");
  library.def("panel() -> int", [] { return kPanel; });
  library.def("arithmetics() -> int[]", arithmetics);
}
TORCH_LIBRARY_IMPL(specdec, CPU, library) {
  library.impl("pack_linear", pack_linear);
  library.impl("linear", linear);
  library.impl("experts_linear", experts_linear);
}
