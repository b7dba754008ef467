// Library-wide operations: the digest of its sources, its set of instructions, and the float mode of its threads.

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <string>

namespace {

// Found in the file too: engines bring a library each, and a process can load only one of them.
__attribute__((used)) const char kMark[] = "specdec-kernels-of:" SPECDEC_SOURCES;

// The set of instructions that the library is compiled for, by the names in `runtime/kernels/library.py`; the best one
// whose instructions the compiler may use.
constexpr const char* instruction_set() {
#if defined(__AMX_TILE__)
  return "amx";
#elif defined(__AVX512BF16__)
  return "avx512-bf16";
#elif defined(__AVX512VNNI__)
  return "avx512-vnni";
#elif defined(__AVX512F__)
  return "avx512";
#elif defined(__AVXVNNI__)
  return "avx2-vnni";
#elif defined(__AVX2__)
  return "avx2";
#elif defined(__ARM_FEATURE_BF16)
  return "bf16";
#else
  return "baseline";
#endif
}

// Flushes denormals in OpenMP's existing threads; new threads inherit the mode of their creator.
void flush_denormals_of_openmp() {
  at::parallel_for(0, at::get_num_threads(), 1, [](int64_t, int64_t) { at::globalContext().setFlushDenormal(true); });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(specdec, library) {
  library.def("sources() -> str", [] { return std::string(SPECDEC_SOURCES); });
  library.def("instruction_set() -> str", [] { return std::string(instruction_set()); });
  library.def("flush_denormals_of_openmp() -> ()", flush_denormals_of_openmp);
}
