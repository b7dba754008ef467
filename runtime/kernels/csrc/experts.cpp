// Products of experts, whose weights are packed one below the other, each in whole panels: floats (`pack_linear`), or numbers
// in few bits (`pack_quantized`). An expert takes all of its tokens at once, and a token's bits are those of a linear layer:
// they do not depend on the expert's other tokens.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cstring>
#include <vector>

#include "packed_weight.h"
#include "rows.h"
#include "tasks.h"

namespace {

// Rows in the order of their experts.
struct Order {
  std::vector<int64_t> ends;    // expert e's rows are ends[e] to ends[e + 1], exclusive; ends[0] is 0
  std::vector<int64_t> row_at;  // each row's place in the output

  Order(const int64_t* expert_of, int64_t num_rows, int64_t num_experts) : ends(num_experts + 1), row_at(num_rows) {
    for (int64_t s = 0; s < num_rows; ++s) {
      TORCH_CHECK(0 <= expert_of[s] && expert_of[s] < num_experts, "there is no such expert: ", expert_of[s]);
      ++ends[expert_of[s] + 1];
    }
    for (int64_t e = 0; e < num_experts; ++e) ends[e + 1] += ends[e];
    std::vector<int64_t> next(ends.begin(), ends.end() - 1);
    for (int64_t s = 0; s < num_rows; ++s) row_at[next[expert_of[s]]++] = s;
  }
};

// Row s of the output is the product of expert chosen[s] with token s / k, where k is the number of experts per token.
at::Tensor experts_linear(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& chosen, int64_t num_outputs,
                          int64_t arithmetic, int64_t token_bits) {
  const int64_t K = x.size(-1), N = num_outputs, panels = (N + kPanel - 1) / kPanel;
  const int64_t num_experts = packed.size(0) / panels, num_rows = chosen.numel(), num_tokens = x.numel() / K;
  at::Tensor out = at::empty({num_rows, N}, x.options()), ids = chosen.contiguous(), tokens = x.contiguous();
  if (!num_rows) return out;
  const Order order(ids.const_data_ptr<int64_t>(), num_rows, num_experts);
  const bool is_float = packed.scalar_type() == x.scalar_type();
  const int64_t bytes = packed.numel() * packed.element_size() / num_experts, size = x.element_size();
  const auto* weights = static_cast<const char*>(packed.const_data_ptr());
  const auto weight = [&](int64_t e) { return PackedWeight(packed, K, e * bytes); };
  const int64_t most = is_float ? kFewRowsOfFloats : weight(0).takes_integers(token_bits) ? kFewRowsOfIntegers : 0;
  const bool is_one = num_tokens == 1 && most;  // a single token, whose row all experts read in place
  at::Tensor inputs = is_one ? tokens : at::empty({num_rows, K}, x.options());
  auto *in = static_cast<char*>(inputs.mutable_data_ptr()), *to = static_cast<char*>(out.mutable_data_ptr());
  const auto* of_tokens = static_cast<const char*>(tokens.const_data_ptr());
  constexpr int64_t part = 16;
  if (!is_one)
    share_range(num_rows, part, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        std::memcpy(in + i * K * size, of_tokens + order.row_at[i] / (num_rows / num_tokens) * K * size, K * size);
    });
  std::vector<FewRows> few;
  std::vector<int64_t> others;  // experts with more than `most` rows
  for (int64_t e = 0; e < num_experts; ++e) {
    const int64_t begin = order.ends[e], count = order.ends[e + 1] - begin;
    const int64_t* places = order.row_at.data() + begin;
    if (is_one) for (int64_t i = 0; i < count; ++i) few.push_back({e * bytes, 0, 1, places + i});
    else if (count > most) others.push_back(e);
    else if (count) few.push_back({e * bytes, begin, count, places});
  }
  const Rows rows{x.scalar_type(), in, nullptr, to, is_one ? 1 : num_rows, K, N};
  if (few.size() && is_float) multiply_few_rows(weights, few, rows, arithmetic);
  else if (few.size()) multiply_few_rows(weight(0), few, rows, token_bits);
  if (others.empty()) return out;
  at::Tensor products = at::empty({num_rows, N}, x.options());
  auto* made = static_cast<char*>(products.mutable_data_ptr());
  for (const int64_t e : others) {
    const int64_t begin = order.ends[e], count = order.ends[e + 1] - begin;
    const Rows own{x.scalar_type(), in + begin * K * size, nullptr, made + begin * N * size, count, K, N};
    if (is_float) multiply_rows(weights + e * bytes, own, arithmetic);
    else multiply_rows(weight(e), own, arithmetic, token_bits);
  }
  share_range(num_rows, part, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t e = ids.const_data_ptr<int64_t>()[order.row_at[i]];
      if (order.ends[e + 1] - order.ends[e] > most)
        std::memcpy(to + order.row_at[i] * N * size, made + i * N * size, N * size);
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(specdec, library) {
  library.def("experts_linear(Tensor x, Tensor packed, Tensor chosen, int num_outputs, int arithmetic, int token_bits)"
              " -> Tensor");
}
TORCH_LIBRARY_IMPL(specdec, CPU, library) { library.impl("experts_linear", experts_linear); }
