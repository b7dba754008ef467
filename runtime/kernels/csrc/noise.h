// The noise that makes a choice a sample: a number for each token, computed from its id and its position's key alone, by
// integers and one formula, which `runtime.core.sampling` has too. The token whose score and noise have the largest sum is a
// sample from the scores' softmax (Gumbel-max).

#pragma once

#include <cmath>
#include <cstdint>

#include "lanes.h"

namespace {

// A permutation of 32 bits of which each bit of the input changes every bit about half the time: two rounds of shifting and
// multiplying, with the constants that Wellons' search found to be least biased.
template <typename W>
inline W mixed(W x) {
  x ^= x >> 16;
  x *= 0x21f0aaadu;
  x ^= x >> 15;
  x *= 0x735a2d97u;
  return x ^ x >> 15;
}

// 32 bits for a token from the two halves of its position's key; with the halves exchanged, 32 other bits.
template <typename W>
inline W noise_bits(W token, uint32_t first, uint32_t second) {
  return mixed<W>(mixed<W>(token ^ first) ^ second);
}

struct Noise {
  uint32_t first, second;
  explicit Noise(uint64_t key) : first(static_cast<uint32_t>(key)), second(static_cast<uint32_t>(key >> 32)) {}

  // -log(-log(1 - v)), where the token's 52 bits are a v in (0, 1). It is large for small v, where floats are finest.
  double of(uint32_t token) const {
    const uint64_t upper = noise_bits(token, first, second), lower = noise_bits(token, second, first);
    const double v = static_cast<double>(2 * ((upper << 32 | lower) >> 12) + 1) * 0x1p-53;
    return -std::log(-std::log(1.0 - v));
  }

  // An upper bound on the noise of these tokens: -log(v), since -log(1 - v) is more than v. Of v it takes the 24 upper bits,
  // and for its logarithm a straight line between powers of 2, which is nowhere larger.
  Lanes at_most(Words tokens) const {
    const Words upper = noise_bits(tokens, first, second) >> 8;
    const Ints bits = (Ints)__builtin_convertvector((Ints)upper, Lanes);  // the exponent, and how far to the next one
    return __builtin_convertvector((127 + 24) * (1 << 23) - bits, Lanes) * (0.69314718f / (1 << 23)) + 1e-4f;
  }
};

constexpr double kLeastNoise = -3.7;  // below any noise: the least is -log(53 log 2)

}  // namespace
