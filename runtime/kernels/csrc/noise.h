// The noise that makes a choice a sample: a number of each token that depends on the key of its position and on nothing
// else, by integers and one formula, which `runtime.core.sampling` has too. The token of the largest score and noise together is a
// sample of the scores' softmax (Gumbel-max).

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

// 32 bits of a token by the two halves of its position's key; with the halves exchanged, 32 others.
template <typename W>
inline W noise_bits(W token, uint32_t first, uint32_t second) {
  return mixed<W>(mixed<W>(token ^ first) ^ second);
}

struct Noise {
  uint32_t first, second;
  explicit Noise(uint64_t key) : first(static_cast<uint32_t>(key)), second(static_cast<uint32_t>(key >> 32)) {}

  // -log(-log(1 - v)) of the v in (0, 1) that 52 bits of the token say: it is large where v is small, where v is finest.
  double of(uint32_t token) const {
    const uint64_t upper = noise_bits(token, first, second), lower = noise_bits(token, second, first);
    const double v = static_cast<double>(2 * ((upper << 32 | lower) >> 12) + 1) * 0x1p-53;
    return -std::log(-std::log(1.0 - v));
  }

  // No less than that of these tokens: -log(v), by the 24 upper bits of v and with a line for its logarithm, which is no
  // larger; -log(1 - v) is more than v.
  Lanes at_most(Words tokens) const {
    const Words upper = noise_bits(tokens, first, second) >> 8;
    const Ints bits = (Ints)__builtin_convertvector((Ints)upper, Lanes);  // the exponent, and how far to the next one
    return __builtin_convertvector((127 + 24) * (1 << 23) - bits, Lanes) * (0.69314718f / (1 << 23)) + 1e-4f;
  }
};

constexpr double kLeastNoise = -3.7;  // none is less: -log(53 log 2)

}  // namespace
