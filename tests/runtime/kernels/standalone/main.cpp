// The kernels beside their formulas in double precision, without torch: for compilers and processors that torch is not
// installed for, perhaps emulated, so the cases are few and small. Says how many there were, and which went wrong.

#include "experts.cpp"
#include "linear.cpp"
#include "paged_attention.cpp"
#include "quantized.cpp"
#include "sampling.cpp"
#include "vector_groups.h"

#include <numeric>
#include <random>

namespace {

int num_cases = 0, num_wrong = 0;

void check(bool right, const char* what, at::ScalarType type, int64_t size, int64_t other) {
  ++num_cases;
  if (right) return;
  ++num_wrong;
  const char* names[] = {"float32", "bfloat16", "float16"};
  std::printf("wrong: %s in %s, %d and %d, %d threads\n", what, names[type], int(size), int(other), at::num_threads);
}

std::mt19937 generator(0);

// Numbers around 0, rounded to T.
template <typename T>
at::Tensor random_tensor(std::vector<int64_t> shape, at::ScalarType type, float spread = 1) {
  at::Tensor tensor(shape, type);
  std::normal_distribution<float> normal(0, spread);
  for (int64_t i = 0; i < tensor.numel(); ++i) tensor.mutable_data_ptr<T>()[i] = static_cast<T>(normal(generator));
  return tensor;
}

bool near(double value, double expected, double tolerance) {
  return std::abs(value - expected) <= tolerance * (1 + std::abs(expected));
}

// Every arithmetic, with a bias and without; and every token by itself, which must have the same bits.
template <typename T>
void check_linear(at::ScalarType type, double tolerance, int64_t M, int64_t K, int64_t N) {
  const at::Tensor x = random_tensor<T>({M, K}, type), weight = random_tensor<T>({N, K}, type, 1 / std::sqrt(float(K)));
  const at::Tensor packed = pack_linear(weight), shift = random_tensor<T>({N}, type);
  for (int64_t arithmetic : arithmetics()) {
    for (bool with_bias : {false, true}) {
      const std::optional<at::Tensor> bias = with_bias ? std::optional(shift) : std::nullopt;
      const at::Tensor out = linear(x, packed, bias, N, arithmetic);
      bool right = true, same = true;
      for (int64_t m = 0; m < M; ++m) {
        at::Tensor token({1, K}, type);
        std::copy_n(x.const_data_ptr<T>() + m * K, K, token.mutable_data_ptr<T>());
        const at::Tensor alone = linear(token, packed, bias, N, arithmetic);
        for (int64_t n = 0; n < N; ++n) {
          double sum = with_bias ? float(shift.const_data_ptr<T>()[n]) : 0;
          for (int64_t k = 0; k < K; ++k)
            sum += double(float(token.const_data_ptr<T>()[k])) * float(weight.const_data_ptr<T>()[n * K + k]);
          const T value = out.const_data_ptr<T>()[m * N + n];
          right &= near(float(value), sum, tolerance);
          same &= std::memcmp(&value, alone.const_data_ptr<T>() + n, sizeof value) == 0;
        }
      }
      check(right, "a linear layer", type, M, K);
      check(same, "the bits of a token in a linear layer", type, M, K);
    }
  }
}

// What a token's numbers are rounded to in a group of columns, as docs/precision.md says; 0 bits: nothing.
void round_group(float* numbers, int64_t columns, int bits) {
  float largest = 0;
  for (int64_t k = 0; k < columns; ++k) largest = std::max(largest, std::abs(numbers[k]));
  const float step = largest / (bits == 8 ? 127 : 32639);
  for (int64_t k = 0; k < columns && bits; ++k) numbers[k] = step > 0 ? std::nearbyint(numbers[k] / step) * step : 0;
}

// Weights in int8, int4 or e4m3 in groups of 32 columns, with a zero point or without, tokens as they are or rounded; and
// every token by itself, which must have the same bits.
template <typename T>
void check_rounded(at::ScalarType type, double tolerance, at::ScalarType kind, int64_t M, int bits, bool with_zeros) {
  constexpr int64_t K = 192, N = 40, kGroup = 32, kGroups = K / kGroup;
  const bool is_int4 = kind == at::kByte;
  const at::Tensor x = random_tensor<T>({M, K}, type), values({N, is_int4 ? K / 2 : K}, kind);
  const float spread = kind == at::kChar ? 1e-3f : 1e-2f;  // so that weights are about as large as others'
  const at::Tensor scales = random_tensor<at::Half>({N, kGroups}, at::kHalf, spread);
  const at::Tensor zeros = random_tensor<float>({N, kGroups}, at::kFloat, 3);
  for (int64_t i = 0; i < zeros.numel(); ++i) zeros.mutable_data_ptr<float>()[i] = std::round(zeros.const_data_ptr<float>()[i]);
  std::vector<double> weight(N * K);
  for (int64_t i = 0; i < N * K; ++i) {
    double number;
    if (kind == at::kFloat8_e4m3fn) {
      const c10::Float8_e4m3fn rounded(std::normal_distribution<float>(0, 2)(generator));
      values.mutable_data_ptr<c10::Float8_e4m3fn>()[i] = rounded, number = float(rounded);
    } else if (is_int4) {
      const int nibble = generator() % 16;
      values.mutable_data_ptr<uint8_t>()[i / 2] |= nibble << i % 2 * 4, number = nibble - 8;
    } else {
      number = values.mutable_data_ptr<int8_t>()[i] = static_cast<int8_t>(generator() % 256 - 128);
    }
    const int64_t place = i / K * kGroups + i % K / kGroup;
    weight[i] = (number - (with_zeros ? zeros.const_data_ptr<float>()[place] : 0)) *
                float(scales.const_data_ptr<at::Half>()[place]);
  }
  const at::Tensor packed = pack_quantized(values, scales, with_zeros ? std::optional(zeros) : std::nullopt, std::nullopt);
  for (int64_t arithmetic : arithmetics()) {
    const at::Tensor out = quantized_linear(x, packed, std::nullopt, N, arithmetic, bits);
    bool right = true, same = true;
    for (int64_t m = 0; m < M; ++m) {
      at::Tensor token({1, K}, type);
      std::copy_n(x.const_data_ptr<T>() + m * K, K, token.mutable_data_ptr<T>());
      float numbers[K];
      for (int64_t k = 0; k < K; ++k) numbers[k] = float(token.const_data_ptr<T>()[k]);
      for (int64_t k = 0; k < K; k += kGroup) round_group(numbers + k, kGroup, bits);
      const at::Tensor alone = quantized_linear(token, packed, std::nullopt, N, arithmetic, bits);
      for (int64_t n = 0; n < N; ++n) {
        double sum = 0;
        for (int64_t k = 0; k < K; ++k) sum += double(numbers[k]) * weight[n * K + k];
        const T value = out.const_data_ptr<T>()[m * N + n];
        right &= near(float(value), sum, tolerance);
        same &= std::memcmp(&value, alone.const_data_ptr<T>() + n, sizeof value) == 0;
      }
    }
    check(right, "a rounded linear layer", type, M, bits);
    check(same, "the bits of a token in a rounded linear layer", type, M, bits);
  }
}

// Every finite number of e4m3, by tokens of a single 1 each, in groups that are no multiple of 4.
template <typename T>
void check_numbers(at::ScalarType type) {
  constexpr int64_t K = 42, N = 254, kGroups = 6;
  at::Tensor x({K, K}, type), values({N, K}, at::kFloat8_e4m3fn), scales({N, kGroups}, at::kFloat);
  for (int64_t k = 0; k < K; ++k) x.mutable_data_ptr<T>()[k * K + k] = static_cast<T>(1.0f);
  std::fill_n(scales.mutable_data_ptr<float>(), N * kGroups, -0.5f);
  for (int64_t i = 0; i < N * K; ++i) {
    const int code = (i / K + i % K) % N;
    values.mutable_data_ptr<uint8_t>()[i] = static_cast<uint8_t>(code < 127 ? code : code + 1);
  }
  const at::Tensor packed = pack_quantized(values, scales, std::nullopt, std::nullopt);
  for (int64_t arithmetic : arithmetics()) {
    const at::Tensor out = quantized_linear(x, packed, std::nullopt, N, arithmetic, 0);
    bool right = true;
    for (int64_t i = 0; i < N * K; ++i)
      right &= float(out.const_data_ptr<T>()[i % K * N + i / K]) ==
               -0.5f * float(values.const_data_ptr<c10::Float8_e4m3fn>()[i]);
    check(right, "the numbers of e4m3", type, K, arithmetic);
  }
}

// Queries of two heads for each key head, after `context` tokens, in blocks that lie in reverse order. Those that see
// chunks have capped scores and sinks too, those that see windows slopes.
template <typename T>
void check_attention(at::ScalarType type, double tolerance, int64_t Q, int64_t context, int64_t D, int64_t block_size,
                     int64_t window, int64_t attention_chunk, int64_t arithmetic) {
  const int64_t B = 2, Hk = 2, H = 4, num_keys = context + Q, N = (num_keys + block_size - 1) / block_size;
  const at::Tensor query = random_tensor<T>({1, H, B * Q, D}, type), key = random_tensor<T>({1, Hk, B * Q, D}, type);
  const at::Tensor value = random_tensor<T>({1, Hk, B * Q, D}, type);
  at::Tensor keys = random_tensor<T>({B * N, Hk, D, block_size}, type), values = random_tensor<T>({B * N, Hk, block_size, D}, type);
  at::Tensor positions({B, Q}, at::kLong), slots({B, Q}, at::kLong), tables({B, N}, at::kLong);
  for (int64_t i = 0; i < B * N; ++i) tables.mutable_data_ptr<int64_t>()[i] = B * N - 1 - i;
  const auto slot = [&](int64_t b, int64_t position) {
    return tables.const_data_ptr<int64_t>()[b * N + position / block_size] * block_size + position % block_size;
  };
  for (int64_t i = 0; i < B * Q; ++i) {
    positions.mutable_data_ptr<int64_t>()[i] = context + i % Q;
    slots.mutable_data_ptr<int64_t>()[i] = slot(i / Q, context + i % Q);
  }
  const double scale = 1 / std::sqrt(double(D));
  const double softcap = attention_chunk ? 1.5 : 0;
  const std::optional<at::Tensor> sinks = attention_chunk ? std::optional(random_tensor<T>({H}, type)) : std::nullopt;
  std::optional<at::Tensor> slopes;
  if (window) slopes = at::Tensor({H}, at::kFloat);
  for (int64_t head = 0; window && head < H; ++head) slopes->mutable_data_ptr<float>()[head] = 0.3f / float(1 + head);
  const at::Tensor out = paged_attention(query, key, value, keys, values, positions, slots, tables, scale, window, arithmetic,
                                         std::nullopt, sinks, softcap, attention_chunk, slopes);
  bool right = true;
  for (int64_t b = 0; b < B; ++b)
    for (int64_t q = 0; q < Q; ++q)
      for (int64_t head = 0; head < H; ++head) {
        const int64_t own = head / (H / Hk), last = context + q;
        const int64_t of_chunk = attention_chunk ? last - last % attention_chunk : 0;
        const int64_t first = window ? std::max(last - window + 1, int64_t{0}) : of_chunk;
        std::vector<double> sums(D);
        double total = sinks ? std::exp(double(float(sinks->const_data_ptr<T>()[head]))) : 0;
        for (int64_t position = first; position <= last; ++position) {
          const int64_t at = slot(b, position), block = at / block_size, offset = at % block_size;
          double score = 0;
          for (int64_t d = 0; d < D; ++d)
            score += double(float(query.const_data_ptr<T>()[(head * B * Q + b * Q + q) * D + d])) *
                     float(keys.const_data_ptr<T>()[((block * Hk + own) * D + d) * block_size + offset]);
          score *= scale;
          const double lost = slopes ? slopes->const_data_ptr<float>()[head] * double(last - position) : 0;
          const double weight = std::exp((softcap > 0 ? softcap * std::tanh(score / softcap) : score) - lost);
          total += weight;
          for (int64_t d = 0; d < D; ++d)
            sums[d] += weight * float(values.const_data_ptr<T>()[((block * Hk + own) * block_size + offset) * D + d]);
        }
        for (int64_t d = 0; d < D; ++d)
          right &= near(float(out.const_data_ptr<T>()[((b * Q + q) * H + head) * D + d]), sums[d] / total, tolerance);
      }
  check(right, "attention", type, Q, context);
}

// A token's noise by its position's key: -log(-log(1 - v)), v by 52 bits of two hashes and half a bit.
double noise_of(uint64_t token, uint64_t key) {
  const auto hash = [](uint64_t x) {
    x = (x ^ x >> 16) * 0x21f0aaad % (1ull << 32);
    x = (x ^ x >> 15) * 0x735a2d97 % (1ull << 32);
    return x ^ x >> 15;
  };
  const uint64_t low = key % (1ull << 32), high = key >> 32;
  const uint64_t upper = hash(hash(token ^ low) ^ high), lower = hash(hash(token ^ high) ^ low);
  return -std::log(-std::log1p(-(double(upper * (1 << 20) + lower / (1 << 12)) + 0.5) * 0x1p-52));
}

uint64_t random_key() { return uint64_t(generator()) << 32 | generator(); }

// Noise, and what it is at most.
void check_noise() {
  bool right = true;
  for (uint32_t token = 0; token < 40000; token += kLanes) {
    const Noise noise(random_key());
    const uint64_t key = uint64_t(noise.second) << 32 | noise.first;
    Words tokens;
    for (int lane = 0; lane < kLanes; ++lane) tokens[lane] = token + lane;
    const Lanes bound = noise.at_most(tokens);
    for (int lane = 0; lane < kLanes; ++lane) {
      const double expected = noise_of(token + lane, key);
      right &= near(noise.of(token + lane), expected, 1e-13) && bound[lane] >= expected && expected >= kLeastNoise;
    }
  }
  check(right, "noise", at::kFloat, 0, 0);
}

// How many of sorted scores, the last ones, are left by the cuts, of which top-p is given by itself.
int64_t count_left(const std::vector<float>& sorted, const Rules& rules, double top_p) {
  const int64_t size = sorted.size();
  const auto count_from = [&](double least) -> int64_t {
    return sorted.end() - std::lower_bound(sorted.begin(), sorted.end(), least);
  };
  const auto weight = [&](int64_t i) { return std::exp(double(sorted[size - i]) - sorted.back()); };
  int64_t left = count_from(-kLargestFloat);
  if (rules.top_k > 0 && rules.top_k < size) left = std::min(left, count_from(sorted[size - int64_t(rules.top_k)]));
  if (rules.top_p < 1) {
    double total = 0, sum = 0;
    for (int64_t i = 1; i <= left; ++i) total += weight(i);
    for (int64_t i = 1; i <= left && sum < top_p * total; ++i)
      if ((sum += weight(i)) >= top_p * total) left = i;
  }
  return std::min(left, count_from(sorted.back() + std::log(rules.min_p)));
}

// Whether what is left of a row's scores, and -inf, is what the cuts leave, and the token the one of the largest score and
// noise of those.
void check_row(const std::vector<float>& scores, const Rules& rules, const float* left, int64_t token, uint64_t key,
               at::ScalarType type) {
  const int64_t size = scores.size(), num_left = size - std::count(left, left + size, kNever);
  std::vector<int64_t> order(size);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return scores[a] < scores[b]; });
  std::vector<float> sorted;
  for (const int64_t i : order) sorted.push_back(scores[i]);
  const double rounding = 1e-6;  // of sums of weights in float32
  bool right = num_left >= count_left(sorted, rules, rules.top_p - rounding) &&
               num_left <= count_left(sorted, rules, rules.top_p + rounding);
  double best = -INFINITY;
  for (int64_t j = size - num_left; j < size; ++j) {
    right &= left[order[j]] == sorted[j];
    best = std::max(best, sorted[j] + noise_of(order[j], key));
  }
  check(right, "what cuts leave", type, size, num_left);
  if (rules.is_greedy) right = token == std::max_element(scores.begin(), scores.end()) - scores.begin();
  else right = token >= 0 && token < size && near(left[token] + noise_of(token, key), best, 1e-12);
  check(right, rules.is_greedy ? "the largest" : "a sample", type, size, num_left);
}

// Greedy and sampled, by each cut and by all together: rows of random numbers, of many equal ones (the largest too), with
// -inf, with NaN, with infinity, and of -inf alone.
template <typename T>
void check_choices(at::ScalarType type, int64_t num_rows, int64_t size) {
  const at::Tensor rows = random_tensor<T>({num_rows, size}, type, 3);
  T* numbers = rows.mutable_data_ptr<T>();
  for (int64_t i = 0; i < num_rows * size; ++i) {
    const int64_t row = i / size, place = i % size;
    if (row == 1) numbers[i] = static_cast<T>(std::min(std::round(float(numbers[i]) * 4) / 4, 3.0f));
    if ((row == 2 && place % 3 == 0) || row == 5) numbers[i] = static_cast<T>(-INFINITY);
    if (row == 3 && place == size / 2) numbers[i] = static_cast<T>(NAN);
    if (row == 4 && place == 0) numbers[i] = static_cast<T>(INFINITY);
  }
  const at::Tensor rules({num_rows, 8}, at::kDouble), keys({num_rows}, at::kLong), entries({0, 4}, at::kInt);
  const at::Tensor bans({0}, at::kInt), bounds({num_rows, 6}, at::kLong), drafts({num_rows}, at::kLong);
  for (const Rules& one : {Rules{1, 1, 0, 1, 0, 1, 0, 0}, Rules{0, 1, 0, 1, 0, 1, 0, 0}, Rules{0, 0.7, 0, 1, 0, 1, 0, 0},
                           Rules{0, 1, 1, 1, 0, 1, 0, 0}, Rules{0, 1.3, 20, 1, 0, 1, 0, 0}, Rules{0, 1, 0, 0.9, 0, 1, 0, 0},
                           Rules{0, 2, 0, 0.3, 0, 1, 0, 0}, Rules{0, 1, 0, 1, 0.1, 1, 0, 0},
                           Rules{0, 1.5, 30, 0.8, 0.05, 1, 0, 0}}) {
    auto* key = keys.mutable_data_ptr<uint64_t>();
    for (int64_t row = 0; row < num_rows; ++row) rules.mutable_data_ptr<Rules>()[row] = one, key[row] = random_key();
    auto* draft = drafts.mutable_data_ptr<int64_t>();
    std::fill(draft, draft + num_rows, -9);
    for (int64_t row = 0; row < num_rows; ++row) {  // behind a token that is not the draft's nothing is chosen
      const at::Tensor some = choose_rows({rows}, rules, keys, entries, bans, bounds, drafts);
      draft[row] = some.const_data_ptr<int64_t>()[row];
      check(draft[row] != kNotAsked, "as far as the draft is right", type, size, row);
    }
    const at::Tensor tokens = choose_rows({rows}, rules, keys, entries, bans, bounds, drafts);
    const auto [left, why] = scores_of_rows({rows}, rules, keys, entries, bans, bounds);
    for (int64_t row = 0; row < num_rows; ++row) {
      std::vector<float> scores;
      for (int64_t i = 0; i < size; ++i) scores.push_back(float(numbers[row * size + i]) / float(one.temperature));
      const bool has_numbers = std::all_of(scores.begin(), scores.end(), [](float v) { return v < INFINITY; }) &&
                               std::count(scores.begin(), scores.end(), kNever) < size;
      const int64_t token = tokens.const_data_ptr<int64_t>()[row], none = why.template const_data_ptr<int64_t>()[row];
      check(none == (has_numbers ? 0 : -1) && (has_numbers || token == -1), "no numbers", type, size, row);
      if (has_numbers) check_row(scores, one, left.template const_data_ptr<float>() + row * size, token, key[row], type);
    }
  }
}

// All of the 65,536 numbers of 16 bits, of NaNs only that they are none.
template <typename T>
void check_widening(at::ScalarType type) {
  bool right = true;
  for (int64_t first = 0; first < 1 << 16; first += kLanes) {
    T numbers[kLanes];
    for (int i = 0; i < kLanes; ++i) numbers[i] = T(static_cast<uint16_t>(first + i), T::from_bits());
    const Lanes wide = widen(numbers);
    for (int i = 0; i < kLanes; ++i) {
      const float expected = static_cast<float>(numbers[i]), value = wide[i];
      right &= std::isnan(expected) ? std::isnan(value) : std::memcmp(&value, &expected, sizeof value) == 0;
    }
  }
  check(right, "widening", type, 0, 0);
}

// Down to where nothing is left; of the least numbers of all, of infinity and of NaN.
void check_exp2() {
  bool right = true;
  std::vector<float> numbers{-126.0001f, -1e10f, -3e38f, -std::numeric_limits<float>::infinity(), NAN};
  for (int i = 0; i <= 200 * 8; ++i) numbers.insert(numbers.end(), {-i / 8.0f, -i / 8.0f - 0.0371f});
  for (const float number : numbers) {
    const float power = exp2_lanes(Lanes{} + number)[0];
    const double expected = number >= -126.0f ? std::exp2(double(number)) : 0;
    right &= std::isnan(number) ? std::isnan(power) : std::abs(power - expected) <= 3e-7 * expected;
  }
  check(right, "2 to the power", at::kFloat, 0, 0);
}

// A number as it is after an operation by itself: no other takes part in it.
template <typename T>
float alone(float x) {
  volatile float number = static_cast<T>(x);
  return number;
}

// Sums in parts, as a register has them.
float sum_in_parts(const std::vector<float>& x) {
  std::vector<float> parts(kLanes);
  for (size_t i = 0; i < x.size(); ++i) parts[i % kLanes] = alone<float>(parts[i % kLanes] + x[i]);
  float sum = 0;
  for (const float part : parts) sum = alone<float>(sum + part);
  return sum;
}

// Groups of operations have the bits of these one by one.
template <typename T, Rounding rounding>
void check_groups(at::ScalarType type, int64_t n) {
  const at::Tensor x = random_tensor<T>({n}, type), y = random_tensor<T>({n}, type), z = random_tensor<T>({n}, type);
  const at::Tensor weight = random_tensor<float>({n}, at::kFloat), bias = random_tensor<float>({n}, at::kFloat);
  const T *a = x.const_data_ptr<T>(), *b = y.const_data_ptr<T>(), *c = z.const_data_ptr<T>();
  const float *w = weight.const_data_ptr<float>(), *shift = bias.const_data_ptr<float>();
  std::vector<T> out(n);
  const auto compare = [&](const char* what, const auto& expected) {
    bool right = true;
    for (int64_t i = 0; i < n; ++i) right &= static_cast<float>(out[i]) == alone<T>(expected(i));
    check(right, what, type, n, kLanes);
  };
  add_row<rounding>(out.data(), a, b, n);
  compare("a sum", [&](int64_t i) { return float(a[i]) + float(b[i]); });
  std::vector<float> squares(n), centered(n);
  for (int64_t i = 0; i < n; ++i) squares[i] = alone<float>(float(a[i]) * float(a[i]));
  const float factor = 1.0f / std::sqrt(alone<float>(sum_in_parts(squares) / float(n)) + 1e-5f);
  for (const bool rounds_within : {false, true}) {
    rms_norm_row<rounding>(out.data(), a, w, 1, n, 1e-5f, rounds_within);
    compare("a norm", [&](int64_t i) {
      const float scaled = alone<float>(float(a[i]) * factor);
      return w[i] * (rounds_within ? alone<T>(scaled) : scaled);
    });
  }
  for (int64_t i = 0; i < n; ++i) centered[i] = float(a[i]);
  const float mean = alone<float>(sum_in_parts(centered) / float(n));
  for (int64_t i = 0; i < n; ++i) {
    centered[i] = alone<float>(float(a[i]) - mean);
    squares[i] = alone<float>(centered[i] * centered[i]);
  }
  const float of_centered = 1.0f / std::sqrt(alone<float>(sum_in_parts(squares) / float(n)) + 1e-5f);
  layer_norm_row<rounding>(out.data(), a, w, shift, n, 1e-5f);
  compare("a norm of differences", [&](int64_t i) {
    return alone<float>(alone<float>(centered[i] * of_centered) * w[i]) + shift[i];
  });
  gate_row<rounding>(out.data(), a, b, n, [](Lanes v) { return v < 0.0f ? Lanes{} : v; });
  compare("a gate", [&](int64_t i) { return std::max(float(a[i]), 0.0f) * float(b[i]); });
  if (n % 2) return;
  rotate_row<rounding>(out.data(), a, b, c, n);
  compare("a rotation", [&](int64_t i) {
    const float other = i < n / 2 ? -float(a[i + n / 2]) : float(a[i - n / 2]);
    return alone<T>(float(a[i]) * float(b[i])) + alone<T>(other * float(c[i]));
  });
}

template <typename T>
void check_all(at::ScalarType type, double tolerance, bool few) {
  for (int64_t M : {1, 2, 5, 13, 40}) check_linear<T>(type, tolerance, M, 64, 40);
  for (bool short_pieces : {false, true}) {  // of panels for many tokens, more than one to each thread
    takes_short_pieces = short_pieces;
    check_linear<T>(type, tolerance, 160, 64, 40);
    if (!few) check_linear<T>(type, tolerance, 160, 4200, 9);  // several pieces of either kind
  }
  takes_short_pieces = has_room_for_pieces();
  check_linear<T>(type, tolerance, 11, 2048, 33);  // rows that share places of a cache
  for (int64_t M : {1, 4, 6, 16}) check_linear<T>(type, tolerance, M, 66, 520);  // panels side by side, and one more
  check_linear<T>(type, tolerance, 25, 34, 7);
  check_linear<T>(type, tolerance, 3, 2100, 33);
  for (int64_t M : {1, 7, 40}) {
    for (at::ScalarType kind : {at::kChar, at::kByte})
      for (int bits : {0, 8, 16})
        for (bool with_zeros : {false, true}) check_rounded<T>(type, tolerance, kind, M, bits, with_zeros);
    check_rounded<T>(type, tolerance, at::kFloat8_e4m3fn, M, 0, false);
  }
  check_numbers<T>(type);
  for (int64_t arithmetic : {kFloat32, kPairs, kTiles})
    for (const auto& [window, chunk] : {std::pair{0, 0}, {37, 0}, {0, 45}}) {
      check_attention<T>(type, tolerance, 1, 300, 32, 32, window, chunk, arithmetic);
      check_attention<T>(type, tolerance, 6, 603, 16, 16, window, chunk, arithmetic);
      check_attention<T>(type, tolerance, 50, 0, 32, 32, window, chunk, arithmetic);
      check_attention<T>(type, tolerance, 3, 50, 12, 4, window, chunk, arithmetic);  // heads that are no multiple of a vector
    }
  for (int64_t size : {1, 15, 64, 1000}) check_choices<T>(type, 6, size);
  check_choices<T>(type, 2, 20000);  // pieces of rows, more threads than rows
}

}  // namespace

// With an argument it tries fewer, for a program that is compiled without optimization.
int main(int num_arguments, char**) {
  const bool few = num_arguments > 1;
  check_exp2();
  check_noise();
  check_widening<at::BFloat16>(at::kBFloat16);
  check_widening<at::Half>(at::kHalf);
  for (int64_t n : {1, 8, 36, 64, 130}) {
    check_groups<float, Rounding::kNone>(at::kFloat, n);
    check_groups<at::BFloat16, Rounding::kBFloat16>(at::kBFloat16, n);
    check_groups<at::Half, Rounding::kHalf>(at::kHalf, n);
  }
  for (int threads : {1, 3}) {
    if (few && threads == 1) continue;
    at::num_threads = threads;
    check_all<float>(at::kFloat, 2e-5, few);
    check_all<at::BFloat16>(at::kBFloat16, 2e-2, few);
    check_all<at::Half>(at::kHalf, 2e-3, few);
  }
  std::printf("registers of %d floats, %d arithmetics: %d cases, %d wrong\n", int(kLanes), int(arithmetics().size()),
              num_cases, num_wrong);
  return num_wrong > 0;
}
