// Linear layers on the CPU for any number of tokens, made for few: then a step is reading the weights, and they are read
// once, in order, as fast as memory gives them.
//
// `pack_linear` lays a weight (N, K) out in panels of 32 outputs: (panels, K, 32) in float32; in bfloat16 (panels, K / 2,
// 32, 2), so that both numbers of a pair are multiplied by one instruction where there is one. Sums are float32.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "lanes.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kPanel = 2 * kLanes;
constexpr int64_t kRows = 12;     // of a tile: 24 sums, 2 pieces of a panel and a factor fit 32 registers
constexpr int64_t kDepth = 2048;  // of a panel at a time: its piece stays in the second-level cache
constexpr int64_t kAhead = 5120;  // bytes of a panel that are asked for before they are needed
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

inline void fetch_ahead(const void* p) {
  fetch_line(static_cast<const char*>(p) + kAhead);
  fetch_line(static_cast<const char*>(p) + kAhead + 64);
}

// sums (R x 32) += x (R x depth) panel (depth x 32)
template <int R>
inline void accumulate(const float* x, int64_t x_row, const float* panel, int64_t depth, Lanes (&sums)[R][2]) {
  for (int64_t k = 0; k < depth; ++k, panel += kPanel) {
    fetch_ahead(panel);
    const Lanes left = load<Lanes>(panel), right = load<Lanes>(panel + kLanes);
    for (int r = 0; r < R; ++r) {
      const float factor = x[r * x_row + k];
      sums[r][0] += left * factor;
      sums[r][1] += right * factor;
    }
  }
}

#if defined(__AVX512BF16__)
template <int R>
inline void accumulate(const at::BFloat16* x, int64_t x_row, const at::BFloat16* panel, int64_t depth,
                       Lanes (&sums)[R][2]) {
  for (int64_t k = 0; k < depth; k += 2, panel += 2 * kPanel) {
    fetch_ahead(panel);
    const auto left = load<__m512bh>(panel), right = load<__m512bh>(panel + kPanel);
    for (int r = 0; r < R; ++r) {
      const auto factor = (__m512bh)_mm512_set1_epi32(load<int32_t>(x + r * x_row + k));
      sums[r][0] = (Lanes)_mm512_dpbf16_ps((__m512)sums[r][0], left, factor);
      sums[r][1] = (Lanes)_mm512_dpbf16_ps((__m512)sums[r][1], right, factor);
    }
  }
}
#else
// bfloat16 is the upper half of a float: of a pair the first is the lower half of a word.
template <int R>
inline void accumulate(const at::BFloat16* x, int64_t x_row, const at::BFloat16* panel, int64_t depth,
                       Lanes (&sums)[R][2]) {
  for (int64_t k = 0; k < depth; k += 2, panel += 2 * kPanel) {
    fetch_ahead(panel);
    for (int half = 0; half < 2; ++half) {
      const Words pairs = load<Words>(panel + half * kPanel);
      const Lanes first = (Lanes)(pairs << 16), second = (Lanes)(pairs & 0xffff0000u);
      for (int r = 0; r < R; ++r)
        sums[r][half] += first * static_cast<float>(x[r * x_row + k]) + second * static_cast<float>(x[r * x_row + k + 1]);
    }
  }
}
#endif

// 32 numbers of a panel as T, the first `count` of them.
inline void narrow(const Lanes (&from)[2], float* to, int64_t count) { std::memcpy(to, from, count * sizeof(float)); }
inline void narrow(const Lanes (&from)[2], at::BFloat16* to, int64_t count) {
#if defined(__AVX512BF16__)
  const auto narrowed = _mm512_cvtne2ps_pbh((__m512)from[1], (__m512)from[0]);
  std::memcpy(to, &narrowed, count * sizeof(at::BFloat16));
#else
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<at::BFloat16>(from[i / kLanes][i % kLanes]);
#endif
}

// out (M, N) = x (M, K) weight^T + bias
template <typename T>
void run(const T* x, const T* packed, const T* bias, T* out, int64_t M, int64_t K, int64_t N) {
  const int64_t panels = (N + kPanel - 1) / kPanel, tiles = (M + kRows - 1) / kRows;
  // A task is a panel, or with many threads and tokens a part of the tokens of one.
  const int64_t parts = std::clamp<int64_t>(4 * at::get_num_threads() / panels, 1, tiles);
  share_tasks(panels * parts, [&](int64_t task) {
    thread_local std::vector<float> unfinished;  // sums of the columns so far, where there are more than kDepth
    const int64_t panel = task / parts, first = panel * kPanel, width = std::min(kPanel, N - first);
    const int64_t tile_begin = task % parts * tiles / parts, tile_end = (task % parts + 1) * tiles / parts;
    const int64_t from = tile_begin * M / tiles, to = tile_end * M / tiles;
    if (K > kDepth) unfinished.resize((to - from) * kPanel);
    float initial[kPanel] = {};
    if (bias) std::copy_n(bias + first, width, initial);
    for (int64_t k = 0; k < K; k += kDepth)
      for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
        const int64_t row = tile * M / tiles, rows = (tile + 1) * M / tiles - row;
        with_rows<kRows>(rows, [&](auto count) {
          float* before = unfinished.data() + (row - from) * kPanel;
          Lanes sums[count()][2];
          for (int r = 0; r < count(); ++r)
            for (int half = 0; half < 2; ++half)
              sums[r][half] = load((k ? before + r * kPanel : initial) + half * kLanes);
          accumulate<count()>(x + row * K + k, K, packed + (panel * K + k) * kPanel, std::min(kDepth, K - k), sums);
          for (int r = 0; r < count(); ++r) {
            if (k + kDepth >= K) narrow(sums[r], out + (row + r) * N + first, width);
            else std::memcpy(before + r * kPanel, sums[r], sizeof sums[r]);
          }
        });
      }
  });
}

// Of the float32 weight's columns each stands by itself, of the bfloat16 weight's two make a pair.
at::Tensor pack_linear(const at::Tensor& weight) {
  const int64_t N = weight.size(0), K = weight.size(1), panels = (N + kPanel - 1) / kPanel;
  const int64_t group = weight.scalar_type() == at::kFloat ? 1 : 2;
  TORCH_CHECK(K % group == 0, "the weight must have an even number of columns");
  at::Tensor packed = at::zeros({panels, K, kPanel}, weight.options()), rows = weight.contiguous();
  const auto call = [&](auto zero) {
    using T = decltype(zero);
    const T* source = rows.const_data_ptr<T>();
    T* target = packed.mutable_data_ptr<T>();
    at::parallel_for(0, N, 32, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n)
        for (int64_t k = 0; k < K; ++k)
          target[(n / kPanel * K + k / group * group) * kPanel + n % kPanel * group + k % group] = source[n * K + k];
    });
  };
  if (group == 1) call(float{});
  else call(at::BFloat16{});
  return packed;
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                  int64_t num_outputs) {
  const int64_t K = packed.size(1), M = x.numel() / K;
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = num_outputs;
  at::Tensor out = at::empty(shape, x.options()), rows = x.contiguous();
  const auto call = [&](auto zero) {
    using T = decltype(zero);
    run(rows.const_data_ptr<T>(), packed.const_data_ptr<T>(), bias ? bias->const_data_ptr<T>() : nullptr,
        out.mutable_data_ptr<T>(), M, K, num_outputs);
  };
  if (x.scalar_type() == at::kFloat) call(float{});
  else call(at::BFloat16{});
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(specdec, library) {
  library.def("pack_linear(Tensor weight) -> Tensor");
  library.def("linear(Tensor x, Tensor packed, Tensor? bias, int num_outputs) -> Tensor");
}
TORCH_LIBRARY_IMPL(specdec, CPU, library) {
  library.impl("pack_linear", pack_linear);
  library.impl("linear", linear);
}
