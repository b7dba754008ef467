// What one core of this machine can do at most: operations of 8-bit products and of floats, and bytes read from memory.

#include <immintrin.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

// Seconds of this thread: the machine may have other work.
double now() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Operations a second, in thousands of millions, of an instruction that makes `operations` of them.
template <typename Vector, typename Multiply>
double measure(int operations, Vector factor, Multiply multiply) {
  constexpr int kSums = 12, kRounds = 2'000'000;  // sums that do not wait for each other
  Vector sums[kSums] = {};
  for (Vector& sum : sums) asm volatile("" : "+v"(sum));  // or the compiler would compute one sum for all
  double best = 0;
  for (int turn = 0; turn < 9; ++turn) {
    const double begin = now();
    for (int round = 0; round < kRounds; ++round) {
      asm volatile("" : "+v"(factor));  // another one each time, for all that the compiler knows
#pragma GCC unroll 12
      for (int i = 0; i < kSums; ++i) sums[i] = multiply(sums[i], factor);
    }
    for (Vector& sum : sums) asm volatile("" : : "v"(sum));
    best = std::max(best, 1e-9 * kSums * kRounds * operations / (now() - begin));
  }
  return best;
}

double read_memory() {
  std::vector<uint64_t> numbers(std::size_t{1} << 25, 1);  // 256 MB
  double best = 0;
  uint64_t total = 0;
  for (int turn = 0; turn < 9; ++turn) {
    const double begin = now();
    for (const uint64_t number : numbers) total += number;
    best = std::max(best, 1e-9 * 8 * static_cast<double>(numbers.size()) / (now() - begin));
  }
  asm volatile("" : : "r"(total));
  return best;
}

int main() {
#if defined(__AVX512VNNI__)
  const char* name = "AVX-512 VNNI";
  const double products = measure(128, _mm512_set1_epi8(1), [](__m512i sum, __m512i f) { return _mm512_dpbusd_epi32(sum, f, f); });
#elif defined(__AVXVNNI__)
  const char* name = "AVX2 VNNI";
  const double products = measure(64, _mm256_set1_epi8(1), [](__m256i sum, __m256i f) { return _mm256_dpbusd_avx_epi32(sum, f, f); });
#else
  const char* name = "AVX2";  // pairs of 16 bits: the product and its sum are two instructions
  const double products = measure(32, _mm256_set1_epi16(1), [](__m256i sum, __m256i f) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(sum, f));
  });
#endif
#if defined(__AVX512F__)
  const double floats = measure(32, _mm512_set1_ps(0.5f), [](__m512 sum, __m512 f) { return _mm512_fmadd_ps(sum, f, f); });
#else
  const double floats = measure(16, _mm256_set1_ps(0.5f), [](__m256 sum, __m256 f) { return _mm256_fmadd_ps(sum, f, f); });
#endif
  std::printf("{\"instructions\": \"%s\", \"integer_gops\": %.1f, \"float_gops\": %.1f, \"gb_per_s\": %.1f}\n", name,
              products, floats, read_memory());
}
