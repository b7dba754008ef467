// Depthwise causal convolution of tokens with the tokens before them, whose inputs are in their sequences' slots
// (`runtime.core.states`): the input of position p is at place p modulo the slot's length.
//
// Rows are taken in order, so that a row may continue the sequence of the row before. Threads share channels.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "lanes.h"
#include "tasks.h"

namespace {

constexpr int64_t kConvChannels = 256;  // that a thread takes together
static_assert(kConvChannels % kLanes == 0);

template <typename T, typename Weight>
struct ShortConv {
  const T* inputs;
  const Weight *weight, *bias;  // bias may be null
  T *pool, *output;
  const int64_t *positions, *slots, *state_slots;
  int64_t B, Q, channels, taps, length;

  // Reads the channels' weights in float32, tap by tap, (taps + 1, kConvChannels); the last row are the biases, or 0.
  void read_weights(int64_t begin, int64_t count, std::vector<float>& weights) const {
    weights.assign((taps + 1) * kConvChannels, 0.0f);
    for (int64_t c = 0; c < count; ++c) {
      for (int64_t tap = 0; tap < taps; ++tap)
        weights[tap * kConvChannels + c] = static_cast<float>(weight[(begin + c) * taps + tap]);
      if (bias) weights[taps * kConvChannels + c] = static_cast<float>(bias[begin + c]);
    }
  }

  // The inputs of the token `ago` tokens before token i of row b; null before the sequence's first token.
  const T* input_of(int64_t b, int64_t i, int64_t ago) const {
    if (i >= ago) return inputs + (b * Q + i - ago) * channels;
    const int64_t position = positions[b * Q] + i - ago;
    return position < 0 ? nullptr : pool + (state_slots[b] * length + position % length) * channels;
  }

  void compute_channels(int64_t begin, int64_t end) const {
    thread_local std::vector<float> weights;
    read_weights(begin, end - begin, weights);
    for (int64_t b = 0; b < B; ++b) {
      int64_t num_tokens = Q;
      while (num_tokens > 0 && slots[b * Q + num_tokens - 1] == 0) --num_tokens;  // padding
      for (int64_t i = 0; i < num_tokens; ++i) compute_token(b, i, begin, end, weights.data());
      for (int64_t i = num_tokens; i < Q; ++i) std::fill_n(output + (b * Q + i) * channels + begin, end - begin, T(0.0f));
      for (int64_t i = std::max<int64_t>(num_tokens - length, 0); i < num_tokens; ++i) {
        T* place = pool + (state_slots[b] * length + positions[b * Q + i] % length) * channels;
        std::copy(inputs + (b * Q + i) * channels + begin, inputs + (b * Q + i) * channels + end, place + begin);
      }
    }
  }

  void compute_token(int64_t b, int64_t i, int64_t begin, int64_t end, const float* weights) const {
    float sums[kConvChannels];
    std::copy_n(weights + taps * kConvChannels, end - begin, sums);
    for (int64_t tap = 0; tap < taps; ++tap) {
      const T* input = input_of(b, i, taps - 1 - tap);
      if (!input) continue;
      const float* factors = weights + tap * kConvChannels;
      int64_t c = 0;
      for (; c + kLanes <= end - begin; c += kLanes)
        store(sums + c, load(sums + c) + load(factors + c) * widen(input + begin + c));
      for (; c < end - begin; ++c) sums[c] += factors[c] * static_cast<float>(input[begin + c]);
    }
    T* to = output + (b * Q + i) * channels + begin;
    int64_t c = 0;
    for (; c + kLanes <= end - begin; c += kLanes) narrow(load(sums + c), to + c);
    for (; c < end - begin; ++c) to[c] = static_cast<T>(sums[c]);
  }
};

at::Tensor short_conv(const at::Tensor& inputs, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                      at::Tensor pool, const at::Tensor& positions, const at::Tensor& slots,
                      const at::Tensor& state_slots) {
  const at::Tensor x = inputs.contiguous(), factors = weight.contiguous();
  at::Tensor output = at::empty_like(x);
  const int64_t B = positions.size(0), Q = positions.size(1), channels = x.size(-1);
  TORCH_CHECK(x.numel() == B * Q * channels && pool.size(2) == channels && factors.size(0) == channels &&
                  state_slots.size(0) == B && pool.is_contiguous() && positions.is_contiguous() && slots.is_contiguous(),
              "short_conv is called with sizes that do not fit");
  const auto call_with = [&](auto zero, auto weight_zero) {
    using T = decltype(zero);
    using Weight = decltype(weight_zero);
    const ShortConv<T, Weight> conv{
        x.const_data_ptr<T>(), factors.const_data_ptr<Weight>(), bias ? bias->const_data_ptr<Weight>() : nullptr,
        pool.mutable_data_ptr<T>(), output.mutable_data_ptr<T>(), positions.const_data_ptr<int64_t>(),
        slots.const_data_ptr<int64_t>(), state_slots.const_data_ptr<int64_t>(), B, Q, channels, factors.size(1),
        pool.size(1)};
    share_range(channels, kConvChannels, [&](int64_t begin, int64_t end) { conv.compute_channels(begin, end); });
  };
  const auto call = [&](auto zero) {  // some models keep these weights in float32
    if (factors.scalar_type() == at::kFloat) call_with(zero, float{});
    else call_with(zero, zero);
  };
  if (x.scalar_type() == at::kFloat) call(float{});
  else if (x.scalar_type() == at::kHalf) call(at::Half{});
  else call(at::BFloat16{});
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(specdec, library) {
  library.def(
      "short_conv(Tensor inputs, Tensor weight, Tensor? bias, Tensor(a!) pool, Tensor positions, Tensor slots, Tensor "
      "state_slots) -> Tensor");
}
TORCH_LIBRARY_IMPL(specdec, CPU, library) { library.impl("short_conv", short_conv); }
